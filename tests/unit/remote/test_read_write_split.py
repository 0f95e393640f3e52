"""A reader and a writer as one store, and the scripted failures it is tested with."""

import pytest

from fusecache.model.errors import (
    AccessDenied,
    ObjectMissing,
    ReadOnly,
    RemoteError,
    Unavailable,
)
from fusecache.model.objects import KIB
from fusecache.policy.bucket_health import BucketState
from fusecache.remote import read_write_split
from fusecache.remote.protocol.headers import multipart_etag
from fusecache.remote.protocol.responses import error_of_response
from fusecache.remote.read_write_split import ReadWriteSplit
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.memory_store import MemoryStore

DATA = bytes(range(256)) * 4 * KIB  # 1 MiB
DOWN = Unavailable("down")


@pytest.fixture
def bucket() -> MemoryStore:
    """A bucket with one object."""
    store = MemoryStore()
    store.put_bytes("a", DATA)
    return store


def test_without_a_writer_nothing_is_written(bucket: MemoryStore) -> None:
    remote = ReadWriteSplit(bucket, None)
    with pytest.raises(ReadOnly):
        remote.delete("a")
    assert list(bucket.contents()) == ["a"]


def test_a_writer_takes_every_write(bucket: MemoryStore) -> None:
    reader = FaultyStore(bucket)
    remote = ReadWriteSplit(reader, bucket)
    remote.copy(bucket.head("a").object_id, "b")
    remote.delete("a")
    remote.probe_write("")
    assert list(bucket.contents()) == ["b"]
    assert bucket.uploads() == ()
    assert reader.calls() == ()


# ---- scripted failures


def test_an_answer_can_be_lost_after_its_effect(bucket: MemoryStore) -> None:
    store = FaultyStore(bucket, Fault(DOWN, "delete", key="a*", after_effect=True))
    with pytest.raises(Unavailable):
        store.delete("a")
    assert bucket.contents() == {}
    store.delete("a")


def test_a_script_skips_fires_and_ends(bucket: MemoryStore) -> None:
    store = FaultyStore(bucket, Fault(DOWN, "head", skip=1, times=2))
    outcomes = []
    for _ in range(5):
        try:
            outcomes.append(store.head("a").size)
        except Unavailable:
            outcomes.append(-1)
    size = len(DATA)
    assert outcomes == [size, -1, -1, size, size]
    assert [call.error for call in store.calls("head")] == [None, DOWN, DOWN, None, None]


# ---- answers


def test_what_the_table_does_not_know_is_worth_another_try_only_if_it_is_the_server_s() -> None:
    def kind(status: int, code: str = "Strange", message: str = "") -> str:
        return type(error_of_response("GET x", code=code, status=status, message=message)).__name__

    assert kind(400) == "Refused"
    assert kind(502) == "Unavailable"
    assert kind(0) == "Unavailable"
    assert kind(307) == "Refused"
    assert kind(400, "IncompleteBody") == "Unavailable"
    assert kind(400, "InvalidArgument", "Credential access key has length 20, should be 32") == "AccessDenied"
    assert kind(400, "InvalidArgument", "part number") == "Refused"
    assert kind(404, "NoSuchUpload") == "UploadLost"
    assert kind(404, "404") == "ObjectMissing"


def test_an_answer_s_error_names_request_cause_and_way_out() -> None:
    error = error_of_response("PUT s3://b/k", code="AccessDenied", status=403, message="no")
    assert str(error).startswith("PUT s3://b/k: AccessDenied (403): no; check the credentials")


def test_the_etag_of_an_upload_follows_from_its_parts() -> None:
    # As Ceph's HEAD tells it for one part of 100 times `x`.
    assert multipart_etag(["aed563ecafb4bcc5654c597a421547b2"]) == "bccb8986cc6b395e4f045d410c776698-1"


# ---- since when the keys are refused

DENIED = AccessDenied("403")


@pytest.mark.case(30)
def test_refused_keys_are_noted_until_something_is_granted(
    bucket: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(read_write_split.time, "monotonic", lambda: clock[0])
    store = FaultyStore(bucket)
    remote = ReadWriteSplit(store, store)
    for method, call in (("head", lambda: remote.head("a")), ("delete", lambda: remote.delete("b"))):
        call()
        assert remote.health.state is BucketState.ANSWERING
        clock[0] += 45
        store.script(Fault(DENIED, method), Fault(DOWN, method), Fault(DENIED, method))
        store.script(Fault(DENIED, "probe_write", times=2))
        for _ in range(3):
            with pytest.raises(RemoteError):
                call()
            clock[0] += 45
        assert remote.health.state is BucketState.REFUSED
        assert remote.health.refused_seconds(has_writes=True) == 135
        assert remote.health.refused_seconds(has_writes=False) == (135 if method == "head" else 0)
        call()
        assert remote.health.state is BucketState.ANSWERING


def test_a_missing_object_shows_that_the_keys_are_good(bucket: MemoryStore) -> None:
    store = FaultyStore(bucket, Fault(DENIED, "head"))
    remote = ReadWriteSplit(store, None)
    with pytest.raises(AccessDenied):
        remote.head("a")
    assert remote.health.reads_refused_since is not None
    with pytest.raises(ObjectMissing):
        remote.head("missing")
    assert remote.health.reads_refused_since is None


def test_a_write_that_is_granted_tells_of_the_reads_if_the_keys_are_the_same(bucket: MemoryStore) -> None:
    for has_other_keys in (False, True):
        store = FaultyStore(bucket, Fault(DENIED, "head"))
        remote = ReadWriteSplit(store, FaultyStore(bucket) if has_other_keys else store)
        with pytest.raises(AccessDenied):
            remote.head("a")
        remote.delete("b")
        assert (remote.health.reads_refused_since is not None) is has_other_keys
