"""What a store does with the conditions of writes, true and false ones, is found out by writes of a small object."""

from collections.abc import Iterator

import pytest

from fusecache.remote.endpoints import Credentials, Endpoint
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import ConditionalWrites
from tests.s3server import S3Server

REQUESTS_MAX = 14


@pytest.fixture
def server() -> Iterator[S3Server]:
    """A server of this test's own, whose rules it changes."""
    with S3Server() as made:
        yield made


@pytest.fixture
def store(server: S3Server) -> Iterator[S3Store]:
    """A client of a store that is not R2."""
    endpoint = Endpoint(server.endpoint_url, "auto")
    made = S3Store(server.bucket, endpoint, credentials=Credentials(server.access_key, server.secret_key))
    yield made
    made.close()


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("kept", ConditionalWrites.KEPT),
        ("ignored", ConditionalWrites.IGNORED),
        ("refused", ConditionalWrites.REFUSED),
        ("never-holds", ConditionalWrites.REFUSED),
        ("not-of-parts", ConditionalWrites.NOT_OF_PARTS),
    ],
)
def test_each_kind_of_store_is_known_by_few_requests_that_leave_nothing(
    server: S3Server, store: S3Store, kind: str, found: ConditionalWrites
) -> None:
    server.control.set_rules(conditional_writes=kind)
    store.probe_write("mine/")
    assert store.probe_conditions("mine/") is found
    assert len(server.control.log()) <= REQUESTS_MAX
    assert (server.control.objects(), server.control.uploads()) == ({}, [])


def test_r2_is_not_tested_as_its_conditions_are_documented(server: S3Server) -> None:
    endpoint = Endpoint(server.endpoint_url, "auto", is_r2=True)
    store = S3Store(server.bucket, endpoint, credentials=Credentials(server.access_key, server.secret_key))
    assert store.probe_conditions("") is ConditionalWrites.KEPT
    assert server.control.log() == []
    store.close()
