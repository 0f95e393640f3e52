"""What outlives the process that serves a mount: rows, requests, and who answers them."""

import errno
import mmap
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache import keeper
from fusecache.fuse import waiting
from fusecache.fuse.handlers import RequestHandlers
from fusecache.fuse.kept_mount import FORMAT, FormatUnknown, KeptMount, KeptTable, await_turn
from fusecache.fuse.kept_requests import SMALL_PLACES, KeptRequests, copied_requests, make_memory
from fusecache.fuse.protocol import IN_HEADER, INTERRUPT_IN, OUT_HEADER, WRITE_IN, WRITE_OUT, Opcode
from fusecache.fuse.session import OwnSession
from fusecache.fuse.values import EntryAttributes, RequestContext
from fusecache.keeper import KEEPER_VARIABLE, STANDBY_VARIABLE
from tests.support.mounts import is_running, wait_until
from tests.unit.fuse.kernel import PlayedKernel

BUFFER = 64 * 1024


@pytest.fixture
def memory() -> Iterator[Callable[[], int]]:
    made: list[int] = []

    def make() -> int:
        made.append(make_memory("test"))
        return made[-1]

    yield make
    for fd in made:
        os.close(fd)


# ---- rows


def test_a_successor_reads_the_rows_that_were_put_and_not_removed(memory: Callable[[], int]) -> None:
    fd = memory()
    rows, model = KeptTable(fd), {}
    draw = random.Random(5)
    # Far more than one rewriting of the log, with values of any size.
    for step in range(30_000):
        key = f"k/{draw.randrange(200)}"
        if draw.random() < 0.3:
            rows.remove(key)
            model.pop(key, None)
        else:
            model[key] = [step, "é" * draw.randrange(200), None]
            rows.put(key, model[key])
        if step % 5_000 == 0:
            rows = KeptTable(fd)
    successor = KeptTable(fd)
    assert {f"k/{rest}": value for rest, value in successor.items("k/")} == model
    assert os.fstat(fd).st_size < 16 * 1024 * 1024, "the log is rewritten when most of it is old"


PUTS = """
import sys
from fusecache.fuse.kept_mount import KeptTable
rows = KeptTable(int(sys.argv[1]))
for number in range(100_000):
    rows.put("key", number)
"""


def test_whenever_a_process_is_killed_its_table_has_an_end(memory: Callable[[], int]) -> None:
    """Looks at it while another process puts rows: each of these moments may be its last."""
    fd = memory()
    KeptTable(fd)
    with (
        mmap.mmap(fd, 4096) as header,
        subprocess.Popen([sys.executable, "-c", PUTS, str(fd)], pass_fds=[fd]) as process,
    ):
        regions, absent = struct.Struct("<8xQ8xQ"), 0
        while process.poll() is None:
            for _ in range(10_000):
                absent += 0 in regions.unpack(header[24:56])
    assert process.returncode == 0
    assert absent == 0
    assert KeptTable(fd).get("key") == 99_999


def test_memory_of_another_version_is_refused(memory: Callable[[], int]) -> None:
    fd = memory()
    KeptTable(fd).put("a", 1)
    os.pwrite(fd, (FORMAT + 1).to_bytes(8, "little"), 8)
    with pytest.raises(FormatUnknown, match="another version"):
        KeptTable(fd)


def test_damaged_memory_is_refused(memory: Callable[[], int]) -> None:
    fd = memory()
    KeptTable(fd).put("a", "row")
    os.pwrite(fd, (1 << 40).to_bytes(8, "little"), 32)  # the end of the log
    with pytest.raises(FormatUnknown, match="damaged"):
        KeptTable(fd)


# ---- requests


def message(unique: int, size: int = IN_HEADER.size, opcode: int = Opcode.LOOKUP) -> bytes:
    return IN_HEADER.pack(size, opcode, unique, 1, 0, 0, 0, 0, 0) + bytes(size - IN_HEADER.size)


