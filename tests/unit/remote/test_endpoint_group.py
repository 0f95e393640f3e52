"""Several endpoints as one store: failover, copies that differ, names, and the way back."""

import threading
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    ObjectChanged,
    ObjectMissing,
    Refused,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import KIB, Extent, ObjectId
from fusecache.policy.endpoint_choice import EndpointChoice
from fusecache.remote import endpoint_group
from fusecache.remote.endpoint_group import Copy, EndpointGroup, EndpointReader, judge
from fusecache.remote.protocol.headers import object_content
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.store import Interruption, ObjectContent, ReadStore, primary_of
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.memory_store import MemoryStore
from tests.support.mounts import wait_until

DATA = bytes(range(256)) * 4 * KIB  # 1 MiB
OTHER = DATA[::-1]
DOWN = Unavailable("down")
NAMES = ("first", "second", "third")


class Place:
    """Some endpoints, each a bucket in memory behind scripted faults, and the group of them."""

    def __init__(self, number: int = 2) -> None:
        self.buckets = [MemoryStore() for _ in range(number)]
        self.stores = [FaultyStore(bucket) for bucket in self.buckets]
        self.group = EndpointGroup(
            [EndpointReader(name, store) for name, store in zip(NAMES, self.stores, strict=False)]
        )

    def put(self, key: str, data: bytes = DATA) -> ObjectId:
        """Store an object at every endpoint."""
        for bucket in self.buckets:
            etag = bucket.put_bytes(key, data)
        return ObjectId(key, etag)

    def put_for(self, first: int, data: bytes = DATA) -> ObjectId:
        """Store, at every endpoint, an object that one of them is asked for first."""
        return self.put(self.key_for(first, MemoryStore().put_bytes("x", data)), data)

    def key_for(self, first: int, etag: str) -> str:
        """Return a new key that one endpoint is asked for first."""
        choice = EndpointChoice([(name, 1.0) for name in NAMES[: len(self.buckets)]])
        taken = self.buckets[0].contents()
        keys = (f"k{number}" for number in count())
        return next(k for k in keys if k not in taken and choice.order(f"{k}\0{etag}", 0.0)[0] == first)

    def read(self, object_id: ObjectId, size: int = len(DATA)) -> bytes:
        """Read an object whole."""
        buffer, reports = bytearray(size), list[int]()
        self.group.get_into(object_id, Extent(0, size), memoryview(buffer), reports.append)
        assert reports == sorted(set(reports))
        return bytes(buffer)

    def gets(self) -> list[int]:
        """Return how many GETs each endpoint got."""
        return [len(store.calls("get_into")) for store in self.stores]

    def row(self, index: int) -> dict[str, Any]:
        """Return the status of an endpoint."""
        return self.group.rows()[index]

    def wait_for_state(self, index: int, state: str) -> None:
        """Return once an endpoint has a state; probes are started by reads."""
        wait_until(lambda: self.row(index)["state"] == state, f"{state} at {index}", seconds=5)


@pytest.fixture
def place() -> Place:
    """Two endpoints."""
    return Place()


def test_a_read_that_breaks_off_goes_on_at_the_next_endpoint(place: Place) -> None:
    object_id = place.put_for(0)
    place.stores[0].script(Fault(DOWN, "get_into", deliver_bytes=300 * KIB))
    assert place.read(object_id) == DATA
    assert sum(bucket.statistics().bytes_read for bucket in place.buckets) == len(DATA)  # no byte twice
    assert place.buckets[1].statistics().bytes_read == len(DATA) - 300 * KIB


def test_many_objects_spread_over_the_endpoints(place: Place) -> None:
    for number in range(200):
        place.read(place.put(f"{number}"), 10)
    assert min(place.gets()) >= 70


def test_a_failing_endpoint_is_left_alone_and_comes_back(place: Place) -> None:
    object_id = place.put_for(0)
    place.stores[0].script(Fault(DOWN, times=None))
    for _ in range(5):
        assert place.read(object_id) == DATA
    assert place.gets() == [1, 5]
    assert place.row(0)["error"] == "down"
    place.stores[0].heal()

    def is_back() -> bool:
        place.read(object_id)
        return place.gets()[0] > 1

    wait_until(is_back, "reads at the first endpoint", seconds=10)
    assert place.row(0)["state"] == "ok"


