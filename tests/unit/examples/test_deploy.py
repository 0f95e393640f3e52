"""What of examples/deploy can be checked without its platforms: schemas, shell scripts. More: `make test-deploy`."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from fusecache.cli.main import make_parser
from tests.support import ROOT
from tests.support.deploy_files import DEPLOY, Command, compose_commands, pod_commands

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


COMMANDS = [
    *(
        (path, command)
        for path in sorted(DEPLOY.glob("compose/*.yaml"))
        for command in compose_commands(path, {"TRAIN": "true"})
    ),
    *((path, command) for path in MANIFESTS for command in pod_commands(path) if command[0][0] != "python"),
]


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=lambda each: getattr(each, "stem", ""))
def test_commands_of_containers_are_whole(path: Path, command: Command) -> None:
    """A shell accepts them, each variable is one of the container, and `fusecache` knows its arguments."""
    words, environment = command
    lines = [words]
    if words[0] == "sh":
        script = words[words.index("sh") + 2]
        assert subprocess.run(["sh", "-n", "-c", script], check=False).returncode == 0
        own = set(re.findall(r"\b(\w+)=", script))
        assert set(re.findall(r"\$\{?([A-Za-z_]\w*)", script)) <= {*environment, *own}
        text = script.replace("\\\n", " ")
        lines = [
            shlex.split(each)
            for each in re.findall(r"^(?:exec )?(fusecache .*?)(?: \|\|.*)?$", text, re.MULTILINE)
        ]
        assert lines
    for line in lines:
        assert line[0] == "fusecache"
        known = line[: line.index("--")] if "--" in line else line
        make_parser().parse_args([word.replace("$", "") for word in known[1:]])


@pytest.mark.parametrize("path", sorted(DEPLOY.glob("compose/*.yaml")), ids=lambda path: path.stem)
def test_the_readme_says_what_a_compose_file_asks_for(path: Path) -> None:
    asked = set(re.findall(r"(?<!\$)\$\{(\w+)\}", path.read_text()))
    block = (DEPLOY / "README.md").read_text().partition("cat >.env <<END\n")[2].partition("END\n")[0]
    assert asked <= set(re.findall(r"^(\w+)=", block, re.MULTILINE))


def test_images_have_the_name_that_the_docs_give_them() -> None:
    """What `make release` builds is tagged, and pushed, as the files name it."""
    assert (
        "podman tag localhost/fusecache:0.4.0 fusecache:latest"
        in (ROOT / "docs/how-to/install.md").read_text()
    )
    assert "for tag in 0.4.0 latest" in (ROOT / "docs/how-to/release.md").read_text()
    files = [*MANIFESTS, *DEPLOY.glob("compose/*.yaml")]
    named = {
        name
        for path in files
        for name in re.findall(r"(?:image: |:-)([\w/]*fusecache:[\w.]+)", path.read_text())
    }
    assert named == {"REGISTRY/fusecache:latest", "fusecache:latest"}


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