def test_only_requests_that_were_not_answered_are_left(memory: Callable[[], int]) -> None:
    fd = memory()
    before = KeptRequests(fd, BUFFER)
    answered, waiting, large, changed = (before.take() for _ in range(4))
    for place, unique, size in ((answered, 2, 100), (waiting, 10, 90), (large, 4, BUFFER), (changed, 8, 80)):
        place.view[:size] = message(unique, size)
    assert before.hold(waiting, 90, stays=False) is not waiting
    assert before.hold(large, BUFFER, stays=True) is large
    answered.clear()
    changed.keep_reply(b"done", 0)
    left = KeptRequests(fd, BUFFER).left()
    assert [(IN_HEADER.unpack_from(each.buffer.view)[2], each.size, each.reply) for each in left] == [
        (4, BUFFER, None), (8, 80, (b"done", 0)), (10, 90, None),
    ]  # fmt: skip


def test_requests_of_the_format_before_are_copied_with_their_replies(memory: Callable[[], int]) -> None:
    fd = memory()
    large_from = 4096 * 8192
    os.ftruncate(fd, large_from + 2 * (BUFFER + 4096))
    reply = OUT_HEADER.pack(OUT_HEADER.size + 4, 0, 0) + b"done"
    for at, request in (
        (8192, message(10, 90)),
        (5 * 8192, message(8, 80)),
        (large_from + BUFFER + 4096, message(4, BUFFER)),
    ):
        os.pwrite(fd, request, at)
    os.pwrite(fd, len(reply).to_bytes(4, "little") + reply, 5 * 8192 + 4096)
    places = KeptRequests(memory(), BUFFER)
    left = copied_requests(fd, places)
    assert [(IN_HEADER.unpack_from(each.buffer.view)[2], each.size, each.reply) for each in left] == [
        (4, BUFFER, None), (8, 80, (b"done", 0)), (10, 90, None),
    ]  # fmt: skip
    assert bytes(left[0].buffer.view[:BUFFER]) == message(4, BUFFER)


def test_a_request_that_is_just_being_copied_is_left_once(memory: Callable[[], int]) -> None:
    fd = memory()
    before = KeptRequests(fd, BUFFER)
    place = before.take()
    place.view[:50] = message(6, 50)
    before.hold(place, 50, stays=False)
    place.view[:50] = message(6, 50)  # killed before the large place is cleared
    assert len(KeptRequests(fd, BUFFER).left()) == 1


def test_places_are_used_again_and_large_ones_give_their_memory_back(memory: Callable[[], int]) -> None:
    fd = memory()
    requests = KeptRequests(fd, BUFFER)
    for _ in range(100):
        places = [requests.take() for _ in range(20)]
        for place in places[:10]:
            requests.hold(place, BUFFER, stays=True)
        for place in places:
            requests.give_back(place)
    assert requests.left() == []
    assert used_bytes(fd) < 10 * BUFFER


def test_a_request_that_waits_uses_the_memory_that_it_needs(memory: Callable[[], int]) -> None:
    fd = memory()
    requests = KeptRequests(fd, BUFFER)
    descriptors = len(os.listdir("/proc/self/fd"))
    places = []
    for unique in range(2, 402, 2):
        size = 5000 if unique % 4 else 100
        place = requests.take()
        place.view[:size] = message(unique, size, Opcode.WRITE)
        places.append(requests.hold(place, size, stays=size > 100))
        assert bytes(places[-1].view[:size]) == message(unique, size, Opcode.WRITE)
    # Of a long request two pages, and one for its reply; and some whole places, so as not to make these anew.
    assert used_bytes(fd) < 100 * 3 * 4096 + 20 * BUFFER
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [each.size for each in KeptRequests(fd, BUFFER).left()] == [5000, 100] * 100
    for place in places:
        requests.give_back(place)
    assert requests.left() == []


def test_more_waiting_requests_than_small_places_stay_where_they_are(memory: Callable[[], int]) -> None:
    requests = KeptRequests(memory(), BUFFER)
    for number in range(SMALL_PLACES + 1):
        place = requests.take()
        place.view[:50] = message(6, 50)
        moved = requests.hold(place, 50, stays=False)
        assert moved.is_small == (number < SMALL_PLACES)
        assert bool(moved.counts_as) != moved.is_small