def test_no_reader_waits_for_a_probe(place: Place) -> None:
    object_id = place.put_for(0)
    probed, released = threading.Event(), threading.Event()
    head = place.stores[0].head

    def hanging_head(key: str) -> Any:
        probed.set()
        assert released.wait(20)
        return head(key)

    place.stores[0].head = hanging_head  # type: ignore[method-assign]
    place.stores[0].script(Fault(DOWN, "get_into"))
    place.read(object_id)

    def is_probed() -> bool:
        place.read(object_id)
        return probed.is_set()

    try:
        wait_until(is_probed, "a probe", seconds=5)
        assert place.read(object_id) == DATA
        assert place.row(0)["state"] == "failing"
    finally:
        released.set()
    place.wait_for_state(0, "ok")


def test_refused_keys_are_read_again_by_the_probe(place: Place) -> None:
    object_id = place.put_for(1)
    store, renewed = place.stores[1], list[bool]()

    def reload() -> None:
        renewed.append(True)
        store.heal()

    store.reload = reload  # type: ignore[attr-defined]
    store.script(Fault(AccessDenied("403"), times=None))

    def is_back() -> bool:
        assert place.read(object_id) == DATA
        return place.row(1)["state"] == "ok" and bool(renewed)

    wait_until(is_back, "the second endpoint", seconds=5)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (ObjectMissing("1"), ObjectMissing("2"), ObjectMissing),
        (ObjectMissing("1"), Unavailable("2"), Unavailable),
        (AccessDenied("1"), ObjectMissing("2"), AccessDenied),
        (AccessDenied("1"), Unavailable("2"), Unavailable),
        (ObjectChanged("1"), ObjectMissing("2"), ObjectChanged),
        (Refused("1"), BucketMissing("2"), BucketMissing),
    ],
)
def test_missing_is_said_only_if_every_endpoint_says_so(
    place: Place, first: RemoteError, second: RemoteError, told: type[RemoteError]
) -> None:
    object_id = place.put_for(0)
    place.stores[0].script(Fault(first, times=None))
    place.stores[1].script(Fault(second, times=None))
    with pytest.raises(told):
        place.read(object_id)


def test_an_endpoint_without_the_object_is_not_asked_each_time(place: Place) -> None:
    object_id = place.put_for(1)
    place.buckets[1].remove(object_id.key)
    for _ in range(3):
        assert place.read(object_id) == DATA
    assert place.gets() == [3, 1]
    assert place.row(1)["state"] == "ok"
    assert place.row(1)["unused_copies"] == {"missing": 1}


def test_an_interrupted_read_ends_and_goes_elsewhere_next(place: Place) -> None:
    object_id = place.put_for(0)
    interruption = Interruption()
    place.stores[0].script(Fault(DOWN, "get_into", deliver_bytes=300 * KIB))
    with pytest.raises(Unavailable):
        place.group.get_into(
            object_id,
            Extent(0, len(DATA)),
            memoryview(bytearray(len(DATA))),
            lambda _: interruption.interrupt(),
            interruption,
        )
    assert place.gets() == [1, 0]
    assert place.read(object_id) == DATA
    assert place.gets() == [1, 1]


# ---- copies


def test_a_copy_in_other_parts_is_read_too(place: Place) -> None:
    object_id = place.put_for(1)
    place.buckets[1].put_bytes(object_id.key, DATA, etag="f" * 32 + "-2")
    for _ in range(3):
        assert place.read(object_id) == DATA
    assert place.gets() == [0, 4]  # the first met the other ETag
    assert len(place.stores[0].calls("content")) == 1
    assert place.row(1)["unused_copies"] == {}


