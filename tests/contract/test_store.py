"""What every store promises (`fusecache/remote/store.py`), whichever bucket is behind it."""

import hashlib
import time
from collections.abc import Callable

import pytest

from fusecache.model.errors import (
    LocalDiskError,
    ObjectChanged,
    ObjectMissing,
    Refused,
    Unavailable,
    UploadLost,
)
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import Condition, FileSlice
from tests.contract.conftest import Subject

MakeBody = Callable[[bytes], FileSlice]

PART = 5 * MIB
NOTHING_THERE = Condition(etag=None)


def noise(size: int) -> bytes:
    """Bytes in which no two extents are equal."""
    return hashlib.shake_128(b"fusecache").digest(size)


def read(subject: Subject, object_id: ObjectId, extent: Extent) -> bytes:
    """The bytes of one extent; the buffer behind it must stay untouched."""
    buffer = bytearray(extent.size + 1)
    subject.store.get_into(object_id, extent, memoryview(buffer), lambda _: None)
    assert buffer[-1] == 0
    return bytes(buffer[: extent.size])


def put(subject: Subject, body: FileSlice, name: str = "a", **metadata: str) -> ObjectId:
    key = subject.key(name)
    return ObjectId(key, subject.store.put(key, body, metadata=metadata))


def names(subject: Subject, **arguments: object) -> list[str]:
    """Every key and prefix of a listing, page by page, without the test's own prefix."""
    found: list[str] = []
    token = None
    while True:
        page = subject.store.list_page(subject.prefix, token=token, **arguments)  # type: ignore[arg-type]
        found += [item.key for item in page.objects] + list(page.prefixes)
        token = page.next_token
        if token is None:
            return [name.removeprefix(subject.prefix) for name in found]


# ---- one object


def test_head_tells_what_put_stored(subject: Subject, body: MakeBody) -> None:
    data = noise(100_000)
    stored = put(subject, body(data), generation="7", mode="0644")
    facts = subject.store.head(stored.key)
    assert facts.object_id == stored
    assert (facts.size, facts.metadata) == (100_000, {"generation": "7", "mode": "0644"})
    assert stored.etag == hashlib.md5(data).hexdigest() or "MD5" in subject.lacks
    assert abs(facts.modified - time.time()) < 60


@pytest.mark.parametrize("size", [0, 1, PART - 1])
def test_any_size_comes_back_as_it_was(subject: Subject, body: MakeBody, size: int) -> None:
    data = noise(size)
    stored = put(subject, body(data))
    assert subject.store.head(stored.key).size == size
    if size:
        assert read(subject, stored, Extent(0, size)) == data


@pytest.mark.case(22)
def test_a_small_object_follows_an_empty_one_at_once(subject: Subject, body: MakeBody) -> None:
    began = time.monotonic()
    for turn in range(8):
        put(subject, body(b""), f"empty-{turn}")
        put(subject, body(noise(1024)), f"small-{turn}")
    assert time.monotonic() - began < 8  # a client that waits for `100 Continue` needs a second each


@pytest.mark.case(45)
@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "",
        "100%",
        "50%20off",
        "%ff",
        "=?utf-8?q?x?=",
        " spaces at both ends ",
        "größe/データ/→",
        "line\nbreak\r\n",
        '"quoted", with, commas',
    ],
)
def test_metadata_comes_back_as_it_was(subject: Subject, body: MakeBody, value: str) -> None:
    stored = put(subject, body(b"x"), target=value)
    assert subject.store.head(stored.key).metadata == {"target": value}


@pytest.mark.parametrize(
    "name", ["with space", "plus+sign", "per%20cent", "ünïcode-→", "a//b", "quote'\"&<>", "dir/"]
)
def test_any_key_is_stored_listed_and_read(subject: Subject, body: MakeBody, name: str) -> None:
    stored = put(subject, body(b"bytes"), name)
    assert names(subject) == [name]
    assert read(subject, stored, Extent(0, 5)) == b"bytes"


def test_delete_removes_and_a_missing_object_is_deleted_already(subject: Subject, body: MakeBody) -> None:
    stored = put(subject, body(b"x"))
    subject.store.delete(stored.key)
    subject.store.delete(stored.key)
    with pytest.raises(ObjectMissing, match="a"):
        subject.store.head(stored.key)


def test_a_body_that_is_shorter_than_its_slice_is_never_stored(subject: Subject, body: MakeBody) -> None:
    good = body(b"bytes")
    with pytest.raises(LocalDiskError, match="ends before"):
        put(subject, FileSlice(good.path, good.offset, 1000))
    assert names(subject) == []


