"""Large replies that helper processes copy to the kernel (`--movers`): right bytes, whatever happens to the helpers."""

import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from fusecache.fuse import mover
from fusecache.fuse.movers import STALL_SECONDS
from tests.mount.conftest import ExpectedLog
from tests.support.control_groups import memory_group, memory_used
from tests.support.mounts import (
    FUSECACHE,
    NEEDS_OWN_SESSION,
    Mount,
    is_running,
    pattern,
    refusal,
    run,
    wait_until,
)
from tests.support.s3_buckets import Bucket

MakeMount = Callable[..., Mount]

pytestmark = [
    NEEDS_OWN_SESSION,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root sees what a mover has written"),
]

MIB = 2**20
DATA = pattern(48 * MIB)
KILLS = int(os.environ.get("FUSECACHE_TEST_MOVER_KILLS", "12"))
DAEMON_KILLS = int(os.environ.get("FUSECACHE_TEST_MOVER_DAEMON_KILLS", "3"))
# Of the machine, on top of what is promised.
SLACK_SECONDS = 4.0
ENDED = "a process for large replies ended"
STANDS = "a process for large replies stands still"


def copied_bytes(pids: list[int]) -> int:
    """Return how many bytes processes have written."""
    return sum(int(Path(f"/proc/{pid}/io").read_text().split("wchar: ")[1].split()[0]) for pid in pids)


def piece(descriptor: int, buffer: mmap.mmap, offset: int) -> bool:
    """Return whether a MiB of the object, read past the kernel's pages, is what it is in the bucket."""
    return os.preadv(descriptor, [buffer], offset) == MIB and buffer[:] == DATA[offset : offset + MIB]


def read_all(path: Path) -> bool:
    """Return whether each MiB is right."""
    descriptor, buffer = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, MIB)
    try:
        return all(piece(descriptor, buffer, offset) for offset in range(0, len(DATA), MIB))
    finally:
        os.close(descriptor)
        buffer.close()


