"""Parts that go to the bucket, sent by what sends whole objects: `test_object_puts` has its failures."""

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fusecache.model.errors import UploadLost
from fusecache.model.objects import MIB
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import FileSlice, Sent
from tests.s3server import S3Server

PART = 5 * MIB
DATA = b"".join(index.to_bytes(8, "big") for index in range(2 * PART // 8)) + b"the rest"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "body"
    path.write_bytes(DATA)
    return path


def part(path: Path, number: int, *, known: bool = True) -> FileSlice:
    """Return the body of a part; known: with its MD5."""
    offset = (number - 1) * PART
    data = path.read_bytes()[offset : offset + PART]
    return FileSlice(str(path), offset, len(data), hashlib.md5(data).digest() if known else b"")


def upload(store: S3Store, key: str, path: Path, *, known: bool = True) -> None:
    upload_id = store.create_multipart(key, metadata={"name": "value"})
    etags = [
        store.upload_part(key, upload_id, number, part(path, number, known=known)) for number in (1, 2, 3)
    ]
    assert etags[0] == hashlib.md5(DATA[:PART]).hexdigest()
    store.complete_multipart(key, upload_id, etags)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "key", ["model", "a//b/../c", "blank + & = ? # % %41/ü/日本語/😀", "~!@$^*()_-'\",;:<>[]{}|\\"]
)
def test_parts_arrive_as_they_are_by_requests_without_chunks_or_hash(
    server: S3Server,
    store: S3Store,
    path: Path,
    key: str,
    known: bool,  # noqa: FBT001
) -> None:
    upload(store, key, path, known=known)
    assert server.control.read(key) == DATA
    sent = server.control.log("UploadPart")
    assert len(sent) == 3
    for entry in sent:
        assert entry.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert "content-md5" in entry.headers
        assert not {"expect", "transfer-encoding", "content-encoding", "x-amz-trailer"} & set(entry.headers)
    assert len({entry.connection for entry in sent}) == 1


def test_what_was_sent_is_counted(server: S3Server, store: S3Store, path: Path) -> None:
    before = store.statistics()
    upload(store, "model", path)
    after = store.statistics()
    assert (after.parts, after.bytes_written) == (before.parts + 3, before.bytes_written + len(DATA))
    assert after.bytes_sent == before.bytes_sent + len(DATA)
    sent = Sent(0.0)
    with pytest.raises(UploadLost):
        store.upload_part("model", "no-such-upload", 1, replace(part(path, 1), sent=sent))
    assert (store.statistics().bytes_sent, sent.bytes) == (
        after.bytes_sent,
        0,
    )  # what failed is taken off again


def test_how_far_a_part_is_is_told_while_it_is_sent(server: S3Server, store: S3Store, path: Path) -> None:
    upload_id = store.create_multipart("model", metadata={})
    size = 32 * MIB  # more than the sockets' buffers take at once
    path.write_bytes(bytes(size))
    large = FileSlice(str(path), 0, size, hashlib.md5(bytes(size)).digest())
    before = store.statistics().bytes_sent
    told: list[tuple[int, int]] = []
    sent = Sent(0.0)
    server.control.set(upload_bandwidth=32 * MIB)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(store.upload_part, "model", upload_id, 2, replace(large, sent=sent))
        while not answer.done():
            told.append((sent.bytes, store.statistics().bytes_sent - before))
            time.sleep(0.01)
    server.control.set(upload_bandwidth=None)
    between = [each for each in told if 0 < each[0] < size]
    assert between
    assert all(0 <= total <= size for _, total in told)
    assert (sent.bytes, store.statistics().bytes_sent - before) == (size, size)
