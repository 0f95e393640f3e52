"""Parts that go to the bucket: the same requests, every failure named, no byte of a changed file."""

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from fusecache.model.errors import (
    AccessDenied,
    FusecacheError,
    LocalDiskError,
    Throttled,
    Unavailable,
    UploadLost,
)
from fusecache.model.objects import MIB
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import FileSlice, Sent
from tests.contract.conftest import HASTY
from tests.s3server import Fault, FaultAction, S3Server

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


ANSWERS: list[tuple[int, str, type[FusecacheError]]] = [
    (503, "SlowDown", Throttled),
    (500, "InternalError", Unavailable),
    (403, "AccessDenied", AccessDenied),
    (404, "NoSuchUpload", UploadLost),
]


@pytest.mark.parametrize(("status", "code", "error"), ANSWERS)
def test_an_error_answer_is_told_and_the_next_part_goes_well(
    server: S3Server, store: S3Store, path: Path, status: int, code: str, error: type[FusecacheError]
) -> None:
    upload_id = store.create_multipart("model", metadata={})
    server.control.faults(Fault(FaultAction.ANSWER, operation="UploadPart", nth=1, status=status, code=code))
    with pytest.raises(error, match=f"PUT PART 1 .*/model: {code}"):
        store.upload_part("model", upload_id, 1, part(path, 1))
    assert store.upload_part("model", upload_id, 1, part(path, 1)) == hashlib.md5(DATA[:PART]).hexdigest()


@pytest.mark.parametrize("action", [FaultAction.DROP_BEFORE, FaultAction.DROP_AFTER])
def test_a_connection_that_breaks_is_an_outage_that_passes(
    server: S3Server, store: S3Store, path: Path, action: FaultAction
) -> None:
    upload_id = store.create_multipart("model", metadata={})
    server.control.drop_connections()  # on a kept one, the part would be sent again at once
    server.control.faults(Fault(action, operation="UploadPart", times=1))
    with pytest.raises(Unavailable, match="PUT PART 1"):
        store.upload_part("model", upload_id, 1, part(path, 1))
    assert store.upload_part("model", upload_id, 1, part(path, 1)) == hashlib.md5(DATA[:PART]).hexdigest()


def test_a_connection_that_was_closed_while_nobody_used_it_is_replaced(
    server: S3Server, store: S3Store, path: Path
) -> None:
    upload_id = store.create_multipart("model", metadata={})
    errors = store.statistics().errors
    store.upload_part("model", upload_id, 1, part(path, 1))
    server.control.drop_connections()
    store.upload_part("model", upload_id, 2, part(path, 2))
    assert store.statistics().errors == errors


def test_a_peer_that_takes_nothing_is_given_up(server: S3Server, hasty_store: S3Store, path: Path) -> None:
    upload_id = hasty_store.create_multipart("model", metadata={})
    began = time.monotonic()
    server.control.faults(Fault(FaultAction.HOLD, operation="UploadPart", times=1))
    with pytest.raises(Unavailable, match="timed out"):
        hasty_store.upload_part("model", upload_id, 1, part(path, 1))
    assert time.monotonic() - began < 8 * HASTY.read_timeout_seconds
    server.control.clear_faults()


def test_a_file_that_was_cut_is_no_body(server: S3Server, store: S3Store, path: Path) -> None:
    upload_id = store.create_multipart("model", metadata={})
    body = part(path, 1)
    path.write_bytes(DATA[: PART // 2])
    with pytest.raises(LocalDiskError, match="truncated during the upload"):
        store.upload_part("model", upload_id, 1, body)
    path.unlink()
    with pytest.raises(LocalDiskError, match="cannot open"):
        store.upload_part("model", upload_id, 1, body)
    assert server.control.uploads()[0].parts == {}


def test_bytes_that_changed_since_their_digest_are_refused(
    server: S3Server, store: S3Store, path: Path
) -> None:
    upload_id = store.create_multipart("model", metadata={})
    body = part(path, 1)
    path.write_bytes(b"other" + DATA[5:])
    with pytest.raises(Unavailable, match="BadDigest"):
        store.upload_part("model", upload_id, 1, body)


def test_many_parts_at_once_do_not_mix(server: S3Server, store: S3Store, path: Path) -> None:
    upload_id = store.create_multipart("model", metadata={})
    etags: dict[int, str] = {}

    def send(number: int) -> None:
        etags[number] = store.upload_part("model", upload_id, number, part(path, number))

    threads = [threading.Thread(target=send, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.complete_multipart("model", upload_id, [etags[number] for number in (1, 2, 3)])
    assert server.control.read("model") == DATA


def test_renewed_keys_go_on(server: S3Server, store: S3Store, path: Path) -> None:
    upload(store, "one", path)
    store.reload()
    upload(store, "two", path)
    assert server.control.read("two") == DATA