def test_other_bytes_are_never_read_and_are_named(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    object_id = place.put_for(1)
    place.buckets[1].put_bytes(object_id.key, OTHER)
    for _ in range(3):
        assert place.read(object_id) == DATA
    assert place.gets() == [3, 1]
    assert place.row(1)["unused_copies"] == {"other bytes": 1}
    assert place.row(1)["unused_keys"] == [{"key": object_id.key, "cause": "other bytes"}]
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "endpoint=second" in line
    assert object_id.key in line


def test_a_copy_that_arrives_later_is_used_and_counts_no_more(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_group, "RECHECK_SECONDS", 0.0)
    object_id = place.put_for(1)
    place.buckets[1].remove(object_id.key)
    assert place.read(object_id) == DATA
    place.buckets[1].put_bytes(object_id.key, DATA)
    assert place.read(object_id) == DATA
    assert place.gets() == [1, 2]
    assert place.row(1)["unused_copies"] == {}


def test_a_copy_that_changes_later_is_compared_again(place: Place) -> None:
    object_id = place.put_for(1)
    place.buckets[1].put_bytes(object_id.key, DATA, etag="f" * 32 + "-2")
    assert place.read(object_id) == DATA
    place.buckets[1].put_bytes(object_id.key, OTHER, etag="e" * 32 + "-2")
    assert place.read(object_id) == DATA
    assert place.row(1)["unused_copies"] == {"other bytes": 1}


def test_a_copy_that_refuses_even_its_own_etag_is_compared_once(place: Place) -> None:
    object_id = place.put_for(1)
    place.buckets[1].put_bytes(object_id.key, DATA, etag="f" * 32 + "-2")
    place.stores[1].script(Fault(ObjectChanged("412"), "get_into", times=None))
    assert place.read(object_id) == DATA
    assert place.gets() == [1, 2]
    assert len(place.stores[1].calls("content")) == 1


def test_a_primary_that_changed_proves_nothing(place: Place) -> None:
    object_id = place.put_for(1)
    for bucket in place.buckets:
        bucket.put_bytes(object_id.key, OTHER)
    with pytest.raises(ObjectChanged):
        place.read(object_id)


CONTENT = ObjectContent("a", 10, 100.0, {"crc": "1", "sha256": "x"})


@pytest.mark.parametrize(
    ("copy", "found"),
    [
        (ObjectContent("a", 10, 50.0, {}), Copy.SAME),
        (ObjectContent("b-2", 10, 50.0, {"crc": "1"}), Copy.SAME),
        (ObjectContent("b-2", 10, 200.0, {"crc": "1", "sha256": "y"}), Copy.OTHER),
        (ObjectContent("b-2", 10, 50.0, {"crc": "2"}), Copy.OLDER),
        (ObjectContent("b-2", 11, 200.0, {"crc": "1"}), Copy.OTHER),
        (ObjectContent("b-2", 11, 50.0, {}), Copy.OLDER),
        (ObjectContent("b-2", 10, 50.0, {"md5": "1"}), Copy.UNPROVEN),
        (ObjectContent("b", 10, 200.0, {"md5": "1"}), Copy.OTHER),
        (ObjectContent("b", 10, 200.0, {"crc": "1"}), Copy.SAME),
    ],
)
def test_a_copy_is_judged_by_size_and_checksums(copy: ObjectContent, found: Copy) -> None:
    assert judge(CONTENT, copy) is found


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"crc64nvme": "a+/=", "type": "FULL_OBJECT"}, {"crc64nvme": "a+/="}),
        ({"sha256": "abc="}, {"sha256": "abc="}),
        ({"sha256": "abc=-3"}, {}),
        ({"sha256": "abc=", "type": "COMPOSITE"}, {}),
        ({}, {}),
    ],
)
def test_only_checksums_of_all_bytes_count(fields: dict[str, str], found: dict[str, str]) -> None:
    sent = {f"x-amz-checksum-{name}": value for name, value in fields.items()}
    modified = "Thu, 01 Jan 1970 00:00:07 GMT"
    head = {"etag": '"e-2"', "content-length": "3", "last-modified": modified, **sent}
    content = object_content(head)
    assert (content.etag, content.size, content.modified) == ("e-2", 3, 7.0)
    assert content.checksums == {f"x-amz-checksum-{name}": value for name, value in found.items()}


# ---- names


def test_names_come_from_the_primary(place: Place) -> None:
    place.buckets[1].put_bytes("only-second", b"x")
    assert place.group.list_page("").objects == ()
    with pytest.raises(ObjectMissing):
        place.group.head("only-second")
    assert place.stores[1].calls() == ()


def fail_primary(place: Place, *, times: int | None = None) -> None:
    """Let the primary fail, as often as it takes until another endpoint gives names."""
    place.stores[0].script(Fault(DOWN, times=times))
    with pytest.raises(Unavailable):
        place.group.list_page("")


