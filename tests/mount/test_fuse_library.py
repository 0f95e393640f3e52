"""Which FUSE session serves a mount: the own one, if its self-test passes, else pyfuse3. What the log says of it."""

import errno
import logging
import os
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from fusecache.fuse import library as library_module
from fusecache.fuse import negotiation
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.library import FuseSession, open_session
from fusecache.fuse.session import OwnSession
from fusecache.fuse.values import (
    EntryAttributes,
    FUSEError,
    MountPlan,
    MountRefused,
    RequestContext,
    StatvfsData,
)
from tests.support.mounts import Mount, mounted_at
from tests.support.s3_buckets import Bucket

SPACE = StatvfsData(f_bsize=4096, f_frsize=4096, f_blocks=11, f_namemax=255)


class Empty(RequestHandlers):
    """An empty directory with 11 blocks of space."""

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino, entry.st_mode = inode, stat.S_IFDIR | 0o755
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        raise FUSEError(errno.ENOENT)

    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        return SPACE


@pytest.fixture
def plan(tmp_path: Path) -> MountPlan:
    (tmp_path / "mnt").mkdir()
    return MountPlan(str(tmp_path / "mnt"), "nothing", "fusecache")


def served_blocks(session: FuseSession, mountpoint: str) -> int:
    """Serve a mount until it has told its space."""

    async def run() -> int:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.serve)
            blocks = (await trio.to_thread.run_sync(os.statvfs, mountpoint)).f_blocks
            nursery.cancel_scope.cancel()
        return blocks

    try:
        return trio.run(run)
    finally:
        session.close()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies that do not get through as they are."""
    real = negotiation.packed_statfs
    monkeypatch.setattr(negotiation, "packed_statfs", lambda data: real(replace(data, f_bfree=0)))


def test_the_own_session_is_taken_where_its_self_test_passes(
    plan: MountPlan, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    session = open_session(Empty(), plan)
    assert served_blocks(session, plan.mountpoint) == 11
    assert session.library == "own"
    (line,) = [record for record in caplog.records if "fuse library" in record.message]
    assert re.fullmatch(r"fuse library=own protocol=7\.\d+ features=[A-Z_,]+", line.message)
    assert not mounted_at(Path(plan.mountpoint))


def test_pyfuse3_serves_where_the_self_test_fails(
    plan: MountPlan, caplog: pytest.LogCaptureFixture, broken: None
) -> None:
    pytest.importorskip("pyfuse3")
    caplog.set_level(logging.INFO)
    session = open_session(Empty(), plan)
    assert served_blocks(session, plan.mountpoint) == 11
    assert session.library == "pyfuse3"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message == (
        "the own FUSE session cannot serve this mount, pyfuse3 does: the self-test failed: the kernel showed other "
        "numbers than were sent"
    )


@pytest.mark.parametrize("library", ["own", "auto"])
def test_a_mount_that_nothing_can_serve_is_refused_and_gone(
    plan: MountPlan, broken: None, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    monkeypatch.setattr(library_module, "find_spec", lambda name: None)  # pyfuse3 is not installed
    with pytest.raises(MountRefused, match="the self-test failed: the kernel showed"):
        open_session(Empty(), plan, library)
    assert not mounted_at(Path(plan.mountpoint))


def test_a_kernel_that_never_answers_is_found_out(plan: MountPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negotiation, "_SECONDS", 0.5)
    monkeypatch.setattr(
        negotiation, "Opcode", type("Opcode", (), {"INIT": 26, "STATFS": -1})
    )  # no request is recognised
    with pytest.raises(MountRefused, match=r"no answer in 0.5 s"):
        OwnSession.mount(Empty(), plan)
    assert not mounted_at(Path(plan.mountpoint))
    for thread in threading.enumerate():
        if thread.name == "fuse-self-test":
            thread.join(20)  # the end of the mount ends its system call
            assert not thread.is_alive()


def test_requests_that_come_during_the_self_test_are_answered(
    plan: MountPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel sends any process's requests from the moment of the mount."""
    found: list[bool] = []
    others = [
        threading.Thread(target=lambda: found.append(os.path.exists(f"{plan.mountpoint}/absent")))
        for _ in range(3)
    ]
    real = negotiation._answer

    def late(*arguments: object) -> object:
        for other in others:
            other.start()
        while len(waiting_in_fuse(others)) < len(others):
            pass
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(negotiation, "_answer", late)
    session = OwnSession.mount(Empty(), plan)
    assert served_blocks(session, plan.mountpoint) == 11
    for other in others:
        other.join(20)
    assert found == [False] * 3


def waiting_in_fuse(threads: list[threading.Thread]) -> list[threading.Thread]:
    return [each for each in threads if is_asleep(each)]


def is_asleep(thread: threading.Thread) -> bool:
    text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return text.rpartition(")")[2].split()[0] in "SD"


@pytest.mark.parametrize("library", ["own", "pyfuse3"])
def test_both_serve_a_mount(mount: Callable[..., Mount], bucket: Bucket, library: str) -> None:
    """The rest of the tests run on the default; FUSECACHE_TEST_FUSE_LIBRARY=pyfuse3 runs them on the other."""
    if library == "pyfuse3":
        pytest.importorskip("pyfuse3")
    bucket.put("folder/file", b"1234")
    one = mount("--fuse-library", library)
    assert f"fuse library={library}" in one.log()
    assert (one.path / "folder" / "file").read_bytes() == b"1234"
    (one.path / "new").write_bytes(b"56")
    os.rename(one.path / "new", one.path / "folder" / "moved")
    assert sorted(os.listdir(one.path / "folder")) == ["file", "moved"]
    one.sync()
    assert bucket.sizes() == {"folder/file": 4, "folder/moved": 2}
