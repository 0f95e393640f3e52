"""A copy takes a true condition and refuses a false one: of its source and its destination, in each way of copying."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from fusecache.model.errors import ObjectChanged
from fusecache.model.objects import MIB, ObjectId
from fusecache.remote.endpoints import Credentials, Endpoint
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import Condition, FileSlice
from tests.contract.conftest import SMALL_COPIES
from tests.s3server import S3Server

MakeBody = Callable[[bytes], FileSlice]
NOTHING_THERE = Condition(None)
SOURCE = b"source"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as made:
        made.control.set_rules(write_interval_seconds=0.0)
        yield made


@pytest.fixture(params=[True, False], ids=["R2", "other store"])
def store(server: S3Server, request: pytest.FixtureRequest) -> Iterator[S3Store]:
    """R2 takes conditions of the destination in headers of its own. For others a HEAD tells before the copy."""
    endpoint = Endpoint(server.endpoint_url, "auto", is_r2=request.param)
    keys = Credentials(server.access_key, server.secret_key)
    made = S3Store(server.bucket, endpoint, credentials=keys, transport=SMALL_COPIES)
    yield made
    made.close()
    for key in server.control.objects():
        server.control.delete(key)
    assert server.control.uploads() == []


@pytest.fixture(params=[len(SOURCE), 7 * MIB], ids=["one request", "parts"])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(params=[None, {"note": "new"}], ids=["as it is", "other metadata"])
def metadata(request: pytest.FixtureRequest) -> dict[str, str] | None:
    return request.param  # type: ignore[no-any-return]


def put(store: S3Store, body: MakeBody, key: str, data: bytes) -> ObjectId:
    return ObjectId(key, store.put(key, body(data), metadata={}))


def source_of(store: S3Store, body: MakeBody, size: int) -> ObjectId:
    return put(store, body, "from", SOURCE.ljust(size))


def test_of_its_source(store: S3Store, body: MakeBody, size: int, metadata: dict[str, str] | None) -> None:
    source = source_of(store, body, size)
    with pytest.raises(ObjectChanged):
        store.copy(replace(source, etag="0" * 32), "to", metadata=metadata, size=size)
    assert [each.key for each in store.list_page("").objects] == ["from"]
    store.copy(source, "to", metadata=metadata, size=size)
    assert store.head("to").size == size


@pytest.mark.parametrize("exists", [True, False], ids=["replaced", "new"])
def test_of_its_destination(
    store: S3Store, body: MakeBody, size: int, metadata: dict[str, str] | None, *, exists: bool
) -> None:
    source = source_of(store, body, size)
    there = put(store, body, "to", b"there") if exists else None
    true = Condition(there.etag) if there is not None else NOTHING_THERE
    for false in {NOTHING_THERE, true, Condition(source.etag)} - {true}:
        with pytest.raises(ObjectChanged):
            store.copy(source, "to", condition=false, metadata=metadata, size=size)
    shown = {each.key: each.etag for each in store.list_page("").objects}
    assert shown.get("to") == (there.etag if there is not None else None)
    store.copy(source, "to", condition=true, metadata=metadata, size=size)
    assert store.head("to").size == size
