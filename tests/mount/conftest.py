"""A bucket, mounts of it, and the watch over what their daemons log.

The bucket is the test server's, or any S3's: FUSECACHE_TEST_ENDPOINT, _BUCKET, _ACCESS_KEY and _SECRET_KEY. Most tests
share two mounts, `place.path` and `place.second`, and have a directory of their own in them; those that need other
flags, or that kill a daemon, make theirs with `mount`.
"""

import fcntl
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.s3server import ServerProcess
from tests.s3server.ports import reserve
from tests.support.marks import mark_all
from tests.support.mounts import BucketMounts, Mount, wait_until
from tests.support.s3_buckets import Bucket, Service

# Uploads start soon after the close, so that tests are short; what `settle` promises is tested with longer ones.
FLAGS = ("--settle-seconds", "0.2", "--memory", "64MiB", "--cache-size", "4GiB", "--log-level", "info")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs FUSE."""
    mark_all(items, __file__, pytest.mark.fuse)


@pytest.fixture
def free_port() -> Iterator[Callable[[], int]]:
    """Returns ports of loopback that no other test gets, and that only a program which names one can listen on."""
    with ExitStack() as held:
        yield lambda: int(held.enter_context(reserve()).getsockname()[1])


def service_of(server: ServerProcess) -> Service:
    """Return what a server of the project's own serves."""
    return Service(
        server.endpoint_url,
        server.access_key,
        server.secret_key,
        server.bucket,
        server.control,
        server.ca_path,
    )


@pytest.fixture(scope="session")
def service() -> Iterator[Service]:
    """An S3 service: one named by the environment, else the project's own server."""
    if outside := Service.named_outside():
        yield outside
        return
    # A name of its own: mounts of others on this machine may show a bucket of a usual name, at another endpoint.
    with ServerProcess(bucket=f"bucket-{uuid.uuid4().hex[:8]}") as server:
        yield service_of(server)
        # Of all requests of the run, not of one test's.
        assert server.control.offences() == []


@pytest.fixture(scope="session")
def lone_server() -> Iterator[ServerProcess]:
    """A server whose bucket has a name of its own: commands ask all mounts of this machine on a bucket of one name."""
    with ServerProcess(bucket=f"lone-{uuid.uuid4().hex}") as server:
        yield server
        assert server.control.offences() == []


@pytest.fixture
def lone_bucket(lone_server: ServerProcess) -> Iterator[Bucket]:
    """An empty bucket with a clock of its own, which no mount is on."""
    as_new(lone_server)
    service = service_of(lone_server)
    client = service.client()
    yield Bucket(service, client, "run/")
    client.close()
    lone_server.control.clear_faults()
    lone_server.control.close()


def as_new(server: ServerProcess) -> None:
    """Make a server forget what the tests before did, also what of that is still on its way."""
    server.control.reset()
    server.control.drop_connections()
    server.control.reset()


@pytest.fixture
def kernels_names() -> Iterator[None]:
    """Have what the kernel knows of names to oneself: a test makes it forget them, of all mounts."""
    with open(Path(tempfile.gettempdir()) / "fusecache-tests-names.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def forget_names(kernels_names: None) -> Callable[[], None]:
    """Return a function that drops the kernel's dentries and inodes. Skips the test where that is not permitted."""
    if not os.access(DROP_CACHES, os.W_OK):
        pytest.skip(f"cannot write to {DROP_CACHES}")

    def forget() -> None:
        DROP_CACHES.write_text("2\n")

    return forget


@pytest.fixture(scope="session")
def whole_bucket(service: Service) -> Bucket:
    """The bucket, a prefix of this run in it."""
    return Bucket(service, service.client(), f"{uuid.uuid4().hex}/")


@pytest.fixture(autouse=True)
def closed_connections(whole_bucket: Bucket) -> Iterator[None]:
    """Close at the end of a test what it opened in clients of the whole session."""
    yield
    whole_bucket.client.close()
    if whole_bucket.service.control is not None:
        whole_bucket.service.control.close()


class Mounts:
    """All mounts of the run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self.living: list[Mount] = []

    def make(self, bucket: Bucket, *flags: str, cache: Path | None = None, path: Path | None = None) -> Mount:
        """Mount a bucket at a fresh directory; later flags win over the suite's."""
        self._count += 1
        point = path or self._directory / f"mnt{self._count}"
        point.mkdir(exist_ok=True)
        made = Mount(bucket, point, cache or self._directory / f"cache{self._count}")
        self.living.append(made)
        made.start(*FLAGS, *flags)
        return made

    def make_several(
        self, bucket: Bucket, *flags: str, cache: Path | None = None, path: Path | None = None
    ) -> BucketMounts:
        """Mount the buckets that the flags name in a fresh folder, which the command makes."""
        self._count += 1
        made = BucketMounts(
            path or self._directory / f"mnt{self._count}", cache or self._directory / f"cache{self._count}"
        )
        try:
            made.start(bucket, *FLAGS, *flags)
        finally:
            self.living += made.of.values()
        return made

    def remove(self, mounts: list[Mount], alarms: list[str]) -> list[str]:
        """End mounts; return what went wrong, and add to `alarms` what their logs say at the end."""
        wrong = []
        for mount in mounts:
            wrong += [f"{mount.path}: {words}" for words in mount.remove()]
            alarms += mount.new_alarms()
            self.living.remove(mount)
        return wrong


@pytest.fixture(scope="session")
def mounts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounts]:
    """The register of mounts; at the end nothing is left."""
    directory = tmp_path_factory.mktemp("mounts")
    register = Mounts(directory)
    try:
        yield register
    finally:
        alarms: list[str] = []
        wrong = register.remove(list(register.living), alarms) + alarms
        shutil.rmtree(directory, ignore_errors=True)
        assert not wrong, "\n".join(wrong)


class ExpectedLog:
    """Announces lines of WARNING and above that a test will cause. Each must come. seen: those that came."""

    def __init__(self) -> None:
        self.patterns: list[str] = []
        self.seen: list[str] = []

    def __call__(self, pattern: str) -> None:
        self.patterns.append(pattern)


@pytest.fixture
def expect_log() -> ExpectedLog:
    """Call it with a regular expression for each kind of line that the daemons will warn with."""
    return ExpectedLog()


@pytest.fixture(autouse=True)
def quiet_daemons(mounts: Mounts, expect_log: ExpectedLog, tmp_path: Path) -> Iterator[None]:
    """Fail a test in which a daemon logged a warning, an error or a traceback that was not announced.

    tmp_path: pytest removes it at its end, and a log that lies in it must be read before that.
    """
    yield

    def missing() -> list[str]:
        for mount in mounts.living:
            expect_log.seen += mount.new_alarms()
        return [word for word in expect_log.patterns if not _mentions(expect_log.seen, word)]

    wait_until(
        lambda: not missing(), f"the log lines {expect_log.patterns}; seen {expect_log.seen}", seconds=5
    )
    surprising = [
        line for line in expect_log.seen if not any(re.search(p, line) for p in expect_log.patterns)
    ]
    assert not surprising, "\n".join(surprising)


def _mentions(lines: list[str], pattern: str) -> bool:
    return any(re.search(pattern, line) for line in lines)


@pytest.fixture
def bucket(whole_bucket: Bucket) -> Bucket:
    """A prefix of this test's own."""
    if whole_bucket.service.control is not None:
        whole_bucket.service.control.clear_log()
    return whole_bucket.below(uuid.uuid4().hex)


@pytest.fixture
def mount(
    mounts: Mounts, bucket: Bucket, expect_log: ExpectedLog, quiet_daemons: None
) -> Iterator[Callable[..., Mount]]:
    """Make mounts of this test's prefix: `mount(*flags, cache=…, path=…)`; gone at its end."""
    mine: list[Mount] = []

    def make(*flags: str, cache: Path | None = None, path: Path | None = None, of: Bucket = bucket) -> Mount:
        made = mounts.make(of, *flags, cache=cache, path=path)
        mine.append(made)
        return made

    yield make
    if bucket.service.control is not None:
        bucket.service.control.clear_faults()
        bucket.service.control.resume()
    wrong = mounts.remove([each for each in mine if each in mounts.living], expect_log.seen)
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def mount_several(
    mounts: Mounts, bucket: Bucket, expect_log: ExpectedLog, quiet_daemons: None
) -> Iterator[Callable[..., BucketMounts]]:
    """Make mounts of several buckets: `mount_several(*flags, cache=…, path=…)`; gone at its end."""
    mine: list[Mount] = []

    def make(
        *flags: str, cache: Path | None = None, path: Path | None = None, of: Bucket = bucket
    ) -> BucketMounts:
        made = mounts.make_several(of, *flags, cache=cache, path=path)
        mine.extend(made.of.values())
        return made

    yield make
    wrong = mounts.remove([each for each in mine if each in mounts.living], expect_log.seen)
    assert not wrong, "\n".join(wrong)


@dataclass(frozen=True)
class Place:
    """A test's own directory in the two shared mounts, and the bucket below it."""

    first_mount: Mount
    second_mount: Mount
    name: str
    bucket: Bucket

    @property
    def path(self) -> Path:
        """The directory, on the first mount."""
        return self.first_mount.path / self.name

    @property
    def second(self) -> Path:
        """The same directory, on the second mount: another node, with another cache."""
        return self.second_mount.path / self.name

    def sync(self, name: str = "") -> None:
        """Wait until what was closed on the first mount is in the bucket."""
        self.first_mount.sync(f"{self.name}/{name}".rstrip("/"))


# Directories made before the mounts: a name that another client makes is seen only after a second.
DIRECTORIES = 400


class Shared:
    """The two mounts that `place` lives in, made when first needed, and again if one died."""

    def __init__(self, bucket: Bucket, mounts: Mounts) -> None:
        self.bucket = bucket
        self._mounts = mounts
        self._free: list[str] = []
        self._pair: list[Mount] = []

    def pair(self) -> tuple[Mount, Mount]:
        """Return the mounts."""
        if not self._pair or not all(each.is_alive() for each in self._pair):
            self._pair = [self._mounts.make(self.bucket), self._mounts.make(self.bucket)]
        first, second = self._pair
        return first, second

    def take_name(self) -> str:
        """Return the name of a directory that no test has used."""
        if not self._free:
            self._free = [f"{index:03}" for index in range(DIRECTORIES)]
            for name in self._free:
                self.bucket.put(f"{name}/")
        return self._free.pop(0)


@pytest.fixture(scope="session")
def shared(whole_bucket: Bucket, mounts: Mounts) -> Shared:
    """The mounts that `place` lives in."""
    return Shared(whole_bucket.below("shared"), mounts)


@pytest.fixture
def kept_by_the_session(request: pytest.FixtureRequest) -> None:
    """Make the shared mounts before the first look: they outlive the test."""
    if "place" in request.fixturenames:
        request.getfixturevalue("shared").pair()


@pytest.fixture
def place(shared: Shared, quiet_daemons: None) -> Iterator[Place]:
    """A directory of this test's own."""
    name = shared.take_name()
    first, second = shared.pair()
    bucket = shared.bucket.below(name)
    control = bucket.service.control
    if control is not None:
        control.clear_log()
    yield Place(first, second, name, bucket)
    if control is not None:
        control.clear_faults()
    if first.is_alive():
        first.sync()
