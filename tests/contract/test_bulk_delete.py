"""Many objects deleted at once, and the store's clock."""

import os
import time
from dataclasses import replace

import pytest

from fusecache.model.errors import AccessDenied, ObjectChanged, Unavailable
from fusecache.model.objects import ObjectInfo
from fusecache.remote.endpoints import Credentials, Endpoint
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import FileSlice
from tests.contract.conftest import ONCE, Subject, closed_later, s3_store
from tests.s3server import Account, Fault, FaultAction, S3Server


def listed(store: S3Store, prefix: str = "") -> list[ObjectInfo]:
    return list(store.list_page(prefix).objects)


def other_store(server: S3Server) -> S3Store:
    """A store that is not R2."""
    return closed_later(
        S3Store(
            server.bucket,
            Endpoint(server.endpoint_url, "us-east-1"),
            credentials=Credentials(server.access_key, server.secret_key),
            transport=ONCE,
        )
    )


def test_batch_takes_one_request_with_its_md5(server: S3Server, store: S3Store) -> None:
    """The MD5, and no checksum that R2 may not know, is checked by the server's `offences`."""
    for index in range(3):
        server.control.put(f"a/{index}", b"x")
    assert store.delete_all(listed(store)) == {}
    assert (server.control.objects(), server.control.counts()["DeleteObjects"]) == ({}, 1)
    (entry,) = server.control.log("DeleteObjects")
    assert "content-md5" in entry.headers


def test_missing_objects_are_success(server: S3Server, store: S3Store) -> None:
    server.control.put("a", b"x")
    objects = listed(store)
    server.control.delete("a")
    assert store.delete_all(objects) == {}


def test_changed_object_is_kept_where_compared(server: S3Server) -> None:
    server.control.set_rules(conditional_deletes=True)
    server.control.put("a", b"x")
    server.control.put("b", b"x")
    store = other_store(server)
    objects = listed(store)
    server.control.put("a", b"new")
    failures = store.delete_all(objects)
    assert {key: type(error) for key, error in failures.items()} == {"a": ObjectChanged}
    assert list(server.control.objects()) == ["a"]


def test_r2_gets_no_condition(server: S3Server, store: S3Store) -> None:
    """It documents none on deletes, so a condition could be refused."""
    server.control.set_rules(conditional_deletes=True)
    server.control.put("a", b"x")
    assert store.delete_all([replace(each, etag="0" * 32) for each in listed(store)]) == {}
    assert server.control.objects() == {}


def test_errors_are_told_by_key(server: S3Server, store: S3Store) -> None:
    server.control.put("mine/a", b"x")
    server.control.put("other", b"x")
    objects = listed(store)
    server.control.add_account(Account(server.access_key, server.secret_key, prefix="mine/"))
    failures = store.delete_all(objects)
    assert {key: type(error) for key, error in failures.items()} == {"other": AccessDenied}
    assert list(server.control.objects()) == ["other"]


def test_keys_outside_of_xml_are_deleted_alone(server: S3Server, store: S3Store) -> None:
    for key in ("bell\a", "line\r\n", "plain", "tab\t&<>"):
        server.control.put(key, b"x")
    assert store.delete_all(listed(store)) == {}
    assert server.control.objects() == {}
    assert server.control.counts()["DeleteObject"] == 1


def test_store_without_batches_is_asked_once(server: S3Server) -> None:
    store = s3_store(server, ONCE)
    server.control.faults(
        Fault(FaultAction.ANSWER, operation="DeleteObjects", status=405, code="MethodNotAllowed")
    )
    for key in "abcd":
        server.control.put(key, b"x")
    objects = listed(store)
    assert store.delete_all(objects[:2]) == store.delete_all(objects[2:]) == {}
    counts = server.control.counts()
    assert (server.control.objects(), counts["DeleteObjects"], counts["DeleteObject"]) == ({}, 1, 4)


def test_unavailable_batch_is_an_error(server: S3Server, store: S3Store) -> None:
    server.control.faults(Fault(FaultAction.ANSWER, operation="DeleteObjects", status=503))
    server.control.put("a", b"x")
    with pytest.raises(Unavailable):
        store.delete_all(listed(store))


def test_clock_is_that_of_the_answers(server: S3Server, store: S3Store) -> None:
    assert abs(store.server_time("") - time.time()) < 60
    server.control.set(clock_skew=600)
    assert abs(store.server_time("") - time.time() - 600) < 60


@pytest.mark.skipif("FUSECACHE_TEST_ENDPOINT" not in os.environ, reason="needs another store")
@pytest.mark.parametrize("subject", ["external"], indirect=True)
def test_another_store_deletes_in_batches(subject: Subject) -> None:
    store, prefix = subject.store, subject.prefix
    assert isinstance(store, S3Store)
    for name in ("a", "größe +%2B", "<&>"):
        store.put(prefix + name, FileSlice(__file__, 0, 1), metadata={})
    objects = listed(store, prefix)
    assert (len(objects), store.delete_all(objects), listed(store, prefix)) == (3, {}, [])
    assert abs(store.server_time(prefix) - time.time()) < 60
