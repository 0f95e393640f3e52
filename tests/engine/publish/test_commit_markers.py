"""Commit markers (`.metadata`, `latest`) reach the bucket only after the files that they announce.

That holds whatever is rejected, lost in a power cut, removed or renamed in between.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from fusecache.model.errors import NoSpace, Refused
from fusecache.model.objects import MIB
from tests.engine.recovery.test_journal_replay import change_rows
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, files_in, photograph, running_node


async def save(user: User, folder: str, content: bytes, *names: str) -> None:
    """Write files, then the one that says that they are there."""
    for name in (*names, ".metadata"):
        await user.write(f"{folder}/{name}", content)


# ---- what the bucket refused


async def test_it_is_kept_back_with_what_the_bucket_refuses_of_the_rest(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "run/1/b", times=1))
    async with running_node(store, cache) as user:
        for folder in ("run", "run/1", "run/2", "other"):
            await user.mkdir(folder)
        await save(user, "run/1", b"1", "a", "b")
        await user.write("run/latest", b"1")
        await save(user, "other", b"o", "a")
        assert await user.drained() == "error"
        assert set(files_in(bucket.shows())) == {"run/1/a", "other/a", "other/.metadata"}
        assert user.fs.statistics()["rejected_files"] == 3
        told = (await user.fs.status.path_status("run/1/.metadata"))["failed"][0]["cause"]
        assert "the bucket rejected run/1/b, which must come first" in told
        assert "locked" in told
        assert await user.read("run/1/.metadata") == b"1"

        await save(user, "run/2", b"2", "a", "b")
        await user.write("run/latest", b"2")
        await user.drained()
        shown = bucket.shows()
        assert shown["run/2/.metadata"] == b"2"
        assert not {"run/1/.metadata", "run/latest"} & set(shown)

        number = (await user.fs.resolve("run/1/b")).version.record.generation
        await user.fs.quarantine.restore(number, "")
        assert await user.drained() == "durable"
        assert user.fs.statistics()["rejected_files"] == 0
    assert (bucket.shows()["run/1/.metadata"], bucket.shows()["run/latest"]) == (b"1", b"2")
    for state in bucket.states:
        assert "run/1/.metadata" not in state or "run/1/b" in state


@pytest.mark.parametrize("end", ["removed", "written again"])
async def test_it_follows_when_what_was_refused_is_settled(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, end: str
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "d/b", times=1))
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        await save(user, "d", b"1", "a", "b")
        assert await user.drained() == "error"
        photograph(cache, cache.with_suffix(".after"))
    async with running_node(bucket, cache.with_suffix(".after")) as user:  # known after a restart, too
        assert await user.drained() == "error"
        assert "d/.metadata" not in bucket.shows()
        if end == "removed":
            await user.unlink("d/b")
        else:
            await user.write("d/b", b"2")
        assert await user.drained() == "durable"
    assert bucket.shows()["d/.metadata"] == b"1"
    for state in bucket.states:
        assert "d/.metadata" not in state or end == "removed" or "d/b" in state


@pytest.mark.parametrize("how", ["written", "renamed"])
async def test_it_waits_for_what_replaces_what_was_refused(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, how: str
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "d/b", times=1))
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        await save(user, "d", b"1", "a", "b")
        assert await user.drained() == "error"
        bucket.takes_nothing = True
        if how == "written":
            await user.write("d/b", b"2")
        else:
            await user.write("d/b.tmp", b"2")
            await user.rename("d/b.tmp", "d/b")
        await trio.sleep(5)
        bucket.come_back()
        assert await user.drained() == "durable"
    assert bucket.shows()["d/.metadata"] == b"1"
    for state in bucket.states:
        assert "d/.metadata" not in state or "d/b" in state


async def test_what_the_bucket_s_older_version_names_is_not_removed_while_the_newer_is_kept_back(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "run/log", times=1))
    async with running_node(store, cache) as user:
        for folder in ("run", "run/1", "run/2"):
            await user.mkdir(folder)
        await user.write("run/1/model", b"1")
        await user.write("run/latest", b"1")
        await user.write("other", b"1")
        assert await user.drained() == "durable"
        await user.write("run/log", b"log")
        await user.write("run/2/model", b"2")
        await user.write("run/latest", b"2")
        await user.unlink("run/1/model")
        await user.rmdir("run/1")
        await user.unlink("other")
        assert await user.drained() == "error"
        await trio.sleep(20)
        shown = files_in(bucket.shows())
        assert shown == {"run/1/model": b"1", "run/2/model": b"2", "run/latest": b"1"}
        assert "run/1/model" not in await user.tree("run")
        photograph(cache, cache.with_suffix(".after"))
    async with running_node(bucket, cache.with_suffix(".after")) as user:
        assert await user.drained() == "error"
        assert "run/1/model" in bucket.shows()
        await user.unlink("run/log")
        for _ in range(2):  # then what was removed since
            assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"run/2/model": b"2", "run/latest": b"2"}


async def test_a_name_whose_delete_waits_for_it_is_replaced_in_one_request_also_after_a_restart(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "run/log", times=1))
    async with running_node(store, cache) as user:
        await user.mkdir("run")
        await user.write("run/model", b"1")
        await user.write("run/latest", b"1")
        assert await user.drained() == "durable"
        await user.write("run/log", b"log")
        await user.write("run/latest", b"2")
        await user.unlink("run/model")
        assert await user.drained() == "error"
        await trio.sleep(20)
        photograph(cache, cache.with_suffix(".after"))
    published = len(bucket.states)
    async with running_node(bucket, cache.with_suffix(".after")) as user:
        await user.write("run/model", b"3")
        assert await user.drained() == "error"
        assert user.fs.publisher.rejections.conflicts == {}
    assert all("run/model" in state for state in bucket.states[published:])
    assert files_in(bucket.shows()) == {"run/model": b"3", "run/latest": b"1"}


async def test_who_wants_it_published_all_the_same_says_so(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "d/b", times=None))
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        await save(user, "d", b"1", "a", "b")
        assert await user.drained() == "error"
        photograph(cache, cache.with_suffix(".after"))
    after = cache.with_suffix(".after")
    async with running_node(
        FaultyStore(bucket, Fault(Refused("locked"), "put", "d/b", times=None)), after
    ) as user:
        await user.drained()
        assert "d/.metadata" not in bucket.shows()
        number = (await user.fs.resolve("d/.metadata")).version.record.generation
        await user.fs.quarantine.restore(number, "")
        assert await user.drained() == "error"  # the shard, still
    assert set(files_in(bucket.shows())) == {"d/a", "d/.metadata"}


async def test_what_was_refused_before_a_restart_keeps_back_what_is_closed_after_it(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "run/1", times=1))
    async with running_node(store, cache) as user:
        await user.mkdir("run")
        await user.write("run/1", b"1")
        assert await user.drained() == "error"
        await trio.sleep(1)
        photograph(cache, cache.with_suffix(".after"))
    async with running_node(bucket, cache.with_suffix(".after")) as user:
        await user.write("run/2", b"2")
        await user.write("run/latest", b"2")
        assert await user.drained() == "error"
        assert files_in(bucket.shows()) == {"run/2": b"2"}
        await user.unlink("run/1")
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"run/2": b"2", "run/latest": b"2"}


async def test_what_was_queued_before_a_restart_and_is_refused_after_it_keeps_it_back(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("run")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("run/1", b"1")
        await trio.sleep(5)
        photograph(cache, cache.with_suffix(".after"))
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "run/1", times=None))
    async with running_node(store, cache.with_suffix(".after")) as user:
        await user.write("run/latest", b"1")
        bucket.come_back()
        assert await user.drained() == "error"
    assert "run/latest" not in bucket.shows()


async def test_it_is_offered_again_when_it_has_its_name_back(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "run/1", times=1))
    async with running_node(store, cache, cache_bytes=100 * MIB) as user:
        await user.mkdir("run")
        await user.write("run/1", b"1")
        await user.write("run/latest", b"1")
        assert await user.drained() == "error"
        handle = await user.open("run/latest", truncate=False)
        await user.fs.file_io.write(handle, 0, b"2")
        await user.unlink("run/1")
        with pytest.raises(NoSpace):
            await user.fs.file_io.write(handle, 200 * MIB, b"too far")
        with pytest.raises(NoSpace):
            await user.close(handle)
        assert await user.read("run/latest") == b"1"
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"run/latest": b"1"}


async def test_one_that_is_removed_while_somebody_reads_it_is_no_trouble(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "d/b", times=None))
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        await save(user, "d", b"1", "a", "b")
        assert await user.drained() == "error"
        reader = user.fs.file_io.open(await user.fs.resolve("d/.metadata"), writable=False, pid=0)
        for name in (".metadata", "a", "b"):
            await user.unlink(f"d/{name}")
        await user.fs.file_io.release(reader)
        await user.rmdir("d")
        assert await user.drained() == "durable"
        assert user.fs.statistics()["rejected_files"] == 0
    assert files_in(bucket.shows()) == {}


async def test_a_directory_that_is_renamed_while_a_file_of_it_is_refused_has_it_not_either(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    class Slow(InlineOffload):
        async def publish(self, call, *args):
            await trio.sleep(1)
            return call(*args)

    store = FaultyStore(bucket, Fault(Refused("locked"), "put", "tmp-1/b", times=None))
    async with running_node(store, cache, offload=Slow()) as user:
        await user.mkdir("tmp-1")
        await save(user, "tmp-1", b"1", "a", "b")
        await trio.sleep(1.5)  # those two are under way
        await user.rename("tmp-1", "1")
        await trio.sleep(1)  # refused by now, and the other two are on their way
        photograph(cache, cache.with_suffix(".after"))
        assert await user.drained() == "error"
        assert set(files_in(bucket.shows())) == {"1/a"}
    async with running_node(store, cache.with_suffix(".after")) as user:
        assert await user.drained() == "error"
    assert set(files_in(bucket.shows())) == {"1/a"}


async def test_what_is_refused_elsewhere_or_closed_later_does_not_keep_it_back(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    store = FaultyStore(
        bucket,
        Fault(Refused("no"), "put", "other/b", times=None),
        Fault(Refused("no"), "put", "d/later", times=None),
    )
    async with running_node(store, cache) as user:
        for folder in ("other", "d"):
            await user.mkdir(folder)
        await user.write("other/b", b"1")
        await save(user, "d", b"1", "a")
        await user.write("d/later", b"1")
        assert await user.drained() == "error"
    assert set(files_in(bucket.shows())) == {"d/a", "d/.metadata"}


# ---- what a power cut took


async def after_a_power_cut(cache: Path, *lost: str) -> None:
    """Have the machine have gone down, with all on the disk but what is named."""
    change_rows(
        cache,
        lambda row: {
            **row,
            "boot_id": "earlier",
            **({"synced": False, "checksum": ""} if row["key"] in lost else {}),
        },
    )


async def test_after_a_power_cut_nothing_says_that_what_is_lost_is_there_and_what_it_replaced_stays(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    after = cache.with_suffix(".after")
    async with running_node(bucket, cache) as user:
        await user.mkdir("run")
        await user.mkdir("run/1")
        await save(user, "run/1", b"1", "a", "b")
        await user.write("run/latest", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        for folder in ("run/2", "aside"):
            await user.mkdir(folder)
        await save(user, "aside", b"2", "a")
        await save(user, "run/2", b"2", "a", "b")
        await user.write("run/latest", b"2")
        for name in ("a", "b", ".metadata"):
            await user.unlink(f"run/1/{name}")
        await user.rmdir("run/1")
        await user.write("run/log", b"log")
        await trio.sleep(10)
        photograph(cache, after)
    bucket.come_back()
    await after_a_power_cut(after, "run/2/b")
    async with running_node(bucket, after) as user:
        assert user.fs.replayed.suspects == 1
        assert await user.drained() == "error"
        shown = files_in(bucket.shows())
        assert {key for key in shown if key.startswith("run/1/")} == {"run/1/a", "run/1/b", "run/1/.metadata"}
        assert (shown["run/latest"], shown["run/2/a"], shown["run/log"]) == (b"1", b"2", b"log")
        assert "run/2/.metadata" not in shown
        assert shown["aside/.metadata"] == b"2"
        assert (
            await user.read("run/2/.metadata") == await user.read("run/latest") == b"2"
        )  # synced: kept here
        tree = await user.tree("run/1")
        assert set(tree) == {"run/1/a", "run/1/b", "run/1/.metadata"}
        cause = (await user.fs.status.path_status("run/latest"))["failed"][0]["cause"]
        assert "may name run/2/b, which was closed before it, and is lost or damaged" in cause
        await user.unlink("run/2/a")
        await user.unlink("run/2/.metadata")
        await user.drained()
        assert bucket.shows()["run/latest"] == b"1"  # nobody but a person says that it is to go
        number = (await user.fs.resolve("run/latest")).version.record.generation
        await user.fs.quarantine.restore(number, "")
        assert await user.drained() == "durable"
    assert bucket.shows()["run/latest"] == b"2"


async def test_after_a_power_cut_one_that_was_removed_does_not_stand_beside_what_was_written_anew(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    after = cache.with_suffix(".after")
    async with running_node(bucket, cache) as user:
        await user.mkdir("best")
        await save(user, "best", b"1", "a")
        await user.write("old", b"1")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("large", b"1")
        await user.unlink("best/.metadata")
        await user.unlink("old")
        await user.write("best/a", b"2")
        await trio.sleep(10)
        photograph(cache, after)
    bucket.come_back()
    await after_a_power_cut(after, "large")
    async with running_node(bucket, after) as user:
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"best/a": b"2", "old": b"1"}


@pytest.mark.parametrize("is_new", [True, False])
async def test_after_a_power_cut_all_is_as_it_was_if_newer_content_stands_for_what_is_lost(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, *, is_new: bool
) -> None:
    after = cache.with_suffix(".after")
    async with running_node(bucket, cache) as user:
        await user.mkdir("d")
        await user.write("d/old", b"1")
        if not is_new:
            await user.write("d/latest", b"0")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("d/latest", b"1")
        await user.write("d/other", b"1")
        await user.write("d/latest", b"2")
        await user.unlink("d/old")
        await trio.sleep(10)
        photograph(cache, after)
    bucket.come_back()
    rows = []

    def lose_first(row: dict) -> dict:
        rows.append(row)
        is_first = (
            row["key"] == "d/latest" and row["size"] == 1 and sum(r["key"] == row["key"] for r in rows) == 1
        )
        return {**row, "boot_id": "earlier", **({"synced": False, "checksum": ""} if is_first else {})}

    change_rows(after, lose_first)
    async with running_node(bucket, after) as user:
        assert user.fs.replayed.suspects == 1
        assert await user.drained() == "durable"
    assert files_in(bucket.shows()) == {"d/other": b"1", "d/latest": b"2"}


# ---- what is removed, and written anew


@pytest.mark.parametrize("why", ["delayed", "read"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["begun", "saved again"])
async def test_its_removal_comes_before_what_is_written_anew_beside_it_also_if_it_is_put_off(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, why: str, *, is_whole: bool
) -> None:
    async with running_node(bucket, cache, delete_delay=300.0 if why == "delayed" else 0.0) as user:
        await user.mkdir("d")
        await save(user, "d", b"1", "a", "b")
        assert await user.drained() == "durable"
        reader = user.fs.file_io.open(await user.fs.resolve("d/.metadata"), writable=False, pid=0)
        if why == "delayed":
            await user.fs.file_io.release(reader)
        await user.unlink("d/.metadata")
        await user.write("d/a", b"2")
        await user.write("d/b", b"2")
        if is_whole:
            await user.write("d/.metadata", b"2")
        await trio.sleep(30)
        shown = files_in(bucket.shows())
        if why == "read":
            await user.fs.file_io.release(reader)
    assert shown == {"d/a": b"2", "d/b": b"2", **({"d/.metadata": b"2"} if is_whole else {})}
    for state in bucket.states:
        assert state.get("d/.metadata") != b"1" or {state["d/a"], state["d/b"]} == {b"1"}


async def test_it_is_replaced_in_one_request_if_nothing_was_written_beside_it(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("d")
        await save(user, "d", b"1", "a")
        assert await user.drained() == "durable"
        await user.unlink("d/.metadata")
        await user.write("d/.metadata.tmp", b"2")
        await user.rename("d/.metadata.tmp", "d/.metadata")
        assert await user.drained() == "durable"
    assert bucket.sent("delete", "d/") == []
    assert bucket.shows()["d/.metadata"] == b"2"


@pytest.mark.parametrize("how", ["written", "renamed"])
async def test_a_delayed_removal_of_it_is_replaced_in_one_request_too_and_holds_nothing_below(
    bucket: Bucket, cache: Path, autojump_clock: MockClock, how: str
) -> None:
    async with running_node(bucket, cache, delete_delay=3600.0) as user:
        for folder in ("run", "run/1", "run/2"):
            await user.mkdir(folder)
        await user.write("run/1/model", b"1")
        await user.write("run/latest", b"1")
        assert await user.drained() == "durable"
        await user.unlink("run/latest")
        await trio.sleep(5)
        await user.write("run/2/model", b"2")
        await trio.sleep(20)
        assert bucket.shows()["run/2/model"] == b"2"
        if how == "written":
            handle = await user.open("run/latest")
            await user.fs.file_io.write(handle, 0, b"2")
            await user.fs.close_protocol.flush(handle)
            await trio.sleep(5)
            await user.fs.file_io.release(handle)
        else:
            await user.write("run/latest.tmp", b"2")
            await trio.sleep(5)
            await user.rename("run/latest.tmp", "run/latest")
        await trio.sleep(20)
    assert bucket.shows()["run/latest"] == b"2"
    assert bucket.sent("delete", "run/") == []


async def test_a_delayed_removal_of_it_holds_no_directory_and_nothing_that_leaves_its_own(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache, delete_delay=3600.0) as user:
        for folder in ("run", "else"):
            await user.mkdir(folder)
        await user.write("run/model", b"1")
        await user.write("run/latest", b"1")
        assert await user.drained() == "durable"
        await user.unlink("run/latest")
        await user.mkdir("run/2")
        await user.write("run/2/model", b"2")
        await user.rename("run/model", "else/model")
        await trio.sleep(20)
        shown = bucket.shows()
        assert {"run/2/", "run/2/model", "else/model"} <= set(shown)
        assert "run/model" not in shown
        assert shown["run/latest"] == b"1"


async def test_a_temporary_file_ends_the_delay_when_it_turns_out_to_stay(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache, delete_delay=3600.0) as user:
        await user.mkdir("d")
        await save(user, "d", b"1", "a")
        assert await user.drained() == "durable"
        await user.unlink("d/.metadata")
        await user.write("d/a.tmp", b"2")
        await trio.sleep(30)
        assert "d/.metadata" in bucket.shows()
        await trio.sleep(60)
        assert "d/.metadata" not in bucket.shows()
        assert bucket.shows()["d/a.tmp"] == b"2"


# A closed file has a descriptor until it is prepared, and a login shell has a limit of 1 024.
MANY = 100


async def test_a_hundred_delayed_removals_cost_one_look_each(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache, delete_delay=3600.0) as user:
        await user.mkdir("d")
        for number in range(MANY):
            await user.write(f"d/{number}.done", b"1")
        assert await user.drained() == "durable"
        for number in range(MANY):
            await user.unlink(f"d/{number}.done")
        for number in range(MANY):
            await user.write(f"d/{number}", b"2")
        assert len(user.fs.publisher._schedule._later) <= 3 * MANY
        await trio.sleep(20)
        assert set(files_in(bucket.shows())) == {f"d/{number}" for number in range(MANY)}


# ---- directories that are renamed


async def test_a_directory_that_was_kept_here_is_published_with_it_as_the_last(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache, local_only=("tmp/",)) as user:
        for folder in ("tmp", "tmp/step", "tmp/step/z"):
            await user.mkdir(folder)
        await user.write("tmp/step/z/shard", b"1")
        await save(user, "tmp/step", b"1", "__0", "__1")
        await user.write("tmp/step/z/shard", b"2")  # written again
        await user.rename("tmp/step", "step")
        assert await user.drained() == "durable"
    for state in bucket.states:
        assert "step/.metadata" not in state or {"step/__0", "step/__1", "step/z/shard"} <= set(state)


async def test_the_newest_version_keeps_its_place_among_what_is_renamed_with_it(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("run")
        bucket.takes_nothing = True
        for number in "12":
            await user.mkdir(f"run/{number}")
            await user.write(f"run/{number}/model", number.encode())
            await user.write("run/latest", number.encode())
        await trio.sleep(5)
        assert len(user.fs.queue.for_key("run/latest")) == 2
        await user.rename("run", "final")
        bucket.come_back()
        assert await user.drained() == "durable"
    for state in bucket.states:
        assert state.get("final/latest") != b"2" or "final/2/model" in state


async def test_of_what_another_node_wrote_the_empty_file_that_ends_it_moves_last(
    bucket: Bucket, cache: Path, autojump_clock: MockClock
) -> None:
    """A HEAD tells whole seconds, a LIST fractions of them."""

    class Coarse:
        def __getattr__(self, name: str) -> Any:
            call = getattr(bucket, name)
            if name != "head":
                return call

            def head(key: str) -> Any:
                info = call(key)
                return replace(info, modified=float(int(info.modified)))

            return head

    for name in ("z-part", "m-part", "_SUCCESS"):
        bucket.memory.put_bytes(f"out/{name}", b"" if name == "_SUCCESS" else b"1")
    async with running_node(Coarse(), cache) as user:
        await user.rename("out", "out2")
        assert await user.drained() == "durable"
    for state in bucket.states:
        assert "out2/_SUCCESS" not in state or {"out2/z-part", "out2/m-part"} <= set(state)