# ---- reading


@pytest.mark.parametrize(
    "extent", [Extent(0, 1), Extent(0, 1_000_000), Extent(999_999, 1_000_000), Extent(123, 800_001)]
)
def test_a_read_gets_exactly_its_extent(subject: Subject, body: MakeBody, extent: Extent) -> None:
    data = noise(1_000_000)
    assert read(subject, put(subject, body(data)), extent) == data[extent.start : extent.stop]


def test_progress_grows_and_tells_only_of_valid_bytes(subject: Subject, body: MakeBody) -> None:
    data = noise(3 * MIB)
    stored = put(subject, body(data))
    buffer = bytearray(3 * MIB)
    reports: list[int] = []

    def progress(count: int) -> None:
        assert buffer[:count] == data[:count]
        reports.append(count)

    subject.store.get_into(stored, Extent(0, 3 * MIB), memoryview(buffer), progress)
    assert reports == sorted(set(reports))
    assert reports[-1] == 3 * MIB
    assert len(reports) > 3  # readers are answered before the whole body is there


def test_a_replaced_object_is_never_read_as_the_old_one(subject: Subject, body: MakeBody) -> None:
    old = put(subject, body(b"old bytes"))
    put(subject, body(b"new bytes"))
    buffer = bytearray(9)
    with pytest.raises(ObjectChanged):
        subject.store.get_into(old, Extent(0, 9), memoryview(buffer), lambda _: None)
    assert buffer == bytes(9)


def test_an_extent_past_the_end_belongs_to_another_version(subject: Subject, body: MakeBody) -> None:
    if "limits" in subject.lacks:
        pytest.skip("Azurite answers such a range with 206")
    stored = put(subject, body(b"short"))
    with pytest.raises(ObjectChanged):
        read(subject, stored, Extent(5, 6))


def test_a_missing_object_is_missing(subject: Subject) -> None:
    # Azurite looks at If-Match first.
    with pytest.raises((ObjectMissing, ObjectChanged) if "limits" in subject.lacks else ObjectMissing):
        read(subject, ObjectId(subject.key("none"), "0" * 32), Extent(0, 1))


# ---- conditions


def test_a_new_object_does_not_replace_one(subject: Subject, body: MakeBody) -> None:
    key = subject.key("a")
    subject.store.put(key, body(b"first"), metadata={}, condition=NOTHING_THERE)
    with pytest.raises(ObjectChanged):
        subject.store.put(key, body(b"second"), metadata={}, condition=NOTHING_THERE)
    assert subject.store.head(key).size == 5


def test_a_replacement_replaces_only_the_version_it_names(subject: Subject, body: MakeBody) -> None:
    first = put(subject, body(b"first"))
    second = subject.store.put(first.key, body(b"second"), metadata={}, condition=Condition(first.etag))
    with pytest.raises(ObjectChanged):
        subject.store.put(first.key, body(b"third!!"), metadata={}, condition=Condition(first.etag))
    assert subject.store.head(first.key).etag == second


def test_a_replacement_of_what_was_deleted_meanwhile_is_a_change(subject: Subject, body: MakeBody) -> None:
    first = put(subject, body(b"first"))
    subject.store.delete(first.key)
    with pytest.raises(ObjectChanged):
        subject.store.put(first.key, body(b"second"), metadata={}, condition=Condition(first.etag))


# ---- listing


def test_a_listing_is_in_key_order_over_all_pages(subject: Subject, body: MakeBody) -> None:
    for name in ["b", "a/2", "a/1", "c", "a/10", "B", "ä"]:
        put(subject, body(b"x"), name)
    assert names(subject, limit=2) == ["B", "a/1", "a/10", "a/2", "b", "c", "ä"]


def test_a_delimiter_groups_and_hides_what_is_below(subject: Subject, body: MakeBody) -> None:
    for name in ["a", "d/1", "d/2", "d/e/3", "f", "g/1"]:
        put(subject, body(b"x"), name)
    page = subject.store.list_page(subject.prefix, delimiter="/")
    assert [item.key.removeprefix(subject.prefix) for item in page.objects] == ["a", "f"]
    assert [prefix.removeprefix(subject.prefix) for prefix in page.prefixes] == ["d/", "g/"]
    assert names(subject, delimiter="/", limit=1) == ["a", "d/", "f", "g/"]


def test_a_listing_can_start_after_a_key(subject: Subject, body: MakeBody) -> None:
    for name in ["a", "b", "c"]:
        put(subject, body(b"x"), name)
    assert names(subject, start_after=subject.key("a")) == ["b", "c"]


