"""No request on the control socket ends a mount by accident, and a mount that must end does end."""

import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import trio
from trio.testing import MockClock

from fusecache.daemon import control_server
from fusecache.daemon.control_server import ControlServer, Endings
from fusecache.daemon.control_socket import ControlSocket
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.fs.hint_files import OwnedHints
from fusecache.model.errors import NoSpace, ReadOnly, StateError
from tests.support.node import Bucket, User, running_node

pytestmark = pytest.mark.real_time

NOBODY = 65534


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory; it is the current directory too, as paths of sockets must be short."""
    (directory := tmp_path / "cache").mkdir(0o711)
    monkeypatch.chdir(directory)
    return directory


@dataclass
class Control:
    """A running control server; abandoned: what it was asked, whether to end the mount at once."""

    user: User
    path: Path
    abandoned: list[bool] = field(default_factory=list)

    async def ask(self, request: bytes, *, user: int | None = None) -> list[dict[str, Any]]:
        """Return all answers to one line, sent by another user if one is named."""
        client = socket.socket(socket.AF_UNIX)
        with _being(user):
            client.connect(str(self.path))
        answer = b""
        async with trio.SocketStream(trio.socket.from_stdlib_socket(client)) as stream:
            with trio.fail_after(20):
                await stream.send_all(request + b"\n")
                async for piece in stream:
                    answer += piece
        return [json.loads(line) for line in answer.splitlines()]

    async def result(self, command: str, *, user: int | None = None, **more: Any) -> tuple[str, str]:
        """Return how a command ended, and why."""
        last = (await self.ask(json.dumps({"command": command, **more}).encode(), user=user))[-1]
        assert last["done"]
        return last["result"], last.get("message", "")


@contextmanager
def _being(user: int | None) -> Any:
    """Be another user for a moment; the socket remembers who connected it."""
    if user is None:
        yield
        return
    before = os.geteuid()
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(before)


async def _open_no_file(_request: Mapping[str, Any], _user: int) -> None:
    return None


@asynccontextmanager
async def controlled(bucket: Bucket, cache: Path) -> AsyncIterator[Control]:
    """Run a node and its control server."""
    async with running_node(bucket, cache, settle_seconds=0.05) as user, trio.open_nursery() as nursery:
        owners = frozenset({0, os.geteuid()})
        control_socket = ControlSocket(uuid4().hex, shared=True)
        control = Control(user, control_socket.path)
        server = ControlServer(
            user.fs,
            control_socket,
            OwnedHints(user.fs.hints, owners),
            lambda: {"writes_held": ""},
            _open_no_file,
            owners=owners,
            access={},
            endings=Endings(
                abandon=lambda: control.abandoned.append(True),
                carry_on=lambda: control.abandoned.append(False),
                upgrade=lambda _user, _program: lambda: None,
            ),
        )
        await nursery.start(server.run)
        yield control
        nursery.cancel_scope.cancel()


def break_journal(user: User) -> None:
    """From now on its disk takes no row."""

    def failing(*_: object) -> None:
        raise NoSpace("the journal's disk is full")

    user.fs.journal.journal.apply = failing  # type: ignore[method-assign]


# ---- the control socket


@pytest.mark.parametrize(
    "request_line",
    [
        b"[" * 60_000,
        b"[]",
        b"null",
        b"7",
        b"{",
        b"\xff\xfe",
        b"x" * 200_000,
        b'{"command": "sync", "timeout_seconds": "soon"}',
        b'{"command": ["sync"]}',
        b'{"command": "status", "path": "\\udcff"}',
    ],
    ids=[
        "deep",
        "list",
        "null",
        "number",
        "broken",
        "not UTF-8",
        "endless",
        "odd timeout",
        "odd command",
        "surrogate",
    ],
)
async def test_no_request_ends_the_mount(bucket: Bucket, cache: Path, request_line: bytes) -> None:
    async with controlled(bucket, cache) as control:
        try:
            answers = await control.ask(request_line)
        except trio.BrokenResourceError:
            answers = []  # refused while it was still being sent
        assert all(answer.get("result") != "durable" or answer["done"] for answer in answers)
        assert (await control.result("status"))[0] == "ok"
        await control.user.write("file", b"1")
        assert (await control.result("sync"))[0] == "durable"
    assert bucket.shows() == {"file": b"1"}


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
async def test_only_the_owner_may_end_the_mount(bucket: Bucket, cache: Path) -> None:
    async with controlled(bucket, cache) as control:
        for command in ("drain", "abandon", "carry-on"):
            result, message = await control.result(command, user=NOBODY)
            assert (result, "allowed only for root" in message) == ("error", True)
        assert control.abandoned == []
        assert (await control.result("status", user=NOBODY))[0] == "ok"
        assert (await control.result("sync", user=NOBODY))[0] == "durable"
        assert (await control.result("drain"))[0] == "durable"
        assert (await control.result("abandon"))[0] == "ok"
        assert (await control.result("carry-on"))[0] == "ok"
        assert control.abandoned == [True, False]


@pytest.mark.parametrize(
    "begun", [b"", b'{"command": "sta', b'{"command": "hint", "file": "x.plan", "bytes": 9}\n1']
)
async def test_unfinished_request_is_cut_off(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """The daemon closes a connection whose request does not come; the client sees the end."""
    monkeypatch.setattr(control_server, "REQUEST_SECONDS", 0.2)
    async with controlled(bucket, cache) as control:
        async with await trio.open_unix_socket(control.path) as stream:
            await stream.send_all(begun)
            with trio.fail_after(20):
                assert await stream.receive_some(1) == b""
        assert (await control.result("status"))[0] == "ok"


async def test_sync_tells_that_publishing_has_stopped_and_the_mount_goes_on(
    bucket: Bucket, cache: Path
) -> None:
    bucket.memory.put_bytes("there", b"1")
    async with controlled(bucket, cache) as control:
        bucket.takes_nothing = True
        await control.user.write("file", b"2")
        break_journal(control.user)
        with pytest.raises((NoSpace, ReadOnly)):  # the publisher may have met it first
            await control.user.mkdir("folder")
        for _ in range(2):
            result, message = await control.result("sync")
            assert (result, "the journal's disk is full" in message) == ("error", True)
        assert (await control.result("status"))[0] == "ok"
        assert await control.user.read("there") == b"1"


# ---- ending with a broken disk


async def test_a_mount_whose_journal_failed_while_a_file_was_open_can_still_end(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache) as user:
        first = await user.open("first")
        await user.fs.file_io.write(first, 0, b"1")
        await user.fs.close_protocol.flush(first)
        second = await user.open("second")
        break_journal(user)
        await user.fs.file_io.write(second, 0, b"2")
        with pytest.raises(NoSpace):
            await user.fs.close_protocol.flush(second)
        for handle in (first, second):
            with suppress(NoSpace, ReadOnly):  # the kernel tells nobody how a release went
                await user.fs.file_io.release(handle)
        with trio.fail_after(300), user.fs.publisher.draining(), pytest.raises((NoSpace, ReadOnly)):
            await user.fs.wait_durable("", None)
    async with running_node(bucket, cache) as user:
        assert await user.drained() == "durable"


async def test_a_read_that_would_begin_after_nobody_waits_for_answers_any_more_does_not(
    autojump_clock: MockClock,
) -> None:
    """Such as one that is asked again on another connection: it would hold up the end until it is answered."""
    offload = Offload(Supervisor(), network_threads=1, upload_threads=1)
    begun: list[str] = []
    await offload.network(begun.append, "before")
    offload.abandon_reads()
    with trio.move_on_after(1) as patience:
        await offload.network(begun.append, "after")
    assert patience.cancelled_caught
    assert begun == ["before"]


def descriptors_below(directory: Path) -> list[str]:
    """Return the files below a directory that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(f"{directory}/")]


async def test_at_its_end_a_node_has_no_file_open(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    bucket.takes_nothing = True
    async with running_node(bucket, cache) as user:
        await user.write("pending", b"1")
        await user.open("open for writing")
        assert descriptors_below(cache / "staging")
    assert descriptors_below(cache) == []


async def test_a_cache_directory_that_opens_only_in_part_is_closed_again(bucket: Bucket, cache: Path) -> None:
    (cache / "empty").symlink_to(
        "nowhere/at/all"
    )  # made last, behind the index, the journal and the listings
    with pytest.raises(FileNotFoundError) as caught:
        async with running_node(bucket, cache):
            raise AssertionError("it runs")
    # While the error is held, and so every local variable on its way.
    assert caught.tb is not None
    assert descriptors_below(cache) == []


async def test_a_node_that_refuses_to_run_is_closed(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    bucket.takes_nothing = True
    async with running_node(bucket, cache) as user:
        await user.write("pending", b"1")
    with pytest.raises(StateError, match="read-only") as caught:
        async with running_node(bucket, cache, read_only=True):
            raise AssertionError("it runs")
    assert caught.tb is not None
    assert descriptors_below(cache) == []