def test_one_failure_of_the_primary_changes_no_names(place: Place) -> None:
    place.put("a")
    fail_primary(place, times=1)
    place.group.list_page("")
    assert place.stores[1].calls("list_page") == ()


def test_a_stand_in_does_not_decide_that_something_is_missing(place: Place) -> None:
    fail_primary(place)
    with pytest.raises(Unavailable):
        place.group.head("nothing")


def test_a_silent_primary_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.put("a")
    released = threading.Event()
    page = place.stores[0].list_page

    def hanging(*arguments: Any, **options: Any) -> Any:
        assert released.wait(20)
        return page(*arguments, **options)

    place.stores[0].list_page = hanging  # type: ignore[method-assign]
    try:
        # The limit of the one that never answers: on a busy machine the other one may need longer.
        with monkeypatch.context() as patch:
            patch.setattr(endpoint_group, "NAMES_SECONDS", 0.05)
            with pytest.raises(Unavailable):
                place.group.list_page("")
        assert [info.key for info in place.group.list_page("").objects] == ["a"]
    finally:
        released.set()


def test_a_listing_goes_on_where_it_began(place: Place) -> None:
    for name in "abcd":
        place.put(name, b"x")
    fail_primary(place)
    page = place.group.list_page("", limit=2)
    place.stores[0].heal()
    rest = place.group.list_page("", limit=2, token=page.next_token)
    assert [item.key for item in page.objects + rest.objects] == ["a", "b", "c", "d"]
    assert len(place.stores[1].calls("list_page")) == 2
    assert rest.next_token is None


# ---- prefixes


def test_each_endpoint_has_its_own_prefix() -> None:
    near, far = MemoryStore(), MemoryStore()
    group = EndpointGroup(
        [
            EndpointReader(
                "near", FaultyStore(near, Fault(DOWN, times=None)), prefix="run/", prefix_there="run/"
            ),
            EndpointReader("far", far, prefix="run/", prefix_there="copy/of/run/"),
        ]
    )
    etag = far.put_bytes("copy/of/run/a/x", DATA)
    far.put_bytes("copy/of/run/b", DATA)
    with pytest.raises(Unavailable):
        group.list_page("run/", delimiter="/")
    page = group.list_page("run/", delimiter="/")
    assert ([info.key for info in page.objects], page.prefixes) == (["run/b"], ("run/a/",))
    assert [info.key for info in group.list_page("run/", start_after="run/a/x").objects] == ["run/b"]
    assert group.head("run/b").key == "run/b"
    buffer = bytearray(len(DATA))
    group.get_into(ObjectId("run/a/x", etag), Extent(0, len(DATA)), memoryview(buffer), lambda _: None)
    assert buffer == DATA


# ---- beside writes


@pytest.fixture
def body(tmp_path: Any) -> Callable[[bytes], Any]:
    """Make the body of a PUT."""
    from fusecache.remote.store import FileSlice

    def make(data: bytes) -> FileSlice:
        path = tmp_path / "body"
        path.write_bytes(data)
        return FileSlice(str(path), 0, len(data))

    return make


def test_own_writes_are_read_at_the_primary(place: Place, body: Callable[[bytes], Any]) -> None:
    remote = ReadWriteSplit(place.group, place.stores[0])
    object_id = place.put_for(1)
    etag = remote.put(object_id.key, body(OTHER), metadata={})
    assert place.read(ObjectId(object_id.key, etag)) == OTHER
    assert place.gets() == [1, 0]


def test_a_mount_that_wrote_takes_names_of_the_primary_only(
    place: Place, body: Callable[[bytes], Any]
) -> None:
    remote = ReadWriteSplit(place.group, place.stores[0])
    remote.put("a", body(DATA), metadata={})
    place.stores[0].script(Fault(DOWN, times=None))
    for _ in range(3):
        with pytest.raises(Unavailable):
            remote.list_page("")
    assert place.stores[1].calls() == ()


def test_decisions_about_writes_ask_the_primary_only(place: Place) -> None:
    remote = ReadWriteSplit(place.group, place.stores[0])
    place.put("a")
    fail_primary(place)
    assert remote.head("a").size == len(DATA)
    primary = primary_of(remote)
    for _ in range(2):
        with pytest.raises(Unavailable):
            primary.head("a")
    store: ReadStore = MemoryStore()
    single = ReadWriteSplit(store, None)
    assert primary_of(single) is single
