"""A bucket that answers wrongly one time in ten: what is read is right, or it is an error in bounded time."""

import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mount.conftest import ExpectedLog, Mounts
from tests.s3server import Fault, FaultAction, synthetic_bytes
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only

MIB = 2**20
SEED = 7
# 1 GiB where somebody asks for it.
SIZE = int(os.environ.get("FUSECACHE_TEST_FAULTY_MIB", "128")) * MIB
BAD_SHARE = 0.1
# What a program may be told of a bucket like this; never "no such file" for one that is there.
HONEST = {errno.EIO, errno.ESTALE, errno.EACCES}
READ_SECONDS = 75.0


def _answer(status: int, code: str) -> Fault:
    return Fault(FaultAction.ANSWER, status=status, code=code)


KINDS = (
    Fault(FaultAction.DROP_BEFORE),
    Fault(FaultAction.SHORT_BODY, after_bytes=300_000),
    Fault(FaultAction.SHORT_BODY, after_bytes=0),
    Fault(FaultAction.LONG_BODY, extra_bytes=100),
    Fault(FaultAction.WRONG_RANGE),
    Fault(FaultAction.IGNORE_RANGE),
    Fault(FaultAction.STALL, seconds=2, after_bytes=200_000),
    _answer(403, "AccessDenied"),
    _answer(404, "NoSuchKey"),
    _answer(412, "PreconditionFailed"),
    _answer(416, "InvalidRange"),
    _answer(429, "TooManyRequests"),
    _answer(500, "InternalError"),
    _answer(503, "SlowDown"),
)


LARGE = 9 * MIB


def _name_of(kind: Fault) -> str:
    return f"{kind.action.name}-{kind.status}-{kind.after_bytes}"


@pytest.fixture(scope="module")
def of_all_kinds(whole_bucket: Bucket, mounts: Mounts) -> Iterator[Mount]:
    """A mount with a folder for each kind, made before it: nobody has looked into them."""
    bucket = whole_bucket.below("kinds")
    for name in map(_name_of, KINDS):
        bucket.control.add_synthetic(f"{bucket.prefix}{name}/large", LARGE, SEED)
        bucket.put(f"{name}/d/file", b"bytes")
        bucket.put(f"{name}/d/empty")
    made = mounts.make(bucket)
    yield made
    alarms: list[str] = []
    assert mounts.remove([made], alarms) + alarms == []


@pytest.fixture
def healing(of_all_kinds: Mount) -> Iterator[Mount]:
    """That mount, between two tests in good order."""
    control = of_all_kinds.bucket.control
    control.clear_log()
    yield of_all_kinds
    control.clear_faults()


def _allow_failures(made: Mount, expect_log: ExpectedLog) -> None:
    """An error that a program was told is in the log too."""
    if "request failed call=" in made.log():
        expect_log("request failed call=")


def _make_bad(bucket: Bucket) -> None:
    """Let so many of all answers be wrong, each kind as often as every other."""
    share = BAD_SHARE / len(KINDS)
    # The first that fires acts, so the later ones see a little less; at 10 % that is no matter.
    bucket.control.faults(*(replace(kind, probability=share) for kind in KINDS))


def _md5_of_stream(seed: int, size: int) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for offset in range(0, size, 8 * MIB):
        digest.update(synthetic_bytes(seed, offset, min(8 * MIB, size - offset)))
    return digest.hexdigest()


