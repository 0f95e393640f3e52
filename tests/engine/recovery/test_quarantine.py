"""Quarantined content is listed until a user deals with it, is restored whole, and is deleted only on request."""

import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.recovery.offline import OfflineCache
from fusecache.index.journal import Journal
from fusecache.model.errors import (
    AlreadyExists,
    LocalDiskError,
    NotFound,
    NotPermitted,
    Refused,
    StateError,
)
from tests.engine.recovery.test_journal_replay import change_rows, closed_but_unpublished
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, photograph, running_node

HALF = b"half a checkpoint" * 1000


async def leave_unfinished(bucket: Bucket, cache: Path, path: str = "step/model") -> None:
    """Have a daemon end while a file is written; `step/` and a published file are there."""
    before = cache.with_suffix(".before")
    async with running_node(bucket, before) as user:
        await user.mkdir("step")
        await user.write("step/other", b"whole")
        await user.drained()
        handle = await user.open(path)
        await user.fs.file_io.write(handle, 0, HALF)
        await user.fs.close_protocol.fsync(handle)
        photograph(before, cache)
        await user.close(handle)
        await user.unlink(path)
        await user.drained()
    shutil.rmtree(before)


async def things(user: User) -> list[dict[str, Any]]:
    listing = await user.fs.quarantine.listing()
    assert listing["count"] == len(listing["entries"])
    return list(listing["entries"])


async def only(user: User) -> dict[str, Any]:
    (thing,) = await things(user)
    return thing


def counts(user: User) -> tuple[int, int, int]:
    said = user.fs.statistics()
    return said["orphans"], said["suspects"], said["aside_bytes"]


def staged_bytes(user: User) -> int:
    return int(user.fs.statistics()["cache"]["staging_bytes"])


def bytes_of(thing: dict[str, Any]) -> bytes:
    return Path(thing["local_path"]).read_bytes()


async def nothing_is_staged(user: User) -> None:
    await trio.sleep(10)  # published bytes become cache a moment later
    assert staged_bytes(user) == 0


# ---- orphans


async def test_an_unfinished_file_is_listed_at_every_start_until_it_is_dealt_with(
    bucket: Bucket, cache: Path
) -> None:
    await leave_unfinished(bucket, cache)
    for _ in range(3):
        async with running_node(bucket, cache) as user:
            thing = await only(user)
            assert (thing["kind"], thing["reason"]) == ("orphan", "unclosed")
            assert (thing["path"], thing["bytes"]) == ("step/model", len(HALF))
            assert thing["time"] > 0
            assert bytes_of(thing) == HALF
            assert counts(user) == (1, 0, len(HALF))
            assert staged_bytes(user) == len(HALF)


async def test_an_orphan_comes_back_beside_its_name_and_is_published_like_any_file(
    bucket: Bucket, cache: Path
) -> None:
    await leave_unfinished(bucket, cache)
    async with running_node(bucket, cache) as user:
        await user.write("step/model.recovered-1", b"somebody has this name")
        thing = await only(user)
        assert await user.fs.quarantine.restore(thing["id"], "") == "step/model.recovered-2"
        assert await user.read("step/model.recovered-2") == HALF
        assert await things(user) == []
        assert counts(user) == (0, 0, 0)
        assert await user.drained() == "durable"
        await nothing_is_staged(user)
        assert await user.read("step/model.recovered-2") == HALF
    assert bucket.shows()["step/model.recovered-2"] == HALF
    assert list((cache / "orphans").iterdir()) == []
    async with running_node(bucket, cache) as user:
        assert await things(user) == []


async def test_what_was_brought_back_survives_a_crash_before_it_is_published(
    bucket: Bucket, cache: Path, tmp_path: Path
) -> None:
    await leave_unfinished(bucket, cache)
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.fs.quarantine.restore((await only(user))["id"], "back")
        photograph(cache, tmp_path / "after")
    bucket.come_back()
    async with running_node(bucket, tmp_path / "after") as user:
        assert await user.read("back") == HALF
        assert await things(user) == []
        assert await user.drained() == "durable"
        await nothing_is_staged(user)
    assert bucket.shows()["back"] == HALF