@contextmanager
def readers(*paths: Path, count: int = 4) -> Iterator[list[str]]:
    """Read at random places of files until the end of the block; yields what went wrong."""
    wrong: list[str] = []
    is_over = threading.Event()

    def read(seed: int) -> None:
        chance, buffer = random.Random(seed), mmap.mmap(-1, MIB)
        descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths]
        try:
            while not is_over.is_set():
                offset = chance.randrange(len(DATA) // MIB) * MIB
                try:
                    if not piece(chance.choice(descriptors), buffer, offset):
                        wrong.append(f"other bytes at {offset}")
                except OSError as exc:
                    wrong.append(f"{exc} at {offset}")
                    return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
            buffer.close()

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def working(made: Mount, count: int) -> list[int]:
    """Read until the mount has `count` movers, and each has copied something; return their processes."""

    def found() -> list[int]:
        with ThreadPoolExecutor(2 * count) as threads:  # more replies at once than movers
            assert all(threads.map(read_all, [made.path / "file"] * 2 * count))
        pids = made.helpers(mover)
        return pids if len(pids) == count and all(copied_bytes([pid]) > MIB for pid in pids) else []

    return list(wait_until(found, f"{count} movers that copy"))


@pytest.fixture
def moved(mount: MakeMount, bucket: Bucket) -> MakeMount:
    """Makes mounts of one file, with two movers."""
    bucket.put("file", DATA)
    return lambda *flags: mount("--movers", "2", *flags)


def test_movers_copy_and_the_bytes_are_right(moved: MakeMount) -> None:
    made = moved()
    pids = working(made, 2)
    before = copied_bytes(pids)
    assert read_all(made.path / "file")
    with open(made.path / "file", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[:] == DATA
    assert copied_bytes(pids) - before > len(DATA)


def test_a_mount_without_movers_has_none(mount: MakeMount, bucket: Bucket) -> None:
    bucket.put("file", DATA)
    made = mount("--movers", "0")
    assert read_all(made.path / "file")
    assert made.helpers(mover) == []


def test_a_mover_has_no_keys_and_no_other_descriptors(moved: MakeMount) -> None:
    made = moved()
    for pid in working(made, 2):
        environment = Path(f"/proc/{pid}/environ").read_text()
        assert "AWS" not in environment
        assert "FUSECACHE" not in environment
        targets = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
        allowed = ("/dev/null", "/dev/fuse", "socket:", "/memfd:fuse-mover", "/memfd:fusecache-buffers")
        assert [each for each in targets if not each.startswith((*allowed, str(made.log_path)))] == []


# memfd_create(2) fails with EACCES, as where a container forbids it. The numbers: linux/seccomp.h, linux/filter.h.
WITHOUT_SHARED_MEMORY = """
import ctypes, os, struct, sys
number = {"x86_64": 319, "aarch64": 279}[os.uname().machine]
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x0005000D), (0x06, 0, 0, 0x7FFF0000)]
rules = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
prctl = ctypes.CDLL(None).prctl
prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("HxxxxxxP", len(rows), ctypes.addressof(rules)), 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_mount_that_gets_no_shared_memory_works_without_movers(moved: MakeMount) -> None:
    made = moved()
    made.unmount()
    command = made.command("--movers", "2", "--foreground")
    environment = made.bucket.service.environment()
    words = [sys.executable, "-c", WITHOUT_SHARED_MEMORY, *command]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as daemon:
        wait_until(lambda: daemon.poll() is not None or made.path.is_mount(), "the mount")
        assert daemon.poll() is None, daemon.communicate()[1]
        made.pid = made.status()["pid"]
        assert read_all(made.path / "file")
        assert made.helpers(mover) == []
        assert made.status()["options"]["movers"] == 0
        run(FUSECACHE, "unmount", made.path)
        assert "the daemon works without movers, as it gets no shared memory" in daemon.communicate()[1]
        assert daemon.returncode == 0


def kill_one(made: Mount, chance: random.Random) -> bool:
    """Kill a mover that works, and now and then one that only starts; return whether there was one."""
    pids = made.helpers(mover)
    if pids and chance.random() < 0.9:
        with suppress(OSError):
            pids = [pid for pid in pids if copied_bytes([pid]) > MIB]
    if not pids:
        return False
    try:
        os.kill(chance.choice(pids), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(60 + 4 * KILLS)
def test_movers_that_are_killed_at_any_moment_spoil_no_read(
    moved: MakeMount, expect_log: ExpectedLog
) -> None:
    made = moved("--movers", "4")
    working(made, 4)
    expect_log(ENDED)
    chance, killed = random.Random(1), 0
    with readers(made.path / "file") as wrong:
        while killed < KILLS // 2:
            time.sleep(chance.random() * 0.05)
            killed += kill_one(made, chance)
    assert wrong == []
    working(made, 4)


COLD = [f"cold-{number}" for number in range(4)]


def connections(pid: int) -> int:
    """Return how many connections over TCP a process has."""
    held = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(f"socket:[{row[9]}]" in held for row in rows)


def test_movers_receive_bodies_and_store_them(moved: MakeMount, bucket: Bucket) -> None:
    bucket.put(COLD[0], DATA)
    made = moved()
    pids = working(made, 2)
    written, own = copied_bytes(pids), connections(made.pid)
    assert read_all(made.path / COLD[0])
    assert sum(map(connections, pids)) > 0
    assert connections(made.pid) <= own
    # To the kernel, and to the cache file.
    wait_until(lambda: copied_bytes(pids) - written >= 2 * len(DATA), "all is stored")
    assert made.status()["cache"]["uncached"] == 0


@pytest.mark.timeout(60 + 4 * KILLS)
def test_movers_that_are_killed_while_they_fetch_and_store_spoil_no_read(
    moved: MakeMount, bucket: Bucket, expect_log: ExpectedLog
) -> None:
    for name in COLD:
        bucket.put(name, DATA)
    made = moved("--movers", "4")
    working(made, 4)
    expect_log(ENDED)
    left = KILLS // 2
    is_over = threading.Event()

    def kill() -> None:
        nonlocal left
        chance = random.Random(2)
        while left and not is_over.wait(chance.random() * 0.1):
            left -= kill_one(made, chance)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        while left:
            with ThreadPoolExecutor(len(COLD)) as threads:
                assert all(threads.map(read_all, [made.path / name for name in COLD]))
            run(FUSECACHE, "evict", *(made.path / name for name in COLD))
    finally:
        is_over.set()
        killer.join()
    # What was stored is right.
    assert all(read_all(made.path / name) for name in COLD)


def test_a_mover_that_is_stopped_while_it_fetches_and_stores_is_replaced(
    moved: MakeMount, bucket: Bucket, expect_log: ExpectedLog
) -> None:
    for name in COLD:
        bucket.put(name, DATA)
    made = moved()
    stopped = working(made, 2)
    expect_log(STANDS)
    expect_log(ENDED)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read_all, made.path / COLD[0])
        before = copied_bytes(stopped)
        wait_until(lambda: copied_bytes(stopped) - before > MIB, "replies and stores")
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        assert reading.result(20)
    assert read_all(made.path / COLD[1])
    wait_until(lambda: not any(is_running(pid) for pid in stopped), "the end of stopped movers")
    # Fetched blocks that came while all stores stood still may not be cached: the reads went on.
    assert made.status()["cache"]["disk_errors"] == 0


def test_a_mover_that_is_stopped_delays_reads_for_a_second_at_most(
    moved: MakeMount, expect_log: ExpectedLog
) -> None:
    made = moved()
    stopped = working(made, 2)
    expect_log(STANDS)
    expect_log(ENDED)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    assert read_all(made.path / "file")
    # Each of the two may hold up one read.
    assert time.monotonic() - began < 2 * STALL_SECONDS + SLACK_SECONDS
    wait_until(lambda: not any(is_running(pid) for pid in stopped), "the end of stopped movers")
    working(made, 2)


def waiting_reader(path: Path, rounds: int = 1) -> "subprocess.Popen[str]":
    """Return a process that reads: if movers are stopped, it is in a read whose reply one of them has."""
    program = (
        "import mmap, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT); print('go', flush=True); "
        f"[os.preadv(fd, [mmap.mmap(-1, {MIB})], {MIB} * each) for each in [*range(8)] * {rounds}]"
    )
    process = subprocess.Popen([sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "go\n"
    return process


def test_a_reader_that_is_killed_while_a_mover_stands_still_is_gone(
    moved: MakeMount, expect_log: ExpectedLog
) -> None:
    made = moved()
    expect_log(STANDS)
    expect_log(ENDED)
    for pid in working(made, 2):
        os.kill(pid, signal.SIGSTOP)
    with waiting_reader(made.path / "file") as process:
        time.sleep(0.2)
        process.kill()
        process.wait(STALL_SECONDS + SLACK_SECONDS)
    working(made, 2)


def test_a_mount_that_is_taken_away_by_force_ends_with_its_movers(moved: MakeMount) -> None:
    made = moved()
    pids = working(made, 2)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    with waiting_reader(made.path / "file") as process:
        run("umount", "-f", "-l", made.path)
        wait_until(
            lambda: not any(map(is_running, [made.pid, *pids])), "the end of the daemon and its movers"
        )
        process.kill()


def test_an_unmount_under_load_ends_the_movers(moved: MakeMount) -> None:
    made = moved()
    pids = working(made, 2)
    with readers(made.path / "file"):
        time.sleep(0.2)
        run("fusermount3", "-u", "-z", made.path)
    wait_until(lambda: not any(map(is_running, [made.pid, *pids])), "the end of the daemon and its movers")


@pytest.mark.parametrize("stops_first", [False, True], ids=["working", "stopped"])
def test_movers_end_with_a_daemon_that_is_killed_and_its_mount_fails(
    moved: MakeMount, *, stops_first: bool
) -> None:
    made = moved()
    pids = working(made, 2)
    for pid in pids if stops_first else []:
        os.kill(pid, signal.SIGSTOP)
    os.kill(made.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, [made.pid, *pids])), "the end of the daemon and its movers")
    # Not a wait without end: nothing holds the descriptor of the mount.
    assert refusal(lambda: read_all(made.path / "file")) is not None
    made.detach()


# Four reads of five find nothing in the cache then, and wait for the bucket.
SMALL_CACHE = ("--cache-size", "64MiB", "--memory", "64MiB")
LOAD = pytest.mark.parametrize("cold", [[], COLD], ids=["cached", "cold"])


def fetched(made: Mount) -> int:
    """Return how many bytes the daemon of now has read from the bucket for programs."""
    return int(made.status()["cache"]["bytes_from"]["bucket"])


def die_under_load(made: Mount, times: int, cold: Sequence[str] = ()) -> None:
    """Kill the daemon while programs read, again and again; returns when the last one works.

    cold: objects that they read besides.
    """
    seen = set(working(made, 2))
    with readers(*(made.path / name for name in ("file", *cold))) as wrong:
        for _ in range(times):
            before = made.pid
            os.kill(before, signal.SIGKILL)
            made.pid = wait_until(
                lambda before=before: None if is_running(before) else made.status()["pid"],
                "the next daemon",
                60,
            )
            seen |= set(
                wait_until(lambda: pids if len(pids := made.helpers(mover)) == 2 else [], "its movers")
            )
            if cold:
                wait_until(lambda: fetched(made) > 8 * MIB, "reads from the bucket")
            # A daemon that dies in its first second has failed: the keeper waits longer before each next start.
            time.sleep(1.1)
    assert wrong == []
    left = [pid for pid in seen - set(made.helpers(mover)) if is_running(pid)]
    assert left == []
    working(made, 2)


@LOAD
@pytest.mark.timeout(60 + 10 * DAEMON_KILLS)
def test_daemons_that_die_under_load_spoil_no_read_and_leave_nothing(
    moved: MakeMount, bucket: Bucket, cold: list[str]
) -> None:
    for name in cold:
        bucket.put(name, DATA)
    made = moved("--keep-mounted", *(SMALL_CACHE if cold else ()))
    keeper = made.keeper()
    made.standby()  # the keeper has a descriptor for it
    held = len(list(Path(f"/proc/{keeper}/fd").iterdir()))
    die_under_load(made, DAEMON_KILLS, cold)
    made.standby()
    assert len(list(Path(f"/proc/{keeper}/fd").iterdir())) <= held


# Of a mount: the buffers, twice, as the next daemon may be there already; and what it needs besides.
GROUP_BYTES = 2 * 2**30
# The daemon and its standby were started later; the readers' requests may be kept in other places.
MEMORY_SLACK_BYTES = 64 * MIB


@pytest.mark.timeout(120 + 10 * DAEMON_KILLS)
def test_daemons_that_die_under_load_leave_no_memory(moved: MakeMount) -> None:
    made = moved("--keep-mounted")
    with memory_group(GROUP_BYTES) as group:
        processes = group / "cgroup.procs"
        for pid in (made.keeper(), made.pid, made.standby(), *made.helpers(mover)):
            processes.write_text(str(pid))
        # What those have got already counts elsewhere: it is gone with the next daemon.
        die_under_load(made, 2)
        made.standby()
        before = memory_used(group)
        die_under_load(made, DAEMON_KILLS)
        made.standby()
        after = memory_used(group)
        sys.stdout.write(
            f"bytes of the control group: {before} before {DAEMON_KILLS} deaths, {after} after\n"
        )
        made.unmount()
        wait_until(lambda: not processes.read_text(), "the end of all processes of the mount")
    assert after - before < MEMORY_SLACK_BYTES


# Orphans come to this process, as they do to the first one of a container.
ADOPTS = """
import ctypes, os, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_helpers_of_a_dead_daemon_leave_no_zombie_where_the_keeper_is_process_1(moved: MakeMount) -> None:
    made = moved()
    made.unmount()
    command = made.command("--movers", "2", "--keep-mounted", "--foreground")
    environment = made.bucket.service.environment()
    with subprocess.Popen([sys.executable, "-c", ADOPTS, *command], env=environment) as keeper:
        wait_until(lambda: made.path.is_mount(), "the mount")
        made.pid = made.status()["pid"]
        seen = working(made, 2)
        before = made.pid
        os.kill(before, signal.SIGKILL)
        made.pid = wait_until(
            lambda: None if is_running(before) else made.status()["pid"], "the next daemon", 60
        )
        assert made.keeper() == keeper.pid
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in seen), "their end", 60)
        made.unmount()
        assert keeper.wait(60) == 0