def used_bytes(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


# ---- the session


class Counting(RequestHandlers):
    """Counts what is carried out; handlers with a gate wait for it."""

    def __init__(self) -> None:
        self.made: list[tuple[str, bool]] = []
        self.written: list[bytes] = []
        self.gate = trio.Event()

    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        self.made.append((name.decode(), ctx.is_redone))
        if name == b"slow":
            await self.gate.wait()
        entry = EntryAttributes()
        entry.st_ino = 7
        return entry

    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        await self.gate.wait()
        return EntryAttributes()

    async def write(self, fh: int, off: int, buf: bytes) -> int:
        data = bytes(buf)
        await self.gate.wait()
        assert data == bytes(buf), "the bytes of a write stay until its end"
        self.written.append(data)
        return len(data)


def mkdir(name: bytes) -> bytes:
    return bytes(8) + name + b"\0"


# Serves with the descriptors that its arguments name: the kernel's end, the table, the requests.
FIRST_PROCESS = """
import sys, trio
from fusecache.fuse.kept_mount import KeptMount
from fusecache.fuse.session import OwnSession
from tests.unit.fuse.test_kept import Counting
fd, table, requests = map(int, sys.argv[1:])
trio.run(OwnSession(Counting(), fd, kept=KeptMount(table, requests)).serve)
"""
# The same; the second request of a process is parked.
PARKING_PROCESS = "from fusecache.fuse import waiting; waiting.OF_A_PROCESS = 1" + FIRST_PROCESS


async def test_a_successor_answers_what_was_begun_and_does_nothing_twice(
    memory: Callable[[], int],
) -> None:
    kernel, table, requests = PlayedKernel(), memory(), memory()
    fd = kernel.theirs.detach()
    kernel.send_init()
    words = [sys.executable, "-c", FIRST_PROCESS, *map(str, (fd, table, requests))]
    body = os.urandom(20_000)
    with subprocess.Popen(words, pass_fds=(fd, table, requests)) as first:  # noqa: ASYNC220  # at once
        assert (await kernel.any_reply())[1] == 0
        slow = kernel.send(Opcode.MKDIR, mkdir(b"slow"))
        write = kernel.send(Opcode.WRITE, WRITE_IN.pack(3, 0, len(body), 0, 0, 0, 0) + body)
        done = kernel.send(Opcode.MKDIR, mkdir(b"done"))
        assert (await kernel.reply(done))[0] == 0
        first.kill()

    second = Counting()
    second.gate.set()
    kept = KeptMount(table, requests, fd)
    assert [each.size for each in kept.unanswered] == [
        IN_HEADER.size + len(mkdir(b"slow")), IN_HEADER.size + WRITE_IN.size + len(body),
    ]  # fmt: skip
    session = OwnSession(second, fd, kept=kept)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.serve)
        replies: dict[int, tuple[int, bytes]] = {}
        while replies.keys() < {slow, write}:
            number, error, payload = await kernel.any_reply()
            # The one before may come twice, if its place was not cleared yet. A kernel ignores that.
            if number != done:
                assert number not in replies
                replies[number] = error, payload
        assert replies[slow][0] == 0
        assert replies[write] == (0, WRITE_OUT.pack(len(body), 0))
        fresh = kernel.send(Opcode.MKDIR, mkdir(b"fresh"))
        assert (await kernel.reply(fresh))[0] == 0
        kernel.close()
    session.close()
    assert second.made == [("slow", True), ("fresh", False)]
    assert second.written == [body]
    assert KeptMount(table, requests, fd).unanswered == []


async def test_a_successor_answers_what_had_not_begun(memory: Callable[[], int]) -> None:
    kernel, table, requests = PlayedKernel(), memory(), memory()
    fd = kernel.theirs.detach()
    kernel.send_init()
    words = [sys.executable, "-c", PARKING_PROCESS, *map(str, (fd, table, requests))]
    with subprocess.Popen(words, pass_fds=(fd, table, requests)) as first:  # noqa: ASYNC220  # at once
        assert (await kernel.any_reply())[1] == 0
        lookups = [kernel.send(Opcode.LOOKUP, b"name\0") for _ in range(10)]
        done = kernel.send(Opcode.MKDIR, mkdir(b"done"))
        assert (await kernel.reply(done))[0] == 0
        first.kill()

    second = Counting()
    session = OwnSession(second, fd, kept=KeptMount(table, requests, fd))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.serve)
        second.gate.set()
        answered: list[int] = []
        while len(answered) < len(lookups):
            number, error, _ = await kernel.any_reply()
            # The one before may come twice, if its place was not cleared yet.
            if number != done:
                assert error == 0
                answered.append(number)
        assert sorted(answered) == lookups
        kernel.close()
    session.close()
    assert KeptMount(table, requests, fd).unanswered == []