def test_a_listing_shows_size_etag_and_no_metadata(subject: Subject, body: MakeBody) -> None:
    stored = put(subject, body(b"12345"), note="x")
    [item] = subject.store.list_page(subject.prefix).objects
    assert (item.object_id, item.size, item.metadata) == (stored, 5, None)


def test_an_empty_listing_is_empty(subject: Subject) -> None:
    assert names(subject) == []


# ---- multipart


def upload(subject: Subject, body: MakeBody, name: str, *parts: bytes) -> tuple[str, str, list[str]]:
    key = subject.key(name)
    upload_id = subject.store.create_multipart(key, metadata={"generation": "7"})
    return (
        key,
        upload_id,
        [
            subject.store.upload_part(key, upload_id, number, body(part))
            for number, part in enumerate(parts, 1)
        ],
    )


def test_parts_appear_whole_when_completed_and_not_before(subject: Subject, body: MakeBody) -> None:
    data = noise(2 * PART + 77)
    key, upload_id, etags = upload(subject, body, "big", data[:PART], data[PART : 2 * PART], data[2 * PART :])
    assert names(subject) == []
    etag = subject.store.complete_multipart(key, upload_id, etags)
    facts = subject.store.head(key)
    assert (facts.etag, facts.size, facts.metadata) == (etag, len(data), {"generation": "7"})
    assert read(subject, facts.object_id, Extent(PART - 5, 2 * PART + 77)) == data[PART - 5 :]


def test_a_part_sent_again_counts_with_its_latest_etag(subject: Subject, body: MakeBody) -> None:
    key, upload_id, _ = upload(subject, body, "big", b"first try")
    etag = subject.store.upload_part(key, upload_id, 1, body(b"second try"))
    stored = subject.store.complete_multipart(key, upload_id, [etag])
    assert read(subject, ObjectId(key, stored), Extent(0, 10)) == b"second try"


def test_an_unknown_part_is_refused(subject: Subject, body: MakeBody) -> None:
    key, upload_id, _ = upload(subject, body, "big", b"x")
    with pytest.raises(Refused):
        subject.store.complete_multipart(key, upload_id, ["0" * 32])
    assert names(subject) == []


def test_unfinished_uploads_are_listed_by_prefix(subject: Subject, body: MakeBody) -> None:
    if "uploads" in subject.lacks:
        pytest.skip("Azure keeps no list of uploads")
    before = time.time()
    key, upload_id, _ = upload(subject, body, "große +1%2B", b"x")
    page = subject.store.list_uploads(key)
    assert [(each.key, each.upload_id) for each in page.uploads] == [(key, upload_id)]
    assert before - 60 <= page.uploads[0].begun <= time.time() + 60
    assert page.next_token is None
    subject.store.abort_multipart(key, upload_id)
    assert subject.store.list_uploads(subject.prefix).uploads == ()


def test_an_aborted_upload_is_lost_and_aborting_it_again_is_success(subject: Subject, body: MakeBody) -> None:
    if "uploads" in subject.lacks:
        pytest.skip("Azure drops blocks by itself, after a week")
    key, upload_id, etags = upload(subject, body, "big", b"x")
    subject.store.abort_multipart(key, upload_id)
    subject.store.abort_multipart(key, upload_id)
    with pytest.raises(UploadLost):
        subject.store.upload_part(key, upload_id, 2, body(b"y"))
    # Ceph 16 answers 500, "already in progress": an error all the same, and nothing is published.
    with pytest.raises(UploadLost if subject.is_r2 else (UploadLost, Unavailable)):
        subject.store.complete_multipart(key, upload_id, etags)
    assert names(subject) == []


def test_completing_obeys_its_condition(subject: Subject, body: MakeBody) -> None:
    if isinstance(subject.store, S3Store) and not subject.is_r2:
        pytest.skip("Ceph 16 ignores conditions at CompleteMultipartUpload")
    there = put(subject, body(b"there"), "big")
    key, upload_id, etags = upload(subject, body, "big", b"ours")
    with pytest.raises(ObjectChanged):
        subject.store.complete_multipart(key, upload_id, etags, condition=NOTHING_THERE)
    assert subject.store.head(key).etag == there.etag
    key, upload_id, etags = upload(subject, body, "big", b"ours")
    subject.store.complete_multipart(key, upload_id, etags, condition=Condition(there.etag))
    assert subject.store.head(key).size == 4