async def test_nothing_is_overwritten_and_a_refusal_changes_nothing(bucket: Bucket, cache: Path) -> None:
    await leave_unfinished(bucket, cache)
    async with running_node(bucket, cache) as user:
        number = (await only(user))["id"]
        for path, error in (
            ("step/other", AlreadyExists),
            ("step", AlreadyExists),
            ("missing/model", NotFound),
            (".fusecache", AlreadyExists),
        ):
            with pytest.raises(error):
                await user.fs.quarantine.restore(number, path)
        with pytest.raises(NotFound):
            await user.fs.quarantine.restore(number + 1000, "")
        assert counts(user) == (1, 0, len(HALF))
        assert bytes_of(await only(user)) == HALF
    assert bucket.shows()["step/other"] == b"whole"


async def test_a_deleted_orphan_frees_its_room_for_good(bucket: Bucket, cache: Path) -> None:
    await leave_unfinished(bucket, cache)
    async with running_node(bucket, cache) as user:
        number = (await only(user))["id"]
        assert await user.fs.quarantine.delete(number) == len(HALF)
        assert (await things(user), counts(user), staged_bytes(user)) == ([], (0, 0, 0), 0)
        with pytest.raises(NotFound):
            await user.fs.quarantine.delete(number)
    assert list((cache / "orphans").iterdir()) == []
    async with running_node(bucket, cache) as user:
        assert (await things(user), staged_bytes(user)) == ([], 0)


async def test_a_crash_while_it_is_deleted_ends_with_it_deleted(bucket: Bucket, cache: Path) -> None:
    await leave_unfinished(bucket, cache)
    async with running_node(bucket, cache):
        pass
    change_rows(cache, lambda row: {**row, "state": "dropped"})
    async with running_node(bucket, cache) as user:
        assert (await things(user), staged_bytes(user)) == ([], 0)
    assert list((cache / "orphans").iterdir()) == []


async def test_a_crash_while_it_comes_back_leaves_it_listed(bucket: Bucket, cache: Path) -> None:
    """Its file is in `staging/` already, its row does not say so yet."""
    await leave_unfinished(bucket, cache)
    async with running_node(bucket, cache) as user:
        place = Path((await only(user))["local_path"])
    os.rename(place, cache / "staging" / place.name)
    async with running_node(bucket, cache) as user:
        assert Path((await only(user))["local_path"]) == place
        assert (counts(user), staged_bytes(user)) == ((1, 0, len(HALF)), len(HALF))


async def test_rows_and_files_of_an_older_version_are_listed_with_what_is_known(
    bucket: Bucket, cache: Path
) -> None:
    await leave_unfinished(bucket, cache)
    async with running_node(bucket, cache):
        pass

    def older(row: dict[str, Any]) -> dict[str, Any]:
        return {**{name: row[name] for name in row if name not in ("reason", "moment")}, "size": 0}

    change_rows(cache, older)
    (cache / "suspect" / "0000000000000777").write_bytes(b"strange")
    async with running_node(bucket, cache) as user:
        found = {thing["id"]: thing for thing in await things(user)}
        strange = found.pop(777)
        (orphan,) = found.values()
        assert (orphan["path"], orphan["bytes"], orphan["time"] > 0) == ("step/model", len(HALF), True)
        assert (strange["path"], strange["bytes"]) == ("", 7)
        assert staged_bytes(user) == len(HALF) + 7
        assert await user.fs.quarantine.restore(777, "") == "file-777.recovered-1"
        assert await user.drained() == "durable"
    assert bucket.shows()["file-777.recovered-1"] == b"strange"