async def test_a_signal_ends_a_wait_also_if_the_kernel_told_the_predecessor_of_it(
    memory: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells of the first signal alone: after a harmless one it would not tell the successor of SIGKILL."""
    kernel, table, requests = PlayedKernel(), memory(), memory()
    fd = kernel.theirs.detach()
    kernel.send_init()
    words = [sys.executable, "-c", FIRST_PROCESS, *map(str, (fd, table, requests))]
    with subprocess.Popen(words, pass_fds=(fd, table, requests)) as first:  # noqa: ASYNC220  # at once
        assert (await kernel.any_reply())[1] == 0
        lookup = kernel.send(Opcode.LOOKUP, b"name\0")
        kernel.send(Opcode.INTERRUPT, INTERRUPT_IN.pack(lookup))
        done = kernel.send(Opcode.MKDIR, mkdir(b"done"))
        assert (await kernel.reply(done))[0] == 0
        first.kill()

    monkeypatch.setattr(waiting, "is_ending", lambda thread, *, by_hand=False: True)
    session = OwnSession(Counting(), fd, kept=KeptMount(table, requests, fd))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.serve)
        reply = await kernel.any_reply()
        # The one before may come twice, if its place was not cleared yet.
        if reply[0] == done:
            reply = await kernel.any_reply()
        assert reply == (lookup, errno.EINTR, b"")
        kernel.close()
    session.close()


async def test_a_reply_that_was_kept_is_sent_and_not_worked_out_again(memory: Callable[[], int]) -> None:
    kernel, table, requests = PlayedKernel(), memory(), memory()
    fd = kernel.theirs.detach()
    kernel.send_init()
    before = OwnSession(Counting(), os.dup(fd), kept=KeptMount(table, requests))
    kernel.read_init()
    before.close()
    # Killed between the change and its reply.
    places = KeptRequests(requests, KeptMount(table, memory()).negotiated().buffer_bytes)  # type: ignore[union-attr]
    place = places.take()
    place.view[: IN_HEADER.size] = message(44, opcode=Opcode.MKDIR)
    place.keep_reply(b"an entry", 0)
    successor = Counting()
    session = OwnSession(successor, fd, kept=KeptMount(table, requests, fd))
    assert kernel.receive() == (44, 0, b"an entry")
    assert successor.made == []
    kernel.close()
    session.close()


# ---- the keeper

# What the keeper starts: it has a "mount", which never ends by itself, and then does what its arguments say, one each
# time.
DAEMON = """
import os, sys, time
from pathlib import Path
from fusecache.fuse.kept_mount import KeptMount
log = Path(sys.argv[1])
kept = KeptMount.of_environment()
starts = log.read_text().count("start") if log.exists() else 0
with open(log, "a") as file:
    file.write(f"start {os.getpid()} resumed={kept.is_resumed}\\n")
if not kept.is_resumed:
    from fusecache.fuse.negotiation import Negotiated
    kept.keep_negotiated(Negotiated(45, 65536, frozenset()))
    kept.table.put("a", "first")
kept.keep("/nowhere", kept.device_fd if kept.is_resumed else os.eventfd(0))
what = sys.argv[2 + starts] if len(sys.argv) > 2 + starts else sys.argv[-1]
if what.startswith("/"):
    why = kept.name_program(what)
    if not why:
        sys.exit(75)
    with open(log, "a") as file:
        file.write(f"refused: {why}\\n")
if what == "die":
    os.kill(os.getpid(), 9)
if what == "end":
    kept.end()
    sys.exit(3)
if what.isdigit():
    sys.exit(int(what))
time.sleep(60)
"""


# Before that, if it is started in advance.
STANDBY = """
import os, sys
from fusecache.fuse.kept_mount import await_turn
from fusecache.keeper import STANDBY_VARIABLE
if STANDBY_VARIABLE in os.environ:
    with open(sys.argv[1], "a") as file:
        file.write(f"waits {os.getpid()}\\n")
await_turn()
"""


# The same with copies, as of a daemon.
COPIES = """
import os, sys
from fusecache.fuse.kept_mount import KeptMount, await_turn
def note(word):
    with open(sys.argv[1], "a") as file:
        file.write(f"{word} {os.getpid()}\\n")
note("begins")
await_turn()
while KeptMount.leave_standby(None):
    note("waits")
    await_turn()
"""


def standing_by(log: Path) -> int | None:
    """Return the process that waits: the last one, if it has not begun to serve."""
    words = log.read_text().split()
    waiting = [int(pid) for word, pid in pairwise(words) if word == "waits"]
    return waiting[-1] if waiting and f"start {waiting[-1]} " not in log.read_text() else None


def holds_a_mount(keeper: int) -> bool:
    return any("eventfd" in os.readlink(each) for each in Path(f"/proc/{keeper}/fd").iterdir())


def serving(log: Path) -> int:
    return int(log.read_text().split("start ")[-1].split()[0])


def keep(
    log: Path,
    *words: str,
    program: str = STANDBY + DAEMON,
    by: Sequence[str] = (keeper.__file__,),
    stderr: int = subprocess.PIPE,
) -> "subprocess.Popen[str]":
    """Start a keeper; by: what Python runs as the keeper."""
    command = [sys.executable, "-I", "-S", *by, sys.executable, "-c", program, str(log), *words]
    keepers.append(subprocess.Popen(command, stderr=stderr, text=True))
    return keepers[-1]


keepers: list["subprocess.Popen[str]"] = []


@pytest.fixture(autouse=True)
def no_keeper_is_left() -> Iterator[None]:
    """A test that fails or is interrupted ends those that it started."""
    yield
    while keepers:
        process = keepers.pop()
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def test_the_keeper_starts_a_successor_and_ends_with_the_status_of_the_last_one(tmp_path: Path) -> None:
    process = keep(tmp_path / "log", "die", "die", "end")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert said.count("it is started again") == 2
    resumed = [line.split()[2] for line in (tmp_path / "log").read_text().splitlines()]
    assert resumed == ["resumed=False", "resumed=True", "resumed=True"]


def test_a_full_disk_under_its_log_does_not_end_the_mount(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        process = keep(tmp_path / "log", "die", "end", stderr=full)
    finally:
        os.close(full)
    assert process.wait(timeout=60) == 3
    assert (tmp_path / "log").read_text().count("start") == 2


@pytest.mark.parametrize("standby", [STANDBY, COPIES], ids=["started", "copied"])
def test_a_standby_has_started_before_it_is_needed_and_ends_with_the_keeper(
    tmp_path: Path, standby: str
) -> None:
    log = tmp_path / "log"
    with keep(log, "stay", program=standby + DAEMON, by=keeper_with(_SERVICE_SECONDS=0.0)) as process:
        try:
            wait_until(lambda: holds_a_mount(process.pid), "a mount that is kept")
            for _ in range(2):
                waiting = wait_until(lambda: log.exists() and standing_by(log), "a standby")
                os.kill(serving(log), signal.SIGKILL)
                wait_until(lambda pid=waiting: f"start {pid} resumed=True" in log.read_text(), "its start")
            waiting = wait_until(lambda: standing_by(log), "another")
        finally:
            process.terminate()
            process.communicate(timeout=60)
    wait_until(lambda: not is_running(waiting), "its end")


def test_copies_follow_each_other_without_another_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = keep(log, *["die"] * 3, "end", program=COPIES + DAEMON, by=keeper_with(_SERVICE_SECONDS=0.0))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert log.read_text().count("begins") == 1
    assert log.read_text().count("start") == 4


def test_a_copy_of_a_daemon_that_failed_twice_is_not_used(tmp_path: Path) -> None:
    """It has what fails in memory, and would not see that it was repaired."""
    log = tmp_path / "log"
    process = keep(log, "1", "1", "1", "end", program=COPIES + DAEMON, by=keeper_with(_PAUSES=(0.0, 0.1)))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    words = log.read_text().split()
    begun, started = ([pid for word, pid in pairwise(words) if word == each] for each in ("begins", "start"))
    first, copy, *others = started
    assert [first, *others] == begun
    assert copy in (pid for word, pid in pairwise(words) if word == "waits")


# Is called, and does not hear it.
DEAF = """
import select, time
if STANDBY_VARIABLE in os.environ:
    select.select([int(os.environ["FUSE_KEEPER"])], [], [])
    with open(sys.argv[1], "a") as file:
        file.write("called\\n")
    time.sleep(60)
"""


def test_a_standby_that_dies_before_it_has_heard_of_its_turn_is_one_more_death(tmp_path: Path) -> None:
    """Its end of the socket is closed with a message unread, which a read of the other end tells by an error."""
    log = tmp_path / "log"
    with keep(log, "stay", "end", program=STANDBY.replace("await_turn()\n", DEAF) + DAEMON) as process:
        waiting = wait_until(lambda: log.exists() and standing_by(log), "a standby")
        os.kill(serving(log), signal.SIGKILL)
        wait_until(lambda: "called" in log.read_text(), "its turn")
        os.kill(waiting, signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert said.count("the daemon died (status -9)") == 2


def keeper_with(**constants: object) -> tuple[str, str]:
    """Return what Python runs as a keeper with other constants."""
    changes = "\n".join(f"keeper.{name} = {value}" for name, value in constants.items())
    place = os.path.dirname(keeper.__file__)
    return "-c", (
        f"import sys\nsys.path.insert(0, {place!r})\nimport keeper\n{changes}\n"
        "sys.exit(keeper.Keeper(sys.argv[1:]).run())"
    )


def test_a_daemon_that_cannot_start_is_started_again_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    """However often it fails: the cause may go away, and until then the mount waits."""
    # It serves once. After that it fails before it serves, until its eighth start.
    fails = (
        "import sys\nfrom pathlib import Path\nlog = Path(sys.argv[1])\n"
        "if log.exists() and 'start' in log.read_text() and log.read_text().count('fails') < 6:\n"
        "    open(log, 'a').write('fails\\n')\n"
        "    sys.exit(1)\n"
    )
    process = keep(
        tmp_path / "log", "die", "end", program=fails + DAEMON, by=keeper_with(_PAUSES=(0.0, 0.25, 0.5, 1.0))
    )
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, "the mount goes on"
    pauses = re.findall(r"\(status 1\); it is started again(?: in (\S+) s)?, the mount waits for it", said)
    assert pauses == ["0.25", "0.5", "1", "1", "1", "1"]
    assert f"`kill {process.pid}` ends the mount /nowhere instead" in said


def test_a_daemon_that_crashes_as_soon_as_it_serves_is_started_after_longer_and_longer_pauses(
    tmp_path: Path,
) -> None:
    process = keep(tmp_path / "log", *["1"] * 5, "end")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, "the mount goes on"
    pauses = re.findall(r"\(status 1\); it is started again(?: in (\S+) s)?, the mount waits for it", said)
    assert pauses == ["", "0.25", "0.5", "1", "2"]
    assert "It has failed 5 times in a row" in said.splitlines()[-1]


@pytest.mark.parametrize(("how", "status"), [("die", -9), ("1", 1)])
def test_a_daemon_that_ends_often_is_started_at_once_if_it_has_served_each_time(
    tmp_path: Path, how: str, status: int
) -> None:
    # Each service is long enough.
    process = keep(tmp_path / "log", *[how] * 20, "end", by=keeper_with(_SERVICE_SECONDS=0.0))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3
    assert said.count(f"(status {status}); it is started again, the mount waits for it") == 20


def test_a_signal_to_stop_ends_the_pause_before_a_start(tmp_path: Path) -> None:
    with keep(tmp_path / "log", "1", by=keeper_with(_PAUSES=(0.0, 60.0))) as process:
        assert process.stderr is not None
        process.stderr.readline()
        line = process.stderr.readline()
        process.terminate()
        process.communicate(timeout=30)
    assert "started again in 60 s" in line
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("status", "starts"), [(keeper.STATUS_HAND_OVER, 3), (keeper.STATUS_CANNOT_RESUME, 1), (1, 3)]
)
def test_what_an_exit_status_means(tmp_path: Path, status: int, starts: int) -> None:
    process = keep(tmp_path / "log", str(status), str(status), "end")
    _, said = process.communicate(timeout=60)
    assert (tmp_path / "log").read_text().count("start") == starts
    # A hand-over is asked for, and no accident.
    assert said.count("started again") == (2 if status == 1 else 0)


def executable(path: Path, script: str) -> str:
    """Write a shell script; return its path."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        pytest.param("exec sleep 600", "it was not ready within 1 s", id="hangs"),
        pytest.param("", "No such file or directory", id="is missing"),
    ],
)
def test_a_program_that_does_not_get_ready_leaves_the_daemon_serving(
    tmp_path: Path, script: str, why: str
) -> None:
    log, program = tmp_path / "log", str(tmp_path / "program")
    if script:
        executable(tmp_path / "program", script)
    with keep(log, program, "end", by=keeper_with(_UPGRADE_SECONDS=1.0)) as process:
        try:
            wait_until(lambda: log.exists() and "refused: " in log.read_text(), "the answer")
            assert why in log.read_text()
            waiting = wait_until(lambda: standing_by(log), "a standby of the old program")
            os.kill(serving(log), signal.SIGKILL)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 3, said
    assert f"{program} is not ready to serve the mount: " in said
    assert f"start {waiting} resumed=True" in log.read_text(), "the old program goes on"


