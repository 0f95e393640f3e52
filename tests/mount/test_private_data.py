"""What a daemon keeps on the node: other users cannot read its cache, and no core dump holds its keys."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounts import Mount, run, run_python


def open_to_others(folder: Path) -> list[str]:
    """Return what of a cache directory has any permission for group or others, where its folders are entered."""
    found = []
    for path in folder.iterdir():
        if path.name != "notes" and stat.S_IMODE(path.lstat().st_mode) & 0o077:
            found.append(path.name)
    return found


def test_cache_directory_becomes_private(mount: Callable[..., Mount], tmp_path: Path) -> None:
    """A person made it before, open to all, as `install -d` does; an older version made folders in it."""
    (cache := tmp_path / "cache").mkdir(mode=0o755)
    (cache / "journal").mkdir(mode=0o755)
    one = mount(cache=cache)
    (one.path / "file").write_bytes(b"1")
    one.sync()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert open_to_others(cache) == []


def test_disk_with_other_things_keeps_its_mode(mount: Callable[..., Mount], tmp_path: Path) -> None:
    (cache := tmp_path / "disk").mkdir(mode=0o755)
    (cache / "notes").mkdir(mode=0o755)
    one = mount(cache=cache)
    (one.path / "file").write_bytes(b"1")
    one.sync()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755
    assert stat.S_IMODE((cache / "notes").stat().st_mode) == 0o755
    assert open_to_others(cache) == []


def test_daemon_leaves_no_core_dump(mount: Callable[..., Mount]) -> None:
    one = mount()
    limits = Path(f"/proc/{one.pid}/limits").read_text().splitlines()
    (line,) = [each for each in limits if each.startswith("Max core file size")]
    assert line.split()[4:6] == ["0", "0"]


def test_core_dump_programs_get_nothing() -> None:
    """A core_pattern that is a program ignores RLIMIT_CORE; prctl(2) stops it."""
    program = (
        "import ctypes; from fusecache.disk.native import forbid_core_dumps;"
        "is_dumpable = lambda: ctypes.CDLL(None).prctl(3, 0, 0, 0, 0);"  # PR_GET_DUMPABLE
        "before = is_dumpable(); forbid_core_dumps(); print(before, is_dumpable())"
    )
    assert run_python(program).stdout == "1 0\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_cache_in_memory_is_said_at_the_mount(mount: Callable[..., Mount], tmp_path: Path) -> None:
    (cache := tmp_path / "memory").mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=8G", "none", cache)
    try:
        one = mount(cache=cache / "cache")
        assert f"the cache directory {cache}/cache is in memory (tmpfs)" in one.log()
        one.unmount()
    finally:
        run("umount", "--lazy", cache)  # a failed test leaves a daemon in it
