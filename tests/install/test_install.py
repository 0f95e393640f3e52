"""What each extra brings: the wheel in a bare virtual environment, without a compiler.

Without a network, the packages that an extra asks for are linked from this environment, and no others. With
FUSECACHE_TEST_INSTALL=1 (`make test-install`) pip fetches them, and installs the lock file beside it.
"""

import os
import re
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from fusecache.cli.extras import MODULES
from tests.support import ROOT

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
USES_PIP = bool(os.environ.get("FUSECACHE_TEST_INSTALL"))
READS_A_DATASET = """
import sys, numpy
from loader import ElasticBatchSampler, MDSDataset, MDSWriter
with MDSWriter(sys.argv[1], {"x": "ndarray:int32:4"}, compression="zstd:3", hashes=["xxh64"]) as writer:
    for number in range(8):
        writer.write({"x": numpy.full(4, number, numpy.int32)})
dataset = MDSDataset(sys.argv[1])
sampler = ElasticBatchSampler(dataset, global_batch_size=4, seed=17)
print(sorted(int(dataset[int(i)]["x"][3]) for batch in sampler for i in batch))
"""
MOUNTS = """
import sys
import fusecache.daemon.main
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.library import open_session
from fusecache.fuse.values import MountPlan
session = open_session(RequestHandlers(), MountPlan(sys.argv[1], "nothing", "fusecache"))
print(session.library)
session.close()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package's wheel, built from a copy: a build leaves its leftovers where it is done."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "fusecache", "loader"):
        subprocess.run(
            ["rsync", "--archive", "--exclude=__pycache__", ROOT / name, folder / "source"], check=True
        )
    words = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
    subprocess.run([*PIP, *words], check=True)
    (built,) = folder.glob("*.whl")
    return built


class BareEnvironment:
    """A virtual environment with the wheel and an extra; its programs find no compiler."""

    def __init__(self, folder: Path, wheel: Path, extra: str = "") -> None:
        self.folder = folder
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        wanted = f"{wheel}[{extra}]" if extra else str(wheel)
        if USES_PIP:
            self._pip("--only-binary", ":all:", wanted)
            return
        self._pip("--no-deps", "--no-index", str(wheel))
        for distribution in _closure(Requirement(f"fusecache[{extra}]" if extra else "fusecache")):
            self._link(distribution)

    def _pip(self, *words: str) -> None:
        command = [*PIP, "--python", str(self.python), "install", *words]
        subprocess.run(command, check=True, env=self._environment())

    def _link(self, distribution: metadata.Distribution) -> None:
        (packages,) = self.folder.glob("lib/python*/site-packages")
        for name in {Path(str(file)).parts[0] for file in distribution.files or ()} - {".."}:
            if not (packages / name).exists():
                (packages / name).symlink_to(str(distribution.locate_file(name)))

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        return {**kept, "PATH": str(self.folder / "bin"), "HOME": str(self.folder), "CC": "no-compiler"}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *words],
            capture_output=True, text=True, check=False, cwd=self.folder, env=self._environment(),
        )  # fmt: skip

    def command_of(self, extra: str) -> tuple[str, str]:
        """Return how a message ends that names what installs an extra here: with the system's pip, or ensurepip."""
        what = f"install 'fusecache[{extra}]'\n"
        return f"pip --python {self.python} {what}", f"{self.python} -m pip {what}"


def _closure(first: Requirement) -> list[metadata.Distribution]:
    """What a requirement of the wheel's brings, directly or not; the wheel itself left out."""
    found: dict[str, metadata.Distribution] = {}
    asked, waiting = set(), [first]
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in asked:
            continue
        asked.add(str(requirement))
        if requirement.name == "fusecache":
            texts = _declared(requirement.extras)
        else:
            distribution = found.setdefault(requirement.name, metadata.distribution(requirement.name))
            texts = distribution.requires or []
        for each in map(Requirement, texts):
            marks = [{"extra": extra} for extra in (requirement.extras or {""})]
            if each.marker is None or any(each.marker.evaluate(mark) for mark in marks):
                waiting.append(each)
    return list(found.values())


