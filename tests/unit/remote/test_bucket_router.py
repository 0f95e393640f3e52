"""Several buckets as one store: each request goes to its bucket, without the name and with the source's prefix."""

import pytest

from fusecache.model.errors import ObjectMissing
from fusecache.model.objects import Extent, ObjectId
from fusecache.remote.bucket_router import BucketRouter, RoutedBucket
from fusecache.remote.store import Condition, FileSlice
from tests.support.memory_store import MemoryStore


@pytest.fixture
def stores() -> tuple[MemoryStore, MemoryStore]:
    """The stores of the buckets `a` and `b`."""
    return MemoryStore(part_minimum_bytes=1), MemoryStore(part_minimum_bytes=1)


@pytest.fixture
def router(stores: tuple[MemoryStore, MemoryStore]) -> BucketRouter:
    """Both; `b` is mounted below the prefix `p/`."""
    return BucketRouter({"b": RoutedBucket(stores[1], "p/"), "a": RoutedBucket(stores[0])})


def test_the_top_has_the_names_and_sends_nothing(
    router: BucketRouter, stores: tuple[MemoryStore, MemoryStore]
) -> None:
    assert router.list_page("", delimiter="/").prefixes == ("a/", "b/")
    assert router.list_page("b", delimiter="/", limit=2).prefixes == ("b/",)
    assert router.list_page("c", delimiter="/").prefixes == ()
    assert all(each.statistics().lists == 0 for each in stores)


def test_reads_have_the_names_of_the_mount(
    router: BucketRouter, stores: tuple[MemoryStore, MemoryStore]
) -> None:
    stores[0].put_bytes("x", b"one")
    stores[1].put_bytes("p/x/y", b"two")
    stores[1].put_bytes("outside", b"three")
    page = router.list_page("b/", delimiter="/")
    assert (page.objects, page.prefixes) == ((), ("b/x/",))
    (info,) = router.list_page("b/x/").objects
    assert (info.key, info.etag) == ("b/x/y", router.head("b/x/y").etag)
    assert [each.key for each in router.list_page("a/", start_after="a/w").objects] == ["a/x"]
    assert router.list_page("a/", start_after="a/x").objects == ()
    buffer = memoryview(bytearray(3))
    router.get_into(ObjectId("b/x/y", info.etag), Extent(0, 3), buffer, lambda _: None)
    assert bytes(buffer) == b"two"


def test_writes_go_to_one_bucket(
    router: BucketRouter, stores: tuple[MemoryStore, MemoryStore], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("body") / "body"
    path.write_bytes(b"body")
    body = FileSlice(str(path), 0, 4)
    etag = router.put("b/x", body, metadata={}, condition=Condition(None))
    assert (stores[0].contents(), stores[1].contents()) == ({}, {"p/x": b"body"})
    router.copy(ObjectId("b/x", etag), "b/y")
    router.delete("b/x")
    upload = router.create_multipart("a/z", metadata={})
    part = router.upload_part("a/z", upload, 1, body)
    router.complete_multipart("a/z", upload, [part])
    lost = router.create_multipart("b/lost", metadata={})
    assert [each.key for each in router.list_uploads("b/").uploads] == ["b/lost"]
    router.abort_multipart("b/lost", lost)
    assert (stores[0].contents(), stores[1].contents()) == ({"z": b"body"}, {"p/y": b"body"})
    with pytest.raises(ValueError, match="crosses buckets"):
        router.copy(ObjectId("b/y", etag), "a/y")
    assert router.statistics().puts == 1


@pytest.mark.parametrize("key", ["a", "c/x", "x"])
def test_a_key_of_no_bucket_is_missing(router: BucketRouter, key: str) -> None:
    with pytest.raises(ObjectMissing, match="in none of the mount's buckets"):
        router.head(key)
