"""A node that ended at any moment goes on where it was: what was closed is published, once, and nothing else is."""

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio

from fusecache.disk.staging import StagingDirectory
from fusecache.engine.recovery.journal_replay import JournalReplay, ReplayResult
from fusecache.index.journal import Journal, PutAbort
from fusecache.model.errors import AccessDenied, NotFound, StateError
from fusecache.model.objects import MIB
from fusecache.model.records import FileState
from fusecache.remote.read_write_split import ReadWriteSplit
from tests.engine.publish.test_rejected_content import slow_requests
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, files_in, files_of, folders_in, photograph, running_node

LARGE = 5 * MIB

Program = Callable[[User], Awaitable[None]]


# ---- every request may be the last


async def save_small(user: User) -> None:
    await user.mkdir("step")
    for name in ("a", "b", ".metadata"):
        await user.write(f"step/{name}", name.encode())
    await user.symlink("step", "latest")


async def save_large(user: User) -> None:
    await user.write("model", b"1" * LARGE)
    await user.write("latest", b"model")


async def rotate(user: User) -> None:
    await user.write("published", b"new")
    await user.rename("published-too", "moved")
    await user.unlink("old/file")
    await user.rmdir("old")
    await user.rename("folder", "renamed")


async def replace_by_what_has_the_same_etag(user: User) -> None:
    await user.rename("next-link", "link")
    await user.write("next-link", b"new")
    await user.rename("copy", "published")


@pytest.mark.parametrize("program", [save_small, save_large, rotate, replace_by_what_has_the_same_etag])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_node_that_ends_at_any_request_loses_and_repeats_nothing(
    bucket: Bucket, tmp_path: Path, program: Program, when: str
) -> None:
    async def published() -> tuple[Bucket, Path]:
        place, fresh = tmp_path / f"{number}", Bucket()
        async with running_node(fresh, place) as user:
            await user.mkdir("old")
            await user.mkdir("folder")
            for name in ("old/file", "published", "published-too", "folder/file"):
                await user.write(name, name.encode())
            await user.write("copy", b"published")
            for name in ("link", "next-link"):
                await user.symlink(f"target of {name}", name)
            await user.drained()
        fresh.requests.clear()
        return fresh, place

    number = 0
    bucket, place = await published()
    async with running_node(bucket, place) as user:
        await program(user)
        await user.drained()
        wanted, requests = await user.tree(), len(bucket.requests)
    shown = bucket.shows()
    for number in range(1, requests + 1):
        bucket, place = await published()
        died = trio.Event()
        after = tmp_path / f"{number}-after"
        async with running_node(bucket, place, fresh_seconds=1e9) as user:
            await program(user)

            def die(place: Path = place, after: Path = after, died: trio.Event = died) -> None:
                photograph(place, after)
                died.set()

            later = number - 1 - len(bucket.requests)
            if later < 0:
                continue  # sent while the program ran: `engine/publish/test_multipart_uploader.py` ends nodes there
            bucket.die_at(later, when, die)
            with trio.fail_after(600):
                await died.wait()
        bucket.come_back()
        async with running_node(bucket, after) as user:
            assert files_of(await user.tree()) == files_of(wanted), number
            assert await user.drained() == "durable", number
            assert await user.tree() == wanted, number
            assert user.fs.publisher.rejections.conflicts == {}
            assert list((after / "staging").iterdir()) == []
        assert bucket.shows() == shown, number
        if (when, bucket.requests[number - 1][0]) != ("after", "create_multipart"):
            assert bucket.memory.uploads() == ()  # that one nobody here ever heard of
        shutil.rmtree(place)
        shutil.rmtree(after)


async def test_parts_that_were_sent_are_not_sent_again(bucket: Bucket, tmp_path: Path) -> None:
    died = trio.Event()
    async with running_node(bucket, tmp_path / "1") as user:
        bucket.die_at(4, "before", lambda: (photograph(tmp_path / "1", tmp_path / "2"), died.set()))
        await user.write("model", b"1" * (3 * 4 * MIB))
        await died.wait()
    assert bucket.requests[-1] == ("complete_multipart", "model")
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
    assert len(bucket.sent("upload_part")) == 3
    assert len(bucket.sent("create_multipart")) == 1


async def test_the_upload_of_a_file_that_another_replaced_before_its_turn_is_not_begun_twice(
    bucket: Bucket, tmp_path: Path
) -> None:
    died = trio.Event()
    async with running_node(bucket, tmp_path / "1") as user:
        bucket.takes_nothing = True
        await user.write("model", b"1" * (3 * 4 * MIB))
        await user.write("new", b"2")
        await user.rename("new", "model")
        bucket.die_at(2, "after", lambda: (photograph(tmp_path / "1", tmp_path / "2"), died.set()))
        bucket.takes_nothing = False
        await died.wait()
    assert ("upload_part", "model") in bucket.requests
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": b"2"}
    assert bucket.sent("create_multipart") == ["model"]
    assert bucket.memory.uploads() == ()