@LOAD
def test_an_upgrade_under_load_is_not_seen_by_readers(
    moved: MakeMount, bucket: Bucket, cold: list[str]
) -> None:
    for name in cold:
        bucket.put(name, DATA)
    made = moved("--keep-mounted", *(SMALL_CACHE if cold else ()))
    old, before = working(made, 2), fetched(made)
    with readers(*(made.path / name for name in ("file", *cold))) as wrong:
        if cold:
            wait_until(lambda: fetched(made) > before + 8 * MIB, "reads from the bucket")
        run(FUSECACHE, "upgrade", made.path)
        made.pid = made.status()["pid"]
        if cold:
            wait_until(lambda: fetched(made) > 8 * MIB, "reads from the bucket by the next daemon")
    assert wrong == []
    assert not any(map(is_running, old))
    working(made, 2)


def limit_descriptors(pid: int, more: int) -> None:
    """Let a process open so many descriptors more."""
    most = len(list(Path(f"/proc/{pid}/fd").iterdir())) + more
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))


@pytest.mark.parametrize("more", [0, 2])
def test_movers_at_their_limit_of_descriptors_spoil_no_read_and_go_on(
    moved: MakeMount, bucket: Bucket, more: int
) -> None:
    for name in COLD:
        bucket.put(name, DATA)
    made = moved()
    pids = working(made, 2)
    for pid in pids:
        limit_descriptors(pid, more)
    with ThreadPoolExecutor(len(COLD)) as threads:
        assert all(threads.map(read_all, [made.path / name for name in COLD]))
    assert all(read_all(made.path / name) for name in COLD)
    assert made.status()["cache"]["disk_errors"] == 0
    assert made.helpers(mover) == pids
    # Two are enough if no mover has two orders at once.
    assert more or "an order was not carried out" in made.log()


