"""What other clients stored with an object stays with it: headers and metadata, storage class, symlinks of s3fs."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from fusecache.model.objects import GENERATION
from tests.mount.conftest import Place
from tests.support.mounts import Mount, pattern, wait_until
from tests.support.s3_buckets import Bucket

MIB = 2**20
HEADERS = {
    "ContentType": "text/html; charset=utf-8",
    "CacheControl": "public, max-age=60",
    "ContentDisposition": 'attachment; filename="page.html"',
    "ContentEncoding": "identity",
    "ContentLanguage": "de",
}
# A value with spaces and one that looks as if it were encoded.
FOREIGN = {"licence": "CC BY 4.0", "discount": "50%20off"}


def put(bucket: Bucket, name: str, data: bytes = b"<p>", **more: Any) -> None:
    """Store an object with headers, as a client of the bucket does."""
    bucket.client.put_object(
        Bucket=bucket.service.bucket,
        Key=bucket.prefix + name,
        Body=data,
        **{**HEADERS, "Metadata": FOREIGN, **more},
    )


def put_in_parts(bucket: Bucket, name: str) -> None:
    """Store such an object by an upload in parts: its ETag does not tell its bytes."""
    place: Any = {"Bucket": bucket.service.bucket, "Key": bucket.prefix + name}
    upload = bucket.client.create_multipart_upload(**place, **HEADERS, Metadata=FOREIGN)["UploadId"]
    part = bucket.client.upload_part(**place, UploadId=upload, PartNumber=1, Body=b"<p>")["ETag"]
    parts: Any = {"Parts": [{"PartNumber": 1, "ETag": part}]}
    bucket.client.complete_multipart_upload(**place, UploadId=upload, MultipartUpload=parts)


def assert_kept(bucket: Bucket, name: str) -> None:
    found = bucket.head(name)
    assert {key: found.get(key) for key in HEADERS} == HEADERS
    assert {key: found["Metadata"].get(key) for key in FOREIGN} == FOREIGN


def assert_kept_by_new_content(bucket: Bucket, name: str) -> None:
    assert_kept(bucket, name)
    assert GENERATION in bucket.head(name)["Metadata"]


@pytest.mark.parametrize(("mode", "data"), [("ab", b"</p>"), ("wb", b"<b>"), ("r+b", b"<"), ("wb", b"")])
def test_new_content_keeps_headers_and_metadata(place: Place, mode: str, data: bytes) -> None:
    put(place.bucket, "page")
    with open(place.path / "page", mode) as file:
        file.write(data)
    place.sync()
    assert_kept_by_new_content(place.bucket, "page")


def test_content_that_is_appended_twice_keeps_them(place: Place) -> None:
    put(place.bucket, "log")
    for _ in range(2):
        with open(place.path / "log", "ab") as file:
            file.write(b"line\n")
        place.sync()
    assert place.bucket.get("log") == b"<p>line\nline\n"
    assert_kept_by_new_content(place.bucket, "log")


def test_a_large_file_keeps_them(place: Place) -> None:
    put(place.bucket, "large")
    (place.path / "large").write_bytes(pattern(66 * MIB))
    place.sync()
    assert place.bucket.sizes()["large"] == 66 * MIB
    assert_kept_by_new_content(place.bucket, "large")


@pytest.mark.parametrize("store", [put, put_in_parts])
def test_a_renamed_object_keeps_them(place: Place, store: Callable[[Bucket, str], None]) -> None:
    store(place.bucket, "page")
    (place.path / "page").rename(place.path / "moved")
    place.sync()
    assert_kept(place.bucket, "moved")


def test_a_file_that_was_changed_and_renamed_keeps_them(place: Place) -> None:
    put(place.bucket, "page")
    with open(place.path / "page", "ab") as file:
        file.write(b"</p>")
    (place.path / "page").rename(place.path / "moved")
    place.sync()
    assert place.bucket.names() == ["moved"]
    assert_kept_by_new_content(place.bucket, "moved")


def test_another_file_that_is_renamed_over_it_has_its_own(place: Place) -> None:
    put(place.bucket, "page")
    put(place.bucket, "other", b"plain", ContentType="text/plain")
    assert (place.path / "other").read_bytes() == b"plain"
    (place.path / "other").replace(place.path / "page")
    place.sync()
    assert place.bucket.head("page")["ContentType"] == "text/plain"
    put(place.bucket, "page2")
    (place.path / "new").write_bytes(b"new")
    (place.path / "new").replace(place.path / "page2")
    place.sync()
    found = place.bucket.head("page2")
    assert found.get("ContentType") != HEADERS["ContentType"]
    assert not found["Metadata"].keys() & FOREIGN.keys()


def test_checksums_of_the_old_bytes_do_not_stay(place: Place) -> None:
    """rclone and s3cmd would take the new bytes for damaged."""
    put(
        place.bucket,
        "data",
        Metadata={"md5chksum": "XUFAKrxLKna5cZ2REBfFkg==", "s3cmd-attrs": "md5:5d4140", "a": "b"},
    )
    with open(place.path / "data", "ab") as file:
        file.write(b"more")
    place.sync()
    found = place.bucket.head("data")["Metadata"]
    assert found["a"] == "b"
    assert not found.keys() & {"md5chksum", "s3cmd-attrs"}


@pytest.mark.s3server_only
def test_new_files_cost_no_request_for_that(place: Place) -> None:
    for number in range(3):
        (place.path / f"file-{number}").write_bytes(b"1")
        place.sync()
        (place.path / f"file-{number}").write_bytes(b"22")
        place.sync()
    assert place.bucket.requests("HeadObject") == []


@pytest.mark.s3server_only
def test_a_rename_keeps_the_storage_class(mount: Callable[..., Mount], bucket: Bucket) -> None:
    """Also on a mount that gives new objects another one."""
    put(bucket, "cold", StorageClass="STANDARD_IA")
    put(bucket, "warm")
    node = mount("--storage-class", "GLACIER_IR")
    for name in ("cold", "warm"):
        (node.path / name).rename(node.path / f"moved-{name}")
    node.sync()
    assert bucket.head("moved-cold")["StorageClass"] == "STANDARD_IA"
    assert bucket.head("moved-warm").get("StorageClass", "STANDARD") == "STANDARD"


def test_symlinks_of_s3fs_are_links(mount: Callable[..., Mount], bucket: Bucket) -> None:
    """An object whose mode says so (decimal) and whose body is the target."""
    bucket.put("data/file", b"bytes")
    bucket.put("link", b"data/file", {"mode": "41471", "mtime": "1700000000", "uid": "0", "gid": "0"})
    node = mount("--posix-metadata")
    assert os.readlink(node.path / "link") == "data/file"
    assert (node.path / "link").read_bytes() == b"bytes"
    assert {each.name: each.is_symlink() for each in os.scandir(node.path)}["link"]
    (node.path / "link").rename(node.path / "moved")
    node.sync()
    other = mount("--posix-metadata")
    for each in (node, other):
        wait_until(lambda each=each: os.path.islink(each.path / "moved"), "the link")
        assert os.readlink(each.path / "moved") == "data/file"
    (node.path / "moved").unlink()
    node.sync()
    assert bucket.names() == ["data/file"]
