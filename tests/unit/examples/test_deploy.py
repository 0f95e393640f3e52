"""What of examples/deploy can be checked without its platforms: schemas, shell scripts. More: `make test-deploy`."""

import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.support import ROOT

DEPLOY = ROOT / "examples" / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
SCRIPTS = [
    *sorted(DEPLOY.rglob("*.sh")),
    *sorted(DEPLOY.rglob("*.sbatch")),
    ROOT / "tests" / "deploy" / "run",
]
# The first one with containers that start before the others and stay, and the newest known.
KUBERNETES = ("1.29", kubernetes_validate.latest_version())


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_is_valid(path: Path, version: str) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_wrong_manifest_is_found() -> None:
    (document,) = yaml.safe_load_all((DEPLOY / "kubernetes" / "job.yaml").read_text())
    document["spec"]["template"]["spec"]["terminationGraceSeconds"] = 40
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGraceSeconds"):
        kubernetes_validate.validate(document, KUBERNETES[0], strict=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_script_has_no_finding(path: Path) -> None:
    checked = subprocess.run(
        ["shellcheck", "--external-sources", "--source-path=SCRIPTDIR", f"--source-path={ROOT}", path],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout
