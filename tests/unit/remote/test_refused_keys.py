"""A refusal of one object's key is told from a refusal of the credentials."""

import pytest

from fusecache.model.errors import AccessDenied, Refused, RemoteError, Unavailable
from fusecache.remote import read_write_split
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.store import FileSlice
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.memory_store import MemoryStore

DENIED = AccessDenied("PUT: AccessDenied (403)")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(read_write_split.time, "monotonic", made)
    return made


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore())


def errors_of(
    store: FaultyStore, clock: Clock, key: str, *, count: int, every_seconds: float = 30.0
) -> list[type[RemoteError] | None]:
    """Return what each of `count` attempts at a key ends with."""
    remote, found = ReadWriteSplit(store, store, prefix="run/"), list[type[RemoteError] | None]()
    for _ in range(count):
        try:
            remote.put(key, FileSlice("/dev/null", 0, 0), metadata={})
            found.append(None)
        except RemoteError as exc:
            found.append(type(exc))
        clock.now += every_seconds
    return found


def test_one_refused_key_is_refused_for_good(store: FaultyStore, clock: Clock) -> None:
    """Not at once: the permissions of a new key take up to a minute to take effect."""
    store.script(Fault(DENIED, "put", "run/stray", times=None))
    assert errors_of(store, clock, "run/stray", count=5) == [AccessDenied] * 3 + [Refused] * 2
    assert store.calls("probe_write", "run/*")


def test_refused_credentials_are_retried_for_ever(store: FaultyStore, clock: Clock) -> None:
    store.script(Fault(DENIED, "*", times=None))
    assert errors_of(store, clock, "run/file", count=50) == [AccessDenied] * 50


def test_an_unreachable_bucket_proves_nothing(store: FaultyStore, clock: Clock) -> None:
    store.script(Fault(DENIED, "put", times=None), Fault(Unavailable("503"), "probe_write", times=None))
    assert errors_of(store, clock, "run/file", count=50) == [AccessDenied] * 50


def test_a_refusal_counts_from_when_the_credentials_worked(store: FaultyStore, clock: Clock) -> None:
    """New credentials, after a long time of refused ones, get as much patience as the first."""
    store.script(Fault(DENIED, "put", times=None), Fault(DENIED, "probe_write", times=20))
    found = errors_of(store, clock, "run/file", count=24)
    assert found == [AccessDenied] * 23 + [Refused]


def test_an_accepted_key_is_forgiven(store: FaultyStore, clock: Clock) -> None:
    store.script(Fault(DENIED, "put", "run/file", times=3))
    assert errors_of(store, clock, "run/file", count=4) == [AccessDenied] * 3 + [None]


def test_a_refused_key_is_no_refusal_of_the_credentials(store: FaultyStore, clock: Clock) -> None:
    """The mount's state stays ok, and the credentials are not reloaded for it."""
    store.script(Fault(DENIED, "put", "run/stray", times=None))
    remote = ReadWriteSplit(store, store, prefix="run/")
    with pytest.raises(AccessDenied):
        remote.put("run/stray", FileSlice("/dev/null", 0, 0), metadata={})
    assert remote.health.writes_refused_since is None


def test_many_refused_keys_share_a_probe(store: FaultyStore, clock: Clock) -> None:
    store.script(Fault(DENIED, "put", times=None))
    remote = ReadWriteSplit(store, store, prefix="run/")
    for number in range(100):
        with pytest.raises(AccessDenied):
            remote.put(f"run/{number}", FileSlice("/dev/null", 0, 0), metadata={})
    assert len(store.calls("probe_write")) == 1


def test_a_write_that_is_accepted_while_a_probe_is_refused_proves_that_the_credentials_may_write() -> None:
    """Another thread's write of the same moment: new permissions take effect, so the probe's answer is older."""

    def probe() -> None:
        keys.on_accepted("run/other")
        raise DENIED

    keys = read_write_split.RefusedKeys(probe)
    assert keys.judge("run/stray", DENIED) == (DENIED, True)