async def test_a_file_whose_bytes_are_gone_can_only_be_taken_off_the_list(
    bucket: Bucket, cache: Path
) -> None:
    await leave_unfinished(bucket, cache)
    async with running_node(bucket, cache) as user:
        os.unlink((await only(user))["local_path"])
    async with running_node(bucket, cache) as user:
        thing = await only(user)
        assert (thing["local_path"], staged_bytes(user)) == ("", 0)
        with pytest.raises(LocalDiskError, match="gone"):
            await user.fs.quarantine.restore(thing["id"], "back")
        assert await user.fs.quarantine.delete(thing["id"]) == 0
        assert await things(user) == []


async def test_a_file_brought_back_where_nothing_is_published_stays_on_the_node(
    bucket: Bucket, cache: Path
) -> None:
    await leave_unfinished(bucket, cache)
    async with running_node(bucket, cache, local_only=("step/",)) as user:
        await user.fs.quarantine.restore((await only(user))["id"], "")
        assert await user.drained() == "durable"
        assert await user.read("step/model.recovered-1") == HALF
    async with running_node(bucket, cache, local_only=("step/",)) as user:
        assert await user.read("step/model.recovered-1") == HALF
        assert await things(user) == []
    assert "step/model.recovered-1" not in bucket.shows()


# ---- suspects


async def test_a_suspect_says_why_and_is_published_if_somebody_vouches_for_it(
    bucket: Bucket, tmp_path: Path
) -> None:
    await closed_but_unpublished(bucket, tmp_path / "cache", ("a",))
    cache = tmp_path / "cache.after"
    change_rows(cache, lambda row: {**row, "boot_id": "earlier", "synced": False, "checksum": ""})
    for _ in range(2):
        async with running_node(bucket, cache) as user:
            thing = await only(user)
            assert (thing["kind"], thing["reason"], thing["path"]) == ("suspect", "power-cut", "a")
            assert "before it was synced" in thing["message"]
            assert counts(user) == (0, 1, 100_000)
    async with running_node(bucket, cache) as user:
        assert await user.fs.quarantine.restore(thing["id"], "a") == "a"
        assert await user.drained() == "durable"
        assert counts(user) == (0, 0, 0)
    assert bucket.shows() == {"a": b"a" * 100_000}


# ---- refused files


async def test_a_refused_file_is_listed_and_is_offered_to_the_bucket_again(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(Refused("EntityTooLarge"), "put", "bad", times=1))  # type: ignore[arg-type]
    async with running_node(store, cache) as user:
        await user.write("bad", HALF)
        assert await user.drained() == "error"
    async with running_node(store, cache) as user:
        thing = await only(user)
        assert (thing["kind"], thing["path"], thing["bytes"]) == ("refused", "bad", len(HALF))
        assert "EntityTooLarge" in thing["message"]
        assert await user.fs.status.path_state("bad") == "error:refused"
        assert await user.fs.quarantine.restore(thing["id"], "") == "bad"
        assert await user.drained() == "durable"
        assert (await things(user), await user.fs.status.path_state("bad")) == ([], "clean")
        await nothing_is_staged(user)
    assert bucket.shows() == {"bad": HALF}


async def test_deleting_a_refused_file_shows_what_the_bucket_has(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("bad", b"published")
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "bad", times=None))  # type: ignore[arg-type]
    async with running_node(store, cache) as user:
        await user.write("bad", HALF)
        assert await user.drained() == "error"
        number = (await only(user))["id"]
        node = await user.fs.resolve("bad")
        handle = user.fs.file_io.open(node, writable=False, pid=0)
        with pytest.raises(NotPermitted, match="open"):
            await user.fs.quarantine.delete(number)
        await user.fs.file_io.release(handle)
        assert await user.fs.quarantine.delete(number) == len(HALF)
        assert await user.read("bad") == b"published"
        assert (await things(user), await user.drained()) == ([], "durable")


# ---- conflicts


async def in_conflict(bucket: Bucket, user: User) -> str:
    """Have another client replace what this node writes at the same time; return the path of our version."""
    bucket.takes_nothing = True
    await user.write("file", b"ours")
    bucket.memory.put_bytes("file", b"theirs")
    bucket.come_back()
    assert await user.drained() == "conflict"
    return str((await only(user))["kept_as"])