@pytest.mark.parametrize("sizes", [(PART, PART + 1, 5), (PART, PART + 1), (PART - 1, 5)])
def test_unequal_or_small_parts_are_refused_where_the_bucket_says_so(
    subject: Subject, body: MakeBody, sizes: tuple[int, ...]
) -> None:
    key, upload_id, etags = upload(subject, body, "big", *(noise(size) for size in sizes))
    if not subject.is_r2 and (min(sizes[:-1]) >= PART or "part minimum" in subject.lacks):
        subject.store.complete_multipart(key, upload_id, etags)
        return
    with pytest.raises(Refused):
        subject.store.complete_multipart(key, upload_id, etags)
    assert names(subject) == []


# ---- copies


def test_a_copy_has_the_bytes_and_the_metadata(subject: Subject, body: MakeBody) -> None:
    source = put(subject, body(b"bytes"), "from", note="100% größe")
    etag = subject.store.copy(source, subject.key("to here"))
    facts = subject.store.head(subject.key("to here"))
    assert (facts.etag, facts.metadata) == (etag, {"note": "100% größe"})
    assert read(subject, facts.object_id, Extent(0, 5)) == b"bytes"
    assert subject.store.head(source.key).etag == source.etag


def test_a_copy_may_have_other_metadata(subject: Subject, body: MakeBody) -> None:
    source = put(subject, body(b"bytes"), "from", note="old")
    subject.store.copy(source, subject.key("to"), metadata={"mode": "0600"})
    assert subject.store.head(subject.key("to")).metadata == {"mode": "0600"}


def test_an_object_can_be_copied_onto_itself_with_other_metadata(subject: Subject, body: MakeBody) -> None:
    source = put(subject, body(b"bytes"), note="old")
    subject.store.copy(source, source.key, metadata={"note": "new"}, condition=Condition(source.etag))
    assert subject.store.head(source.key).metadata == {"note": "new"}


@pytest.mark.case(40)
def test_a_large_copy_goes_in_parts_and_is_the_same(subject: Subject, body: MakeBody) -> None:
    data = noise(12 * MIB)
    key, upload_id, etags = upload(subject, body, "from", data[: 6 * MIB], data[6 * MIB :])
    source = ObjectId(key, subject.store.complete_multipart(key, upload_id, etags))
    etag = subject.store.copy(source, subject.key("to"), condition=NOTHING_THERE)
    facts = subject.store.head(subject.key("to"))
    assert (facts.etag, facts.metadata) == (etag, {"generation": "7"})
    assert read(subject, facts.object_id, Extent(0, len(data))) == data
    with pytest.raises(ObjectChanged):
        subject.store.copy(source, subject.key("to"), condition=NOTHING_THERE)


def test_only_the_named_version_is_copied(subject: Subject, body: MakeBody) -> None:
    source = put(subject, body(b"old"), "from")
    put(subject, body(b"new"), "from")
    with pytest.raises(ObjectChanged):
        subject.store.copy(source, subject.key("to"))
    with pytest.raises(ObjectMissing):
        subject.store.copy(ObjectId(subject.key("none"), source.etag), subject.key("to"))
    assert names(subject) == ["from"]


def test_a_copy_obeys_the_condition_on_its_destination(subject: Subject, body: MakeBody) -> None:
    source = put(subject, body(b"source"), "from")
    there = put(subject, body(b"there"), "to")
    for condition in (NOTHING_THERE, Condition(source.etag)):
        with pytest.raises(ObjectChanged):
            subject.store.copy(source, there.key, condition=condition)
    assert subject.store.head(there.key).etag == there.etag
    subject.store.copy(source, there.key, condition=Condition(there.etag))
    subject.store.copy(source, subject.key("new"), condition=NOTHING_THERE)
    assert [subject.store.head(subject.key(name)).size for name in ("to", "new")] == [6, 6]


# ---- limits


@pytest.mark.case(31)
def test_probing_for_write_access_leaves_nothing_behind(subject: Subject) -> None:
    subject.store.probe_write(subject.prefix)
    assert names(subject) == []


def test_a_key_that_is_too_long_is_refused(subject: Subject, body: MakeBody) -> None:
    if "limits" in subject.lacks:
        pytest.skip("Azurite has no limit")
    with pytest.raises(Refused):
        put(subject, body(b"x"), "k" * 1025)


def test_metadata_that_is_too_large_is_refused(subject: Subject, body: MakeBody) -> None:
    if not subject.is_r2:
        pytest.skip("the limit of 8 192 bytes is R2's")
    with pytest.raises(Refused):
        put(subject, body(b"x"), note="n" * 9000)