def _md5_of_file(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(MIB):
            digest.update(piece)
    return digest.hexdigest()


def test_the_md5_of_a_large_file_is_right_though_every_tenth_answer_is_wrong(
    mount: Callable[..., Mount], bucket: Bucket
):
    bucket.control.add_synthetic(f"{bucket.prefix}big", SIZE, SEED)
    made = mount()
    # One at least, whatever the dice say.
    bucket.control.faults(Fault(FaultAction.DROP_BEFORE, operation="GetObject", nth=3))
    _make_bad(bucket)
    assert _md5_of_file(made.path / "big") == _md5_of_stream(SEED, SIZE)
    seen = {entry.fault for entry in bucket.control.log("GetObject") if entry.fault}
    assert seen, "no answer was wrong"


@pytest.mark.parametrize("kind", KINDS, ids=_name_of)
def test_each_kind_of_wrong_answer_alone_is_healed_by_asking_again(healing: Mount, kind: Fault):
    control = healing.bucket.control
    control.faults(replace(kind, operation="GetObject", times=2))
    assert (healing.path / _name_of(kind) / "large").read_bytes() == synthetic_bytes(SEED, 0, LARGE)
    assert [entry.fault for entry in control.log("GetObject") if entry.fault], "no answer was wrong"


def test_random_readers_of_many_files_get_right_bytes_or_an_honest_error_in_bounded_time(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: ExpectedLog
):
    sizes = [1, 65_536, 1_000_000, 5 * MIB, 20 * MIB]
    for number, size in enumerate(sizes):
        bucket.control.add_synthetic(f"{bucket.prefix}f{number}", size, number)
    made = mount()
    _make_bad(bucket)
    wrong: list[str] = []
    errors: list[int | None] = []
    slowest = 0.0
    lock = threading.Lock()

    def read_some(seed: int) -> None:
        nonlocal slowest
        chance = random.Random(seed)
        for _ in range(40):
            number = chance.randrange(len(sizes))
            offset = chance.randrange(sizes[number])
            size = chance.choice([1, 4096, 70_000, MIB])
            began = time.monotonic()
            try:
                with open(made.path / f"f{number}", "rb", buffering=0) as file:
                    data = os.pread(file.fileno(), size, offset)
            except OSError as exc:
                with lock:
                    errors.append(exc.errno)
            else:
                expected = synthetic_bytes(number, offset, min(size, sizes[number] - offset))
                if data != expected:
                    wrong.append(f"f{number} at {offset}: {len(data)} bytes")
            with lock:
                slowest = max(slowest, time.monotonic() - began)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read_some, range(8)))
    _allow_failures(made, expect_log)
    assert not wrong
    assert set(errors) <= HONEST, errors
    # Nearly all of it heals; what does not is told within the time that an outage is waited for.
    assert len(errors) <= 3
    assert slowest < READ_SECONDS


@pytest.mark.parametrize(
    ("status", "code", "told"),
    [
        (412, "PreconditionFailed", errno.ESTALE),
        (404, "NoSuchKey", errno.ESTALE),
        (403, "AccessDenied", errno.EACCES),
    ],
)
def test_what_the_bucket_insists_on_is_believed_soon(
    mount: Callable[..., Mount], bucket: Bucket, status: int, code: str, told: int
):
    bucket.put("file", b"x" * 100_000)
    made = mount()
    with open(made.path / "file", "rb", buffering=0) as file:
        bucket.control.faults(Fault(FaultAction.ANSWER, operation="GetObject", status=status, code=code))
        began = time.monotonic()
        with pytest.raises(OSError, match=rf"Errno {told}\b"):
            os.pread(file.fileno(), 10, 0)
        assert time.monotonic() - began < 30
    bucket.control.clear_faults()
    assert (made.path / "file").read_bytes() == b"x" * 100_000


def test_listings_of_a_bad_bucket_are_whole_or_an_error(
    mount: Callable[..., Mount], bucket: Bucket, expect_log: ExpectedLog
):
    names = {f"d{number % 7}/f{number:03}" for number in range(300)}
    for name in names:
        bucket.put(name, name.encode())
    made = mount()
    _make_bad(bucket)
    for turn in range(4):
        found = set()
        for folder in range(7):
            try:
                found |= {f"d{folder}/{name}" for name in os.listdir(made.path / f"d{folder}")}
            except OSError as exc:
                assert exc.errno in HONEST, (turn, exc)  # noqa: PT017  the loop goes on
                found |= {name for name in names if name.startswith(f"d{folder}/")}
        assert found == names
        time.sleep(1.1)  # what was listed is believed for a second: ask again
    _allow_failures(made, expect_log)


@pytest.mark.parametrize("kind", KINDS, ids=_name_of)
def test_names_are_asked_for_again_after_each_kind_of_wrong_answer(healing: Mount, kind: Fault):
    control = healing.bucket.control
    # Fewer bytes than a listing has: the body of that kind is cut, or late.
    after_bytes = min(kind.after_bytes, 100)
    control.faults(replace(kind, operation="ListObjectsV2", times=2, after_bytes=after_bytes))
    if kind.action is not FaultAction.LONG_BODY:  # nothing contradicts a HEAD that says a wrong length
        control.faults(replace(kind, operation="HeadObject", times=2, after_bytes=after_bytes))
    folder = healing.path / _name_of(kind) / "d"
    assert sorted(os.listdir(folder)) == ["empty", "file"]
    assert (folder / "empty").stat().st_size == 0
    assert [entry.fault for entry in control.log("ListObjectsV2") if entry.fault], "no answer was wrong"