async def test_a_conflict_is_said_at_every_sync_and_start_until_somebody_has_seen_to_it(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        copy = await in_conflict(bucket, user)
        assert bucket.shows() == {"file": b"theirs", copy: b"ours"}
    async with running_node(bucket, cache) as user:
        assert (await only(user))["kept_as"] == copy
        answer = await user.fs.wait_durable("file", None)
        assert (answer.result, copy in answer.message) == ("conflict", True)
        assert "and" not in answer.message.partition(": compare")[0]
        assert await user.fs.status.path_state("file") == "conflict"
        assert await user.fs.status.path_state(copy) == "clean"
        assert (await user.fs.wait_durable(copy, None)).result == "durable"
        assert user.fs.statistics()["conflict_files"] == 1
        await user.unlink(copy)
        assert await user.drained() == "durable"
        assert await things(user) == []
    async with running_node(bucket, cache) as user:
        assert (await user.drained(), await user.fs.status.path_state("file")) == ("durable", "clean")


async def test_who_writes_the_name_again_has_settled_it_and_the_copy_stays_listed(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        copy = await in_conflict(bucket, user)
        assert await user.read("file") == b"theirs"
        await user.write("file", b"both")
        assert await user.drained() == "durable"
        assert bucket.shows() == {"file": b"both", copy: b"ours"}
        thing = await only(user)
        assert (thing["kept_as"], thing["settled"]) == (copy, True)
        assert user.fs.statistics()["conflict_files"] == 0
    async with running_node(bucket, cache) as user:
        assert await user.fs.quarantine.delete(thing["id"]) == 0
        assert (await user.drained(), await things(user)) == ("durable", [])
    assert bucket.shows() == {"file": b"both"}


async def test_a_sync_names_every_conflict_and_the_copy_has_the_number_of_the_list(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        names = ["a", "b", "c"]
        for name in names:
            await user.write(name, b"ours")
            bucket.memory.put_bytes(name, b"theirs")
        bucket.come_back()
        await user.drained()
        message = (await user.fs.wait_durable("", None)).message
        assert message.startswith("a: ")
        assert message.endswith("; and 2 others (b, c): `fusecache recover` lists them")
        assert [each["kept_as"].rpartition("-")[2] for each in await things(user)] == [
            str(each["id"]) for each in await things(user)
        ]


async def test_a_change_that_was_given_up_is_on_the_list_until_it_is_made_again_or_taken_off(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        for way in ("made again", "taken off"):
            await user.write("file", b"ours")
            await user.drained()
            bucket.takes_nothing = True
            await user.unlink("file")
            bucket.memory.put_bytes("file", b"theirs")
            bucket.come_back()
            assert await user.drained() == "conflict"
            thing = await only(user)
            assert (thing["path"], thing["kept_as"]) == ("file", "")
            assert f"--delete {thing['id']}" in (await user.fs.wait_durable("file", None)).message
            await trio.sleep(2)
            assert await user.read("file") == b"theirs"
            if way == "made again":
                await user.unlink("file")
            else:
                with pytest.raises(NotFound):
                    await user.fs.quarantine.restore(thing["id"], "")
                await user.fs.quarantine.delete(thing["id"])
            assert (await user.drained(), await things(user)) == ("durable", [])
    assert bucket.shows() == {"file": b"theirs"}


async def rename(user: User, copy: str) -> None:
    await user.rename(copy, "file")


async def replace_copy(user: User, copy: str) -> None:
    await user.write("new", b"ours")
    await user.rename("new", copy)
    await user.rename(copy, "file")


async def restore(user: User, _: str) -> None:
    number = (await only(user))["id"]
    with pytest.raises(AlreadyExists):
        await user.fs.quarantine.restore(number, "file")
    await user.unlink("file")
    assert await user.fs.quarantine.restore(number, "file") == "file"


@pytest.mark.parametrize("way", [rename, replace_copy, restore])
async def test_our_version_can_take_the_name(
    bucket: Bucket, cache: Path, way: Callable[[User, str], Awaitable[None]]
) -> None:
    async with running_node(bucket, cache) as user:
        copy = await in_conflict(bucket, user)
        await way(user, copy)
        assert await user.drained() == "durable"
        assert (await things(user), await user.read("file")) == ([], b"ours")
    assert bucket.shows() == {"file": b"ours"}


async def test_a_directory_that_is_renamed_takes_its_conflicts_along(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("d")
        await user.drained()
        bucket.takes_nothing = True
        await user.write("d/file", b"ours")
        bucket.memory.put_bytes("d/file", b"theirs")
        bucket.come_back()
        assert await user.drained() == "conflict"
        await user.rename("d", "e")
        thing = await only(user)
        assert (thing["path"], thing["kept_as"].rpartition("/")[0]) == ("e/file", "e")
        await user.unlink(thing["kept_as"])
        assert (await things(user), await user.drained()) == ([], "durable")


# ---- a cache that no daemon uses


async def test_a_cold_cache_lists_what_its_bucket_lacks_and_changes_nothing(
    bucket: Bucket, tmp_path: Path
) -> None:
    await closed_but_unpublished(bucket, tmp_path / "cache", ("waits",))
    cache = tmp_path / "cache.after"
    with pytest.raises(StateError, match=r"no fusecache\.json"), OfflineCache(cache):
        pass
    (cache / "fusecache.json").write_text('{"format": 1, "identity": "http://x s3://bucket/"}')
    (cache / "orphans" / "0000000000000777").write_bytes(b"strange")
    with OfflineCache(cache) as cold:
        strange, waits = sorted(cold.listing()["entries"], key=lambda row: row["path"])
        assert (waits["kind"], waits["path"], waits["bytes"]) == ("waiting", "waits", 500_000)
        assert bytes_of(waits) == b"waits" * 100_000
        assert (strange["kind"], strange["id"], strange["bytes"]) == ("orphan", 777, 7)
        with pytest.raises(StateError, match="in use"), OfflineCache(cache):
            pass
        with pytest.raises(NotPermitted):
            cold.delete(waits["id"])
        assert cold.delete(777) == 7
        assert [row["path"] for row in cold.listing()["entries"]] == ["waits"]
    async with running_node(bucket, cache) as user:
        assert await user.drained() == "durable"
    assert bucket.shows() == {"waits": b"waits" * 100_000}


async def test_a_cold_cache_tells_what_the_next_start_will_set_aside(bucket: Bucket, cache: Path) -> None:
    await leave_unfinished(bucket, cache)
    (cache / "fusecache.json").write_text('{"format": 1, "identity": "http://x s3://bucket/"}')
    with OfflineCache(cache) as cold:
        (thing,) = cold.listing()["entries"]
        assert (thing["kind"], thing["path"], thing["bytes"]) == ("orphan", "step/model", len(HALF))
        assert cold.delete(thing["id"]) == len(HALF)
    with Journal(cache / "journal") as journal:
        assert journal.files() == []
    async with running_node(bucket, cache) as user:
        assert (await things(user), staged_bytes(user)) == ([], 0)


# ---- a mount that may not publish


async def test_a_read_only_mount_does_not_start_over_what_waits_for_the_bucket(
    bucket: Bucket, tmp_path: Path
) -> None:
    await closed_but_unpublished(bucket, tmp_path / "cache", ("waits",))
    cache = tmp_path / "cache.after"
    photograph(cache, tmp_path / "again")
    with pytest.raises(StateError, match=r"1 change, 488.3 KiB.*read-write once.*fusecache recover"):
        async with running_node(bucket, cache, read_only=True):
            raise AssertionError("it started")
    async with running_node(bucket, tmp_path / "again") as user:
        assert await user.drained() == "durable"
    async with running_node(bucket, tmp_path / "again", read_only=True) as user:
        assert await user.read("waits") == b"waits" * 100_000