def test_a_program_that_stands_by_and_cannot_serve_is_replaced_by_the_one_before(tmp_path: Path) -> None:
    program = executable(
        tmp_path / "program",
        f"""exec {sys.executable} -c '
from fusecache.fuse.kept_mount import KeptMount, await_turn
await_turn()
KeptMount.of_environment()
KeptMount.tell_why("too new")
raise SystemExit(1)
'""",
    )
    process = keep(tmp_path / "log", program, "end")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert f"{program} cannot serve the mount (status 1: too new); {sys.executable} goes on" in said
    assert (tmp_path / "log").read_text().count("start") == 2


def test_the_next_program_waits_before_the_daemon_ends_for_it(tmp_path: Path) -> None:
    log, program = tmp_path / "log", tmp_path / "python"
    program.write_text(f"""#!/bin/sh\nexec {sys.executable} "$@"\n""")
    program.chmod(0o755)
    with keep(log, str(program), "end") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    first, waits, start = log.read_text().splitlines()
    assert first.endswith("resumed=False")
    assert start == f"start {waits.split()[1]} resumed=True"
    assert "died" not in said


def test_a_daemon_that_dies_before_it_ends_for_another_program_is_followed_by_that_one(
    tmp_path: Path,
) -> None:
    log, program = tmp_path / "log", tmp_path / "python"
    program.write_text(f"""#!/bin/sh\necho other >> {log}\nexec {sys.executable} "$@"\n""")
    program.chmod(0o755)
    die = "kept.name_program(what); os.kill(os.getpid(), 9)"
    with keep(
        log,
        str(program),
        "end",
        program=STANDBY + DAEMON.replace("kept.name_program(what)", die),
    ) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 3, said
    assert "cannot serve" not in said
    assert said.count("the daemon died (status -9)") == 1
    _, _, waits, start = log.read_text().splitlines()
    assert start == f"start {waits.split()[1]} resumed=True"