@pytest.mark.whole_machine
def test_movers_that_the_kernel_kills_for_lack_of_memory_spoil_no_read(
    moved: MakeMount, bucket: Bucket, expect_log: ExpectedLog
) -> None:
    for name in COLD:
        bucket.put(name, DATA)
    made = moved()
    first = working(made, 2)
    expect_log(ENDED)
    # What they have counts elsewhere: each further page is too much.
    with memory_group(4096) as group:
        for pid in first:
            (group / "cgroup.procs").write_text(str(pid))
        with ThreadPoolExecutor(len(COLD)) as threads:
            assert all(threads.map(read_all, [made.path / name for name in COLD]))
        left = [pid for pid in first if is_running(pid)]
        for pid in left:
            (group.parent / "cgroup.procs").write_text(str(pid))
    assert left != first
    assert all(read_all(made.path / name) for name in COLD)
    working(made, 2)


def test_requests_that_are_interrupted_while_movers_have_them_spoil_no_other(moved: MakeMount) -> None:
    made = moved()
    pids = working(made, 2)
    chance = random.Random(3)
    with readers(made.path / "file") as wrong:
        for _ in range(20):
            with waiting_reader(made.path / "file", rounds=1000) as process:
                time.sleep(chance.random() * 0.1)
                process.kill()
                process.wait(STALL_SECONDS + SLACK_SECONDS)
    assert wrong == []
    assert made.helpers(mover) == pids


def test_a_keeper_that_is_killed_under_load_takes_no_mover_with_it(moved: MakeMount) -> None:
    made = moved("--keep-mounted")
    pids = working(made, 2)
    keeper = made.keeper()
    with readers(made.path / "file") as wrong:
        os.kill(keeper, signal.SIGKILL)
        wait_until(lambda: not is_running(keeper), "the end of the keeper")
        time.sleep(0.5)
    assert wrong == []
    assert working(made, 2) == pids
    os.kill(made.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_running, [made.pid, *pids])), "the end of the daemon and its movers")
    assert refusal(lambda: read_all(made.path / "file")) is not None
    made.detach()
