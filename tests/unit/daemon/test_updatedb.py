"""updatedb stays out of mounts: installation says so in its configuration, and `doctor` where that is missing."""

import subprocess
from pathlib import Path

import pytest

from fusecache.daemon import checkup
from tests.support import ROOT

SCRIPT = ROOT / "systemd" / "fusecache-updatedb"
# Debian's plocate, Red Hat's mlocate, one that a person has written, and one without the line.
TEXTS = {
    "debian": 'PRUNE_BIND_MOUNTS="yes"\n# PRUNENAMES=".git .bzr"\nPRUNEPATHS="/tmp"\nPRUNEFS="NFS afs fuse.sshfs"\n',
    "red hat": 'PRUNE_BIND_MOUNTS = "yes"\nPRUNEFS = "9p afs fuse.sshfs"\nPRUNENAMES = ".git"\n',
    "by hand": '# PRUNEFS="fuse.fusecache"\n  PRUNEFS\t=\t"my-fuse.fusecache-like"\n',
    "without": 'PRUNEPATHS="/tmp"\n',
    "empty": "",
}


def configure(word: str, file: Path) -> str:
    subprocess.run([SCRIPT, word, file], check=True)
    return file.read_text()


def finding() -> list[str]:
    return [each.level for each in checkup.node_findings() if each.subject == "updatedb"]


@pytest.fixture(params=TEXTS)
def file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "updatedb.conf"
    path.write_text(TEXTS[request.param])
    monkeypatch.setattr(checkup, "UPDATEDB", path)
    return path


def test_installation_adds_the_type_once_and_its_removal_leaves_the_file_as_it_was(file: Path) -> None:
    before = file.read_text()
    assert finding() == ["warning"]
    added = configure("add", file)
    assert finding() == ["ok"]
    assert configure("add", file) == added
    kept = [line for line in before.splitlines() if not line.strip().startswith("PRUNEFS")]
    assert [line for line in added.splitlines() if line in kept] == kept
    assert configure("remove", file) == before
    assert configure("remove", file) == before
    assert finding() == ["warning"]


def test_without_updatedb_there_is_nothing_to_do_or_to_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = tmp_path / "updatedb.conf"
    monkeypatch.setattr(checkup, "UPDATEDB", absent)
    for word in ("add", "remove"):
        subprocess.run([SCRIPT, word, absent], check=True)
    assert not absent.exists()
    assert finding() == []