def _declared(extras: set[str]) -> list[str]:
    """What extras ask for; an extra that names another one of this package asks for that one's, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"]]
    for text in (each for extra in extras for each in project["optional-dependencies"][extra]):
        requirement = Requirement(text)
        texts += _declared(requirement.extras) if requirement.name == "fusecache" else [text]
    return texts


def test_loader_reads_without_fuse_or_compiler(wheel: Path, tmp_path: Path) -> None:
    bare = BareEnvironment(tmp_path / "venv", wheel, "loader")
    read = bare.run("-c", READS_A_DATASET, str(tmp_path / "data"))
    assert read.stdout == f"{list(range(8))}\n", read.stderr
    listed = bare.run("-m", "loader", "ls", str(tmp_path / "data"))
    assert "8" in listed.stdout, listed.stderr
    assert "No module named 'pyfuse3'" in bare.run("-c", "import pyfuse3").stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts without fusermount3")
def test_in_a_trainers_environment_the_nodes_own_program_mounts(wheel: Path, tmp_path: Path) -> None:
    bare = BareEnvironment(tmp_path / "venv", wheel, "loader")
    nodes = tmp_path / "bin" / "fusecache"
    nodes.parent.mkdir()
    nodes.write_text('#!/bin/sh\necho "$0" "$@"\n')
    nodes.chmod(0o755)

    def answer(*words: str, path: str) -> str:
        ended = subprocess.run(
            ["fusecache", *words], capture_output=True, text=True, check=False, env={"PATH": path}
        )  # fmt: skip
        return ended.stdout or ended.stderr

    first = f"{bare.python.parent}:{nodes.parent}"
    assert answer("mount", "s3://bucket", "/data", path=first) == f"{nodes} mount s3://bucket /data\n"
    assert "usage: fusecache dataset" in answer("dataset", "--help", path=first)
    assert "needs boto3" in answer("mount", "s3://bucket", "/data", path=str(bare.python.parent))
    # An environment may be there twice, and a program may lead back: none asks the other for ever.
    other = BareEnvironment(tmp_path / "other", wheel)
    mine, others = bare.python.parent, other.python.parent
    assert answer("mount", path=f"{mine}:{mine}/:{nodes.parent}") == f"{nodes} mount\n"
    back = tmp_path / "back" / "fusecache"
    back.parent.mkdir()
    back.write_text(f'#!/bin/sh\nexec {mine}/fusecache "$@"\n')
    back.chmod(0o755)
    for path in (f"{others}:{mine}", f"{mine}:{others}:{mine}", f"{mine}:{back.parent}"):
        assert "needs boto3" in answer("mount", "s3://bucket", "/data", path=path)


def test_the_daemon_mounts_without_pyfuse3_or_compiler(wheel: Path, tmp_path: Path) -> None:
    bare = BareEnvironment(tmp_path / "venv", wheel, "mount")
    (tmp_path / "mnt").mkdir()
    mounted = bare.run("-c", MOUNTS, str(tmp_path / "mnt"))
    assert mounted.stdout == "own\n", mounted.stderr
    assert "No module named 'pyfuse3'" in bare.run("-c", "import pyfuse3").stderr
    words = ["mount", "s3://bucket", str(tmp_path / "mnt"), "--fuse-library", "pyfuse3"]
    assert bare.run("-m", "fusecache", *words).stderr.endswith(bare.command_of("pyfuse3"))


@pytest.mark.parametrize(
    "words",
    [
        ["mount", "s3://bucket", "/mnt"],
        ["mount", "s3://bucket", "/mnt", "--foreground"],
        ["access", "s3://bucket"],
        ["clean", "s3://bucket", "--wipe"],
        ["uploads", "s3://bucket"],
    ],
)
def test_command_names_the_missing_extra(words: list[str], base: BareEnvironment) -> None:
    ended = base.run("-m", "fusecache", *words)
    assert ended.returncode in (1, 2)
    assert re.match(r"fusecache: error: this command needs \w+: ", ended.stderr)
    assert ended.stderr.endswith(base.command_of("mount"))
    assert ended.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> BareEnvironment:
    """The base alone."""
    return BareEnvironment(tmp_path_factory.mktemp("base") / "venv", wheel)


def test_base_asks_mounts_and_prints_versions(base: BareEnvironment) -> None:
    assert base.run("-m", "fusecache", "version").stdout == f"fusecache {_version()}\n"
    assert "is not in a fusecache mount" in (ended := base.run("-m", "fusecache", "status", "/")).stderr, (
        ended
    )


def test_import_of_loader_names_its_extra(base: BareEnvironment) -> None:
    assert base.run("-c", "import loader").stderr.endswith(base.command_of("loader"))


def test_wheel_says_what_it_is(base: BareEnvironment) -> None:
    asks = """
from importlib import metadata
facts = metadata.distribution("fusecache")
print(facts.version, facts.metadata["License-Expression"], *(file for file in facts.files if file.name == "py.typed"))
"""
    assert base.run("-c", asks).stdout.split() == [
        _version(), "Apache-2.0", "fusecache/py.typed", "loader/py.typed"
    ]  # fmt: skip


def _version() -> str:
    (line,) = re.findall(r'__version__ = "(.*)"', (ROOT / "fusecache" / "__init__.py").read_text())
    return str(line)


def test_table_of_modules_is_the_declared_one() -> None:
    names = {"botocore": "boto3", "prometheus_client": "prometheus-client"}
    for extra, modules in MODULES.items():
        declared = {Requirement(text).name for text in _declared({extra})} - {"tqdm"}
        assert {names.get(module, module) for module in modules} == declared


def test_lock_file_satisfies_every_requirement() -> None:
    lines = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    rows = [line.split() for line in lines if line[:1].isalnum()]
    locked = {(pin := Requirement(row[0])).name: str(pin.specifier).removeprefix("==") for row in rows}
    assert all("--hash=sha256:" in " ".join(row) for row in rows)
    for text in _declared({"pyfuse3", "metrics"}):
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[requirement.name]), text
