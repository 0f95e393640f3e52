"""A change of names that the bucket rejects is listed, can be repeated or given up, and is repeated by itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from fusecache.engine.recovery.offline import OfflineCache
from fusecache.model.errors import NotFound, NotPermitted, ObjectArchived, Refused
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, files_in, photograph, running_node

# Longer than the longest pause between two attempts.
MINUTES = 150.0


ARCHIVED = Fault(ObjectArchived("archived in storage class GLACIER"), "copy", times=None)


async def entries(user: User) -> list[tuple[str, str, str]]:
    """Return kind, path and change of each entry of `recover`."""
    found = await user.fs.quarantine.listing()
    return [(row["kind"], row["path"], row.get("change", "")) for row in found["entries"]]


async def number_of_the_only(user: User) -> int:
    (row,) = (await user.fs.quarantine.listing())["entries"]
    return int(row["id"])


@asynccontextmanager
async def rejected_rename(bucket: Bucket, cache: Path) -> AsyncIterator[tuple[FaultyStore, User]]:
    """A node whose rename of `old` to `new` was rejected, as the object lies in an archive."""
    store = FaultyStore(bucket, ARCHIVED)
    async with running_node(store, cache) as user:
        await user.write("old", b"archived")
        assert await user.drained() == "durable"
        await user.rename("old", "new")
        assert await user.drained() == "error"
        yield store, user


async def test_it_is_listed_and_leaves_the_old_name(bucket: Bucket, cache: Path) -> None:
    async with rejected_rename(bucket, cache) as (_, user):
        assert await entries(user) == [("refused", "new", "rename")]
        (row,) = (await user.fs.quarantine.listing())["entries"]
        assert row["message"] == (
            "the bucket rejected the rename from old: archived in storage class GLACIER"
        )
        assert row["time"] > 0
        assert await user.fs.status.path_state("new") == "error:archived"
        (failed,) = (await user.fs.status.path_status("new"))["failed"]
        assert "restore the object from its archive" in failed["remedy"]
        assert await user.read("old") == b"archived"
        said = user.fs.statistics()
        assert (said["rejected_files"], said["exposed_bytes"]) == (1, 0)


async def test_it_heals_by_itself_when_its_cause_is_gone(bucket: Bucket, cache: Path) -> None:
    async with rejected_rename(bucket, cache) as (store, user):
        await trio.sleep(600)
        assert 5 < len(store.calls("copy")) < 30  # about one a minute
        store.heal()
        await trio.sleep(MINUTES)
        assert await user.drained() == "durable"
        assert await user.tree() == {"new": b"archived"}
        assert await entries(user) == []
        with pytest.raises(NotFound):
            await user.fs.status.path_state("old")
    assert bucket.shows() == {"new": b"archived"}


async def test_one_that_heals_is_followed_by_all_others_at_once(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket, ARCHIVED)
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        for number in range(40):
            await user.write(f"d/{number}", b"1")
        assert await user.drained() == "durable"
        await user.rename("d", "e")
        assert await user.drained() == "error"
        assert user.fs.statistics()["rejected_files"] == 40
        store.heal()
        await trio.sleep(MINUTES)
        assert await user.drained() == "durable"
        assert sorted(await user.tree("e")) == sorted(f"e/{number}" for number in range(40))
    assert sorted(files_in(bucket.shows())) == sorted(f"e/{number}" for number in range(40))


async def test_it_is_repeated_on_request(bucket: Bucket, cache: Path) -> None:
    async with rejected_rename(bucket, cache) as (store, user):
        number = await number_of_the_only(user)
        with pytest.raises(ObjectArchived, match="GLACIER"):
            await user.fs.quarantine.restore(number, "")
        assert await number_of_the_only(user) == number
        with pytest.raises(NotPermitted, match="without --to"):
            await user.fs.quarantine.restore(number, "elsewhere")
        store.heal()
        assert await user.fs.quarantine.restore(number, "") == "new"
        assert await user.tree() == {"new": b"archived"}
        assert await user.drained() == "durable"


async def test_it_is_given_up_on_request(bucket: Bucket, cache: Path) -> None:
    async with rejected_rename(bucket, cache) as (store, user):
        assert await user.fs.quarantine.delete(await number_of_the_only(user)) == 0
        store.heal()
        await trio.sleep(MINUTES)
        assert await user.drained() == "durable"
        assert await user.tree() == {"old": b"archived"}
    async with running_node(bucket, cache) as user:
        assert await entries(user) == []


async def test_it_survives_a_crash_and_heals_in_the_next_run(
    bucket: Bucket, cache: Path, tmp_path: Path
) -> None:
    async with rejected_rename(bucket, cache) as (_, user):
        number = await number_of_the_only(user)
        await user.fs.journal.wait_committed()
        photograph(cache, tmp_path / "after")
    store = FaultyStore(bucket, ARCHIVED)
    async with running_node(store, tmp_path / "after") as user:
        assert await number_of_the_only(user) == number
        assert await user.drained() == "error"
        store.heal()
        await trio.sleep(MINUTES)
        assert await user.tree() == {"new": b"archived"}
        assert await user.drained() == "durable"
    async with running_node(store, tmp_path / "after") as user:
        assert await entries(user) == []


async def test_without_a_mount_it_is_listed_and_can_be_given_up(bucket: Bucket, cache: Path) -> None:
    async with rejected_rename(bucket, cache) as (_, user):
        number = await number_of_the_only(user)
    (cache / "fusecache.json").write_text('{"format": 1, "identity": "https://host s3://bucket/"}\n')
    with OfflineCache(cache) as offline:
        (row,) = offline.listing()["entries"]
        assert (row["id"], row["path"], row["change"]) == (number, "new", "rename")
        assert offline.delete(number) == 0
        assert offline.listing()["entries"] == []


async def test_a_read_only_mount_repeats_nothing(bucket: Bucket, cache: Path) -> None:
    async with rejected_rename(bucket, cache):
        pass
    async with running_node(bucket, cache, read_only=True) as user:
        await trio.sleep(MINUTES)
        assert await user.tree() == {"old": b"archived"}
    assert bucket.shows() == {"old": b"archived"}


async def test_the_same_change_made_again_is_one_entry(bucket: Bucket, cache: Path) -> None:
    async with rejected_rename(bucket, cache) as (_, user):
        for _ in range(3):
            await user.rename("old", "new")
            assert await user.drained() == "error"
        assert await entries(user) == [("refused", "new", "rename")]


@pytest.mark.parametrize("change", ["written", "removed", "renamed"])
async def test_what_happened_to_the_old_name_since_counts(bucket: Bucket, cache: Path, change: str) -> None:
    async with rejected_rename(bucket, cache) as (store, user):
        match change:
            case "written":
                await user.write("old", b"newer")
            case "removed":
                await user.unlink("old")
            case "renamed":
                store.heal()
                await user.rename("old", "elsewhere")
        store.heal()
        await trio.sleep(MINUTES)
        assert await user.drained() == "durable"
        assert await entries(user) == []
        expected = {"written": {"old": b"newer"}, "removed": {}, "renamed": {"elsewhere": b"archived"}}
        assert await user.tree() == expected[change]
    assert bucket.shows() == expected[change]


async def test_a_file_that_took_the_new_name_since_is_not_replaced(bucket: Bucket, cache: Path) -> None:
    async with rejected_rename(bucket, cache) as (store, user):
        await user.write("new", b"another")
        await user.drained()
        store.heal()
        await trio.sleep(MINUTES)
        assert await user.drained() == "durable"
        assert await user.tree() == {"old": b"archived", "new": b"another"}


async def test_a_program_that_reads_the_old_name_goes_on(bucket: Bucket, cache: Path) -> None:
    async with rejected_rename(bucket, cache) as (store, user):
        handle = user.fs.file_io.open(await user.fs.resolve("old"), writable=False, pid=0)
        store.heal()
        await trio.sleep(MINUTES)
        assert await user.tree() == {"new": b"archived"}
        assert bytes(await user.fs.file_io.read(handle, 0, 100)) == b"archived"
        await user.fs.file_io.release(handle)


async def test_a_rejected_directory_or_symlink_comes_by_itself_and_a_removal_only_on_request(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("locked", b"1")
        assert await user.drained() == "durable"
    puts = FaultyStore(bucket, Fault(Refused("no such right"), "put", times=None))
    async with running_node(puts, cache) as user:
        await user.mkdir("d")
        await user.symlink("locked", "link")
        await user.drained()
        assert sorted(await entries(user)) == [("refused", "d", "mkdir"), ("refused", "link", "symlink")]
        puts.heal()
        await trio.sleep(MINUTES)
        assert await user.drained() == "durable"
    assert bucket.shows() == {"locked": b"1", "d/": b"", "link": b"-> locked"}
    deletes = FaultyStore(bucket, Fault(Refused("locked until 2030"), "delete", times=None))
    async with running_node(deletes, cache) as user:
        await user.unlink("locked")
        await user.drained()
        assert await entries(user) == [("refused", "locked", "delete")]
        deletes.heal()
        await trio.sleep(MINUTES)
        assert await user.read("locked") == b"1"
        await user.fs.quarantine.restore(await number_of_the_only(user), "")
        assert await user.drained() == "durable"
    assert "locked" not in bucket.shows()