@pytest.mark.parametrize("then", ["rewrite", "rename", "unlink"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_file_whose_put_may_have_been_sent_can_be_changed_after_the_restart(
    bucket: Bucket, tmp_path: Path, then: str, when: str
) -> None:
    died = trio.Event()
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("file", b"1")
        bucket.die_at(0, when, lambda: (photograph(tmp_path / "1", tmp_path / "2"), died.set()))
        await died.wait()
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        match then:
            case "rewrite":
                await user.write("file", b"2")
            case "rename":
                await user.rename("file", "other")
            case "unlink":
                await user.unlink("file")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"rewrite": {"file": b"2"}, "rename": {"other": b"1"}, "unlink": {}}[then]


async def test_a_rename_of_what_another_was_quicker_with_shows_nothing_that_cannot_be_read(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        slow_requests(user, 3)
        await user.write("f", b"ours")
        await trio.sleep(2)  # the PUT is under way
        bucket.memory.put_bytes("f", b"theirs")
        await user.rename("f", "g")
        with trio.fail_after(10):
            while not user.fs.publisher.rejections.conflicts:  # noqa: ASYNC110  # polled on a virtual clock
                await trio.sleep(0.1)
        bucket.takes_nothing = True
    async with running_node(bucket, cache) as user:
        (kept,) = await user.tree()
        assert (".conflict-" in kept, await user.read(kept)) == (True, b"ours")
        bucket.come_back()
        assert await user.drained() == "conflict"
        await trio.sleep(5)
        assert await user.tree() == {kept: b"ours", "f": b"theirs"}
    assert bucket.shows() == {kept: b"ours", "f": b"theirs"}


async def test_a_name_whose_delete_may_have_been_sent_can_be_used_again_after_the_restart(
    bucket: Bucket, tmp_path: Path
) -> None:
    died = trio.Event()
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("file", b"1")
        await user.drained()
        await user.unlink("file")
        bucket.die_at(0, "after", lambda: (photograph(tmp_path / "1", tmp_path / "2"), died.set()))
        await died.wait()
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        await user.write("file", b"2")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"2"}


async def test_a_rewritten_file_renamed_after_the_restart_leaves_nothing_under_its_old_name(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("file", b"1")
        await user.drained()
        await user.write("file", b"2")
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        await user.rename("file", "other")
        assert await user.drained() == "durable"
        assert await user.tree() == {"other": b"2"}
    assert bucket.shows() == {"other": b"2"}


# ---- unfinished files


async def test_a_file_that_was_not_closed_is_kept_aside_and_never_published(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("file", b"old")
        await user.drained()
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"half")
        await user.fs.close_protocol.fsync(handle)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
        await user.close(handle)
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert user.fs.replayed.orphans == 1
        assert await user.read("file") == b"old"
        assert await user.drained() == "durable"
    assert [path.read_bytes() for path in (tmp_path / "2" / "orphans").iterdir()] == [b"half"]
    assert bucket.shows() == {"file": b"old"}


async def test_bytes_written_after_a_close_are_not_taken_for_closed(bucket: Bucket, tmp_path: Path) -> None:
    """A second descriptor goes on writing: what a crash leaves is a mixture that nobody closed."""
    async with running_node(bucket, tmp_path / "1") as user:
        first, second = await user.open("file"), await user.open("file", truncate=False)
        await user.fs.file_io.write(first, 0, b"1111")
        await user.close(first)
        await user.fs.file_io.write(second, 0, b"22")
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
        await user.fs.file_io.write(second, 2, b"22")
        await user.close(second)
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert await user.drained() == "durable"
    assert b"2211" not in bucket.shows().values()
    assert [path.read_bytes() for path in (tmp_path / "2" / "orphans").iterdir()] == [b"2211"]


async def test_a_staging_file_without_a_row_is_kept_aside(bucket: Bucket, cache: Path) -> None:
    (cache / "staging").mkdir(parents=True)
    (cache / "staging" / "0000000000000007").write_bytes(b"who am I?")
    async with running_node(bucket, cache) as user:
        assert user.fs.replayed.orphans == 1
        await user.write("next", b"1")
        await user.drained()
    assert (cache / "orphans" / "0000000000000007").read_bytes() == b"who am I?"
    assert bucket.shows() == {"next": b"1"}


# ---- after a power cut


async def closed_but_unpublished(bucket: Bucket, cache: Path, names: tuple[str, ...]) -> None:
    """Leave files in a cache directory that were closed, synced, and are not in the bucket."""
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        for name in names:
            await user.write(name, name.encode() * 100_000)
        await trio.sleep(10)
        photograph(cache, cache.with_suffix(".after"))
    bucket.come_back()


def recovered_after_reboot(cache: Path) -> ReplayResult:
    with Journal(cache / "journal") as journal:
        return JournalReplay(journal, StagingDirectory(cache), "another boot", cache / "empty").read()


def change_rows(cache: Path, change: Callable[[dict], dict]) -> None:
    """Rewrite every row of a file in a journal."""
    with lmdb.open(str(cache / "journal"), max_dbs=4) as env:
        files = env.open_db(b"files")
        with env.begin(write=True, db=files) as txn:
            for key, value in list(txn.cursor()):
                txn.put(key, json.dumps(change(json.loads(value))).encode())


async def test_after_a_power_cut_only_what_was_synced_and_is_whole_is_published(
    bucket: Bucket, tmp_path: Path
) -> None:
    names = ("whole", "unsynced", "damaged", "short")
    await closed_but_unpublished(bucket, tmp_path / "cache", names)
    cache = tmp_path / "cache.after"

    def unsync(row: dict) -> dict:
        return row if row["key"] != "unsynced" else {**row, "synced": False, "checksum": ""}

    change_rows(cache, unsync)
    change_rows(cache, lambda row: {**row, "boot_id": "an earlier boot"})
    with Journal(cache / "journal") as journal:
        paths = {row.key: cache / "staging" / f"{row.generation:016d}" for row in journal.files()}
    with paths["damaged"].open("r+b") as file:
        file.seek(300_000)
        file.write(b"\0" * 10)
    with paths["short"].open("r+b") as file:
        file.truncate(10)
    async with running_node(bucket, cache) as user:
        assert user.fs.replayed.suspects == 3
        assert await user.drained() == "durable"
    assert bucket.shows() == {"whole": b"whole" * 100_000}
    kept = {path.name for path in (cache / "suspect").iterdir()}
    assert kept == {paths[name].name for name in names if name != "whole"}


async def test_within_one_boot_the_page_cache_is_trusted(bucket: Bucket, tmp_path: Path) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("file", b"1")
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert user.fs.replayed.suspects == 0
        assert await user.drained() == "durable"
    assert bucket.shows() == {"file": b"1"}


async def test_what_recovery_decided_it_decides_again(bucket: Bucket, tmp_path: Path) -> None:
    await closed_but_unpublished(bucket, tmp_path / "cache", ("a", "b"))
    cache = tmp_path / "cache.after"
    change_rows(cache, lambda row: {**row, "synced": row["key"] == "a"})
    first = recovered_after_reboot(cache)
    second = recovered_after_reboot(cache)
    for found in (first, second):
        assert [version.record.key for version in found.versions] == ["a"]
    assert (first.suspects, second.suspects) == (1, 0)
    assert len(list((cache / "suspect").iterdir())) == 1


async def test_a_row_of_a_file_that_is_gone_raises_an_alarm_and_stops_nobody(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await closed_but_unpublished(bucket, tmp_path / "cache", ("gone", "there"))
    cache = tmp_path / "cache.after"
    with Journal(cache / "journal") as journal:
        (number,) = [row.generation for row in journal.files() if row.key == "gone"]
    (cache / "staging" / f"{number:016d}").unlink()
    async with running_node(bucket, cache) as user:
        assert "gone" in caplog.text
        assert await user.drained() == "durable"
        with pytest.raises(NotFound):
            await user.fs.resolve("gone")
    assert set(bucket.shows()) == {"there"}


# ---- a journal that cannot be read


@pytest.mark.parametrize(
    "row", [b"\xff\xfe", b"{}", b"[]", b'{"generation": "one"}'], ids=["bytes", "empty", "list", "wrong"]
)
async def test_an_unreadable_row_stops_the_start_and_deletes_nothing(
    bucket: Bucket, tmp_path: Path, row: bytes
) -> None:
    await closed_but_unpublished(bucket, tmp_path / "cache", ("a", "b"))
    cache = tmp_path / "cache.after"
    with lmdb.open(str(cache / "journal"), max_dbs=4) as env, env.begin(write=True) as txn:
        txn.put((99).to_bytes(8, "big"), row, db=env.open_db(b"files", txn=txn))
    for _ in range(2):
        with pytest.raises(StateError, match="unreadable"):
            async with running_node(bucket, cache):
                raise AssertionError("it started")
    assert len(list((cache / "staging").iterdir())) == 2
    assert bucket.shows() == {}


async def test_a_row_of_a_newer_version_stops_the_start_and_deletes_nothing(
    bucket: Bucket, tmp_path: Path
) -> None:
    await closed_but_unpublished(bucket, tmp_path / "cache", ("a",))
    cache = tmp_path / "cache.after"
    change_rows(cache, lambda row: {**row, "tier": "cold"})
    with pytest.raises(StateError, match="newer"):
        async with running_node(bucket, cache):
            raise AssertionError("it started")
    change_rows(cache, lambda row: {name: value for name, value in row.items() if name != "tier"})
    photograph(cache, tmp_path / "again")
    async with running_node(bucket, tmp_path / "again") as user:
        assert await user.drained() == "durable"
    assert set(bucket.shows()) == {"a"}


async def test_states_of_the_journal_say_what_the_bucket_has(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", b"1")
        rows = user.fs.journal.journal.files
        assert [row.state for row in rows()] == [FileState.FLUSHED]
        await trio.sleep(0.6)  # that nobody writes it any more goes with the next commit, or soon alone
        assert [row.state for row in rows()] == [FileState.SEALED]
        await user.drained()
        await trio.sleep(1)
        assert rows() == []


# ---- directories


async def test_changes_of_names_made_without_the_bucket_are_there_after_a_restart(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        for folder in ("kept", "removed"):
            await user.mkdir(folder)
            await user.write(f"{folder}/file", folder.encode())
        await user.write("published", b"0" * 10)
        await user.drained()
        bucket.takes_nothing = True
        await user.unlink("removed/file")
        await user.rmdir("removed")
        await user.mkdir("made")
        await user.write("made/one", b"1")
        await user.rename("made/one", "made/two")
        await user.symlink("made/two", "link")
        await user.rename("published", "made/published")
        wanted = await user.tree()
        photograph(tmp_path / "1", tmp_path / "2")
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2") as user:
        assert set(await user.tree()) == set(wanted)
        assert await user.drained() == "durable"
        await trio.sleep(5)
        assert await user.tree() == wanted
    assert files_in(bucket.shows()) == files_of(wanted)
    assert folders_in(bucket.shows()) == {"kept", "made"}


async def test_a_directory_renamed_after_a_restart_keeps_what_is_in_it(
    bucket: Bucket, tmp_path: Path
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        bucket.takes_nothing = True
        for folder in ("d", "d/inner", "d/inner/empty"):
            await user.mkdir(folder)
        await user.symlink("inner", "d/link")
        photograph(tmp_path / "1", tmp_path / "2")
    async with running_node(bucket, tmp_path / "2") as user:
        await user.rename("d", "e")
        wanted = {"e": None, "e/inner": None, "e/inner/empty": None, "e/link": b"-> inner"}
        assert await user.tree() == wanted
        bucket.come_back()
        assert await user.drained() == "durable"
        assert await user.tree() == wanted
    assert folders_in(bucket.shows()) == {"e", "e/inner", "e/inner/empty"}


@pytest.mark.parametrize("hindrance", ["a read-only mount", "refused keys"])
async def test_an_abort_that_one_mount_cannot_do_is_the_next_ones(
    bucket: Bucket, tmp_path: Path, hindrance: str
) -> None:
    upload_id = bucket.memory.create_multipart("gone", metadata={})
    (tmp_path / "journal").mkdir()
    with Journal(tmp_path / "journal") as journal:
        journal.apply([PutAbort("gone", upload_id)])
    refusing: Any = FaultyStore(bucket, Fault(AccessDenied("403"), "abort_multipart"))
    is_read_only = hindrance == "a read-only mount"
    store = ReadWriteSplit(refusing, None) if is_read_only else refusing
    async with running_node(store, tmp_path, read_only=is_read_only):
        await trio.sleep(100)
    assert bucket.memory.uploads() == ("gone",)
    async with running_node(bucket, tmp_path) as user:
        await trio.sleep(5)
        assert user.fs.journal.journal.aborts() == []
    assert bucket.memory.uploads() == ()


@pytest.mark.parametrize("was_sent", [False, True])
async def test_new_content_supersedes_a_delete_of_the_daemon_before_only_if_that_was_not_sent(
    bucket: Bucket, tmp_path: Path, *, was_sent: bool
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("a", b"old")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.unlink("a")
        await trio.sleep(10 if was_sent else 0.1)  # it settles for 1 s
        photograph(tmp_path / "1", tmp_path / "2")
    bucket.come_back()
    bucket.requests.clear()
    async with running_node(bucket, tmp_path / "2") as user:
        await user.write("a", b"new")
        assert await user.drained() == "durable"
    assert bucket.sent("delete") == (["a"] if was_sent else [])
    assert bucket.shows() == {"a": b"new"}
