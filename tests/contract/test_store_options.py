"""Stores that want more in each request: encryption, storage classes, a payer, no signature at all."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusecache.config.options import MountOptions, load_options
from fusecache.daemon.connect import request_settings
from fusecache.model.errors import AccessDenied, ConfigError, Refused, RemoteError
from fusecache.model.objects import Extent, ObjectId
from fusecache.remote.endpoints import Credentials, Endpoint, RequestSettings
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import Condition, FileSlice
from tests.contract.conftest import ONCE, closed_later
from tests.s3server import S3Server, boto_client

SSE = "x-amz-server-side-encryption"
MakeBody = Callable[[bytes], FileSlice]


def open_store(server: S3Server, settings: RequestSettings) -> S3Store:
    return closed_later(
        S3Store(
            server.bucket,
            Endpoint(server.endpoint_url, "auto", is_r2=True),
            credentials=None if settings.is_unsigned else Credentials(server.access_key, server.secret_key),
            transport=ONCE,
            settings=settings,
        )
    )


def read(store: S3Store, object_id: ObjectId, size: int) -> bytes:
    buffer = bytearray(size)
    store.get_into(object_id, Extent(0, size), memoryview(buffer), lambda _: None)
    return bytes(buffer)


def use_all(store: S3Store, body: MakeBody) -> None:
    """Send every kind of request, most of them twice."""
    for number in (1, 2):
        etag = store.put(f"whole-{number}", body(b"bytes"), metadata={})
        assert read(store, ObjectId(f"whole-{number}", etag), 5) == b"bytes"
        upload = store.create_multipart(f"parts-{number}", metadata={})
        part = store.upload_part(f"parts-{number}", upload, 1, body(b"part"))
        store.complete_multipart(f"parts-{number}", upload, [part], condition=Condition(None))
        copy = store.copy(ObjectId(f"whole-{number}", etag), f"copy-{number}")
        assert read(store, ObjectId(f"copy-{number}", copy), 5) == b"bytes"
        store.head(f"parts-{number}")
        store.abort_multipart("aborted", store.create_multipart("aborted", metadata={}))
    store.list_page("")
    store.delete("whole-1")
    store.delete("copy-1")


def stored(server: S3Server, name: str) -> dict[str, str | None]:
    return {key: view.headers.get(name) for key, view in server.control.objects().items()}


@pytest.mark.parametrize(
    ("settings", "headers"),
    [
        (RequestSettings(sse="AES256"), {SSE: "AES256"}),
        (
            RequestSettings(sse="aws:kms", kms_key_id="arn:1"),
            {SSE: "aws:kms", f"{SSE}-aws-kms-key-id": "arn:1"},
        ),
        (RequestSettings(storage_class="STANDARD_IA"), {"x-amz-storage-class": "STANDARD_IA"}),
    ],
    ids=["AES256", "kms", "class"],
)
def test_all_new_objects_have_the_settings(
    server: S3Server, body: MakeBody, settings: RequestSettings, headers: dict[str, str]
) -> None:
    use_all(open_store(server, settings), body)
    for name, value in headers.items():
        assert stored(server, name) == dict.fromkeys(["copy-2", "parts-1", "parts-2", "whole-2"], value)


def test_objects_under_a_key_of_ours_need_it(server: S3Server, body: MakeBody) -> None:
    settings = RequestSettings(customer_key=bytes(range(32)))
    assert str(settings.customer_key) not in repr(settings)
    store = open_store(server, settings)
    use_all(store, body)
    assert None not in stored(server, f"{SSE}-customer-key-md5").values()
    etag = server.control.objects()["whole-2"].etag
    other = open_store(server, RequestSettings(customer_key=bytes(32)))
    bare = open_store(server, RequestSettings())
    for wrong, error in ((other, AccessDenied), (bare, Refused)):
        with pytest.raises(error):
            read(wrong, ObjectId("whole-2", etag), 5)
    assert not [
        name for entry in server.control.log() for name in entry.headers if name.endswith("customer-key")
    ]


def test_a_requester_pays_for_every_request(server: S3Server, body: MakeBody) -> None:
    server.control.set_rules(requester_pays=True)
    with pytest.raises(AccessDenied):
        open_store(server, RequestSettings()).list_page("")
    use_all(open_store(server, RequestSettings(requester_pays=True)), body)
    assert {entry.headers.get("x-amz-request-payer") for entry in server.control.log()} == {None, "requester"}
    assert [
        entry.status for entry in server.control.log() if not entry.headers.get("x-amz-request-payer")
    ] == [403]


def test_a_public_bucket_needs_no_keys(
    server: S3Server, body: MakeBody, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_") and name != "AWS_CA_BUNDLE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    etag = server.control.put("file", b"bytes")
    store = open_store(server, RequestSettings(is_unsigned=True))
    with pytest.raises(AccessDenied):
        store.list_page("")
    server.control.set_rules(anonymous_reads=True)
    assert [each.key for each in store.list_page("").objects] == ["file"]
    for _ in range(3):
        assert store.head("file").size == 5
        assert read(store, ObjectId("file", etag), 5) == b"bytes"
    with pytest.raises(AccessDenied):
        store.put("new", body(b"1"), metadata={})


# ---- archived objects


def test_an_archived_object_names_its_storage_class(server: S3Server) -> None:
    client = boto_client(server)
    etag = client.put_object(Bucket=server.bucket, Key="old", Body=b"bytes", StorageClass="GLACIER")["ETag"]
    store = open_store(server, RequestSettings())
    with pytest.raises(RemoteError, match=r"/old.*archived in storage class GLACIER; restore it") as caught:
        read(store, ObjectId("old", etag.strip('"')), 5)
    assert type(caught.value).__name__ == "ObjectArchived"
    client.close()


# ---- from the options of a mount


def options(tmp_path: Path, **chosen: object) -> MountOptions:
    """Return the options of a mount with these."""
    return load_options(
        {"source": "s3://b", "mountpoint": str(tmp_path / "m"), "cache_size": "1GiB", **chosen}, {}
    )


@pytest.mark.parametrize(
    "text", [b"k" * 32, b"a2tra2tra2tra2tra2tra2tra2tra2tra2tra2tra2s=\n"], ids=["raw", "base64"]
)
def test_a_key_of_ours_comes_from_a_file(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(text)
    assert request_settings(options(tmp_path, sse=f"customer:{path}")).customer_key == b"k" * 32


def test_the_key_of_kms_may_be_named(tmp_path: Path) -> None:
    for chosen, key in (("aws:kms", ""), ("aws:kms:arn:aws:kms:eu:1:key/2", "arn:aws:kms:eu:1:key/2")):
        settings = request_settings(options(tmp_path, sse=chosen))
        assert (settings.sse, settings.kms_key_id) == ("aws:kms", key)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"unsigned": True}, "add read_only"),
        ({"sse": "AES256:id"}, "one of AES256, aws:kms, aws:kms:KEY, customer:FILE"),
        ({"sse": "id"}, "one of AES256, aws:kms"),
        ({"sse": "customer"}, "customer:FILE"),
        ({"sse": "customer:/missing"}, "sse = /missing: No such file"),
        ({"sse": "customer:{}/open"}, "chmod 600 "),
        ({"sse": "customer:{}/short"}, "openssl rand 32"),
    ],
)
def test_settings_that_contradict_are_refused(
    tmp_path: Path, chosen: dict[str, object], message: str
) -> None:
    for name, mode in (("open", 0o644), ("short", 0o600)):
        (tmp_path / name).touch(mode=mode)
    found = {
        name: value.format(tmp_path) if isinstance(value, str) else value for name, value in chosen.items()
    }
    with pytest.raises(ConfigError, match=message):
        request_settings(options(tmp_path, **found))
