"""The life of a generation: what it may become, and what its row tells after a restart."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.records import (
    MUTABLE,
    OWED,
    TRANSITIONS,
    FileRecord,
    FileState,
    OperationKind,
    OperationRecord,
    PosixAttributes,
    check_transition,
    file_from_row,
    operation_from_row,
    to_row,
)

# Of the row of a change that the bucket has not rejected. A version that is gone back to refuses other ones.
EARLIER_FIELDS = (
    "sequence", "kind", "key", "target", "base_etag", "source_etag", "size", "modified", "uuid", "attributes", "link",
    "with_directory",
)  # fmt: skip

texts = st.text(max_size=20)
numbers = st.integers(0, 1 << 53)
attributes = st.builds(PosixAttributes, st.integers(0, 0o7777), numbers, numbers, numbers)
files = st.builds(
    FileRecord,
    generation=numbers,
    state=st.sampled_from(FileState),
    key=texts,
    size=numbers,
    sequence=numbers,
    uuid=texts,
    boot_id=texts,
    attributes=attributes,
    base_etag=st.none() | texts,
    synced=st.booleans(),
    checksum=texts,
    upload_id=texts,
    part_bytes=numbers,
    part_etags=st.lists(texts, max_size=3).map(tuple),
    error=texts,
)
removals = st.builds(
    OperationRecord,
    sequence=numbers,
    kind=st.just(OperationKind.DELETE),
    key=texts,
    base_etag=st.none() | texts,
    uuid=texts,
    sent=st.booleans(),
)
operations = removals | st.builds(
    OperationRecord,
    sequence=numbers,
    kind=st.sampled_from(OperationKind).filter(lambda kind: kind is not OperationKind.DELETE),
    key=texts,
    target=texts,
    base_etag=st.none() | texts,
    source_etag=texts,
    size=numbers,
    modified=st.floats(0, 1e12),
    uuid=texts,
    attributes=st.none() | attributes,
)


def test_every_state_says_what_may_follow() -> None:
    assert set(TRANSITIONS) == set(FileState)


@pytest.mark.parametrize(("old", "new"), [*itertools.product(FileState, FileState)])
def test_only_transitions_of_the_table_are_allowed(old: FileState, new: FileState) -> None:
    if new in TRANSITIONS[old]:
        check_transition(old, new)
    else:
        with pytest.raises(ValueError, match="cannot go from"):
            check_transition(old, new)


def reachable(start: FileState) -> set[FileState]:
    found, queue = {start}, [start]
    while queue:
        new = TRANSITIONS[queue.pop()] - found
        found |= new
        queue += new
    return found


@pytest.mark.parametrize("state", [FileState.ORPHAN, FileState.FAILED])
def test_what_must_not_be_published_never_is(state: FileState) -> None:
    assert not reachable(state) & {FileState.SEALED, FileState.PUBLISHING, FileState.STORED}


def test_what_may_have_been_sent_is_never_changed_in_place() -> None:
    assert not reachable(FileState.PUBLISHING) & MUTABLE


def test_only_the_bucket_or_the_user_ends_a_promise() -> None:
    ends = {state for state in FileState if not TRANSITIONS[state]}
    assert ends == {FileState.STORED, FileState.DROPPED, FileState.ORPHAN}
    assert all(FileState.ORPHAN not in TRANSITIONS[state] for state in OWED - MUTABLE)


@given(files)
def test_a_files_row_tells_all_of_it(record: FileRecord) -> None:
    assert file_from_row(json.loads(json.dumps(to_row(record)))) == record


@given(operations)
def test_a_changes_row_tells_all_of_it(record: OperationRecord) -> None:
    assert operation_from_row(json.loads(json.dumps(to_row(record)))) == record


@given(removals)
def test_an_earlier_version_can_read_the_row_of_a_delete(record: OperationRecord) -> None:
    assert set(to_row(record)) <= {*EARLIER_FIELDS}


@pytest.mark.parametrize(("target", "may_be_sent"), [("", True), ("b", False)])
def test_a_delete_of_an_earlier_version_may_have_been_sent_unless_it_waits_for_other_content(
    target: str, *, may_be_sent: bool
) -> None:
    row = {
        **dict.fromkeys(EARLIER_FIELDS, ""),
        "kind": "delete",
        "target": target,
        "size": 0,
        "attributes": None,
    }
    assert operation_from_row(row).sent is may_be_sent


@given(files, texts)
def test_a_row_with_a_field_of_a_newer_version_is_refused(record: FileRecord, value: str) -> None:
    with pytest.raises(ValueError, match="newer"):
        file_from_row({**to_row(record), "tier": value})


@given(files, st.sampled_from(["generation", "state", "key", "attributes", "part_etags"]))
def test_a_row_without_a_needed_field_is_refused(record: FileRecord, name: str) -> None:
    row = to_row(record)
    del row[name]
    with pytest.raises((KeyError, TypeError)):
        file_from_row(row)


@given(files)
def test_an_unknown_state_is_refused(record: FileRecord) -> None:
    with pytest.raises(ValueError, match="asleep"):
        file_from_row({**to_row(record), "state": "asleep"})