def test_a_signal_to_stop_reaches_the_daemon_and_no_successor_is_started(tmp_path: Path) -> None:
    process = keep(tmp_path / "log", "stay")
    wait_until((tmp_path / "log").exists, "the daemon's start")
    wait_until((tmp_path / "log").read_text, "its first line")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert (tmp_path / "log").read_text().count("start") == 1


def test_a_daemon_goes_on_without_its_keeper(
    memory: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    monkeypatch.setenv("FUSE_KEEPER", str(theirs.fileno()))
    kept = KeptMount(memory(), memory())
    kept.keep("/nowhere", 0)  # the keeper's end of the socket is closed
    kept.end()
    theirs.close()


def test_a_standby_whose_keeper_ends_without_having_heard_it_ends_without_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keeper closes the socket with `waiting` unread: the standby gets ECONNRESET, and not the end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setenv(KEEPER_VARIABLE, str(theirs.fileno()))
    monkeypatch.setenv(STANDBY_VARIABLE, "1")
    receive = socket.recv_fds

    def receive_after_the_end(*words: Any) -> Any:
        ours.close()
        return receive(*words)

    monkeypatch.setattr(socket, "recv_fds", receive_after_the_end)
    with theirs, pytest.raises(SystemExit) as ended:
        await_turn()
    assert not ended.value.code
