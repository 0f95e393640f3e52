"""Closed files reach the bucket: all of them, once, in order, whatever the bucket answers."""

import itertools
import os
import socket
from pathlib import Path

import pytest
import trio

from fusecache.disk.staging import digests
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.errors import (
    AccessDenied,
    LocalDiskError,
    NoSpace,
    NotFound,
    ObjectMissing,
    PartsRefused,
    ReadOnly,
    Refused,
    StateError,
    Throttled,
    Unavailable,
)
from fusecache.model.objects import MIB
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, files_in, running_node

LARGE = 5 * MIB  # two parts


# ---- order


async def test_what_says_that_all_is_there_comes_after_all_of_it(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        shards = [f"checkpoint/{name}" for name in ("a", "z", "b", "y")]
        await user.mkdir("checkpoint")
        for name in (*shards, "checkpoint/.metadata", "checkpoint/latest"):
            await user.write(name, name.encode())
        assert await user.drained() == "durable"
    assert sorted(bucket.sent()[:5]) == sorted(["checkpoint/", *shards])
    assert bucket.sent()[5:] == ["checkpoint/.metadata", "checkpoint/latest"]


async def test_an_old_checkpoint_is_deleted_after_the_new_one_is_there(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("old")
        await user.write("old/model", b"1")
        await user.drained()
        await user.mkdir("new")
        await user.write("new/model", b"2" * LARGE)
        await user.unlink("old/model")
        await user.rmdir("old")
        await user.drained()
    assert bucket.sent("complete_multipart") == ["new/model"]
    after = bucket.requests[bucket.requests.index(("complete_multipart", "new/model")) :]
    assert [key for name, key in after if name == "delete"] == ["old/model", "old/"]
    assert all("old/model" in state or "new/model" in state for state in bucket.states[1:])


async def test_a_pointer_rewritten_while_queued_stays_behind_what_it_points_to(
    bucket: Bucket, cache: Path
) -> None:
    """A `latest` file of the first checkpoint still waits when the second is complete."""
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        for step in (b"1", b"2", b"3"):
            await user.write("shard-" + step.decode(), step)
            await user.write("latest", step)
        bucket.come_back()
        await user.drained()
    for state in bucket.states:
        if "latest" in state:
            assert f"shard-{state['latest'].decode()}" in state
    assert bucket.shows()["latest"] == b"3"
    assert bucket.sent().count("latest") == 3  # what was removed between two of them relies on the first


async def test_a_shard_rewritten_while_queued_is_never_missing_when_its_pointer_is_there(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("shard", b"1")
        await user.write("latest", b"points to shard")
        await user.write("shard", b"2")
        bucket.come_back()
        await user.drained()
    assert all("shard" in state for state in bucket.states if "latest" in state)
    assert bucket.shows()["shard"] == b"2"


async def test_a_rewritten_file_is_sent_once_under_its_first_place(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("model", b"1" * (2 * MIB))
        await user.write("other", b"-")
        await user.write("model", b"2" * (2 * MIB))
        await user.write("model", b"3" * (2 * MIB))
        await user.drained()
    assert sorted(bucket.sent()) == ["model", "other"]
    assert bucket.shows()["model"] == b"3" * (2 * MIB)


async def test_replacing_a_published_file_by_unlink_and_rename_never_deletes_it(
    bucket: Bucket, cache: Path
) -> None:
    """torch.distributed.checkpoint with overwrite=True does so with `.metadata`."""
    async with running_node(bucket, cache) as user:
        await user.write(".metadata", b"1")
        await user.drained()
        await user.write(".metadata.tmp", b"2")
        await trio.sleep(5)  # the temporary file is long settled, and the queue empty but for it
        await user.unlink(".metadata")
        await trio.sleep(0.5)
        await user.rename(".metadata.tmp", ".metadata")
        await user.drained()
    assert bucket.requests == [("put", ".metadata"), ("put", ".metadata")]
    assert bucket.shows() == {".metadata": b"2"}


async def test_a_rename_right_after_a_delete_of_its_name_replaces_the_object(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("ckpt", b"old")
        await user.write("ckpt.new", b"new")
        assert await user.drained() == "durable"
        await trio.sleep(5)
        bucket.states.clear()
        await user.unlink("ckpt")
        await trio.sleep(0.5)
        await user.rename("ckpt.new", "ckpt")
        await trio.sleep(30)
    assert bucket.shows() == {"ckpt": b"new"}
    assert all("ckpt" in state for state in bucket.states)


@pytest.mark.case(37)
async def test_what_is_renamed_and_removed_at_once_is_never_uploaded(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("a")
        await user.write("a/file", b"1")
        await user.rename("a/file", "a/other")
        await user.unlink("a/other")
        await trio.sleep(10)
        assert bucket.sent("put") == ["a/"]
        assert await user.drained() == "durable"


async def test_a_file_renamed_while_its_parts_are_sent_comes_in_its_new_place(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        hold = [trio.Event(), trio.Event()]
        _hold_parts(user, hold)
        await user.write("large", b"1" * LARGE)
        await user.write("small", b"2")
        await hold[0].wait()
        await user.rename("large", "renamed")
        hold[1].set()
        await user.drained()
    sent = [key for name, key in bucket.requests if name in {"put", "complete_multipart"}]
    assert sorted(sent) == ["renamed", "small"]
    assert bucket.shows() == {"renamed": b"1" * LARGE, "small": b"2"}
    assert bucket.memory.uploads() == ()


async def test_a_file_removed_while_its_parts_are_sent_leaves_nothing(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        hold = [trio.Event(), trio.Event()]
        _hold_parts(user, hold)
        await user.write("large", b"1" * LARGE)
        await hold[0].wait()
        await user.unlink("large")
        hold[1].set()
        assert await user.drained() == "durable"
        await trio.sleep(5)
    assert bucket.shows() == {}
    assert bucket.memory.uploads() == ()
    assert list((cache / "staging").iterdir()) == []


def _hold_parts(user: User, hold: list[trio.Event]) -> None:
    """The first part says that it begins (hold[0]), and waits (hold[1]) as a thread does: it cannot be cancelled."""
    offload, upload = user.fs.publisher._requests._offload, user.fs.publisher._requests._offload.upload

    async def held(call, *args):
        if call is digests and not hold[0].is_set():
            hold[0].set()
            with trio.CancelScope(shield=True):
                await hold[1].wait()
            return call(*args)
        return await upload(call, *args)

    offload.upload = held  # type: ignore[method-assign]


async def test_one_key_is_written_at_most_once_a_second(bucket: Bucket, cache: Path) -> None:
    times: list[float] = []
    async with running_node(bucket, cache, settle_seconds=0.0) as user:
        for number in range(4):
            await user.write("log", b"%d" % number)
            await user.drained()
            times.append(trio.current_time())
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(times))


async def test_a_temporary_name_is_never_published_unless_it_stays(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("model.tmp", b"1")
        await user.write("done", b"2")
        await trio.sleep(30)
        assert bucket.sent() == ["done"]
        await trio.sleep(60)
        assert bucket.sent() == ["done", "model.tmp"]


async def test_what_was_closed_under_a_temporary_name_is_on_the_disk_soon_as_any_other(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("model.tmp", b"1")
        await user.write("large.tmp", b"2" * LARGE)
        await trio.sleep(3)
        assert {row.key for row in user.fs.journal.journal.files() if row.synced} == {"model.tmp"}
        assert bucket.requests == []  # and no parts of the large one, under that name
        await user.rename("model.tmp", "model")
        await user.rename("large.tmp", "large")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"model": b"1", "large": b"2" * LARGE}


# ---- waiting


@pytest.mark.parametrize("change", ["mkdir", "symlink", "unlink", "rename"])
async def test_a_change_of_names_alone_is_published_without_being_asked(
    bucket: Bucket, cache: Path, change: str
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", b"1")
        await user.drained()
        await trio.sleep(5)
        before = len(bucket.requests)
        match change:
            case "mkdir":
                await user.mkdir("folder")
            case "symlink":
                await user.symlink("file", "link")
            case "unlink":
                await user.unlink("file")
            case "rename":
                await user.rename("file", "other")
        await trio.sleep(5)
        assert len(bucket.requests) > before
        assert user.fs.status.pending().files == 0


async def test_sync_ends_when_what_it_waits_for_is_removed(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, settle_seconds=30.0) as user:
        await user.write("file", b"1")
        async with trio.open_nursery() as nursery:
            with trio.fail_after(600):
                nursery.start_soon(user.drained)
                await trio.sleep(1)
                await user.unlink("file")


async def test_sync_says_that_time_is_up(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("file", b"1")
        assert (await user.fs.wait_durable("", 10)).result == "timeout"
        bucket.come_back()
        assert await user.drained() == "durable"


async def test_files_and_directories_can_be_made_while_the_bucket_cannot_be_reached(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.mkdir("run")
        await user.drained()
        assert await user.tree() == {"run": None}
        await trio.sleep(10)  # what is known of the directories is older than a second
        bucket.is_cut_off = True
        with trio.fail_after(30):
            await user.mkdir("run/step")
            await user.write("run/step/model", b"1")
            await trio.sleep(10)
            await user.write("run/step/index", b"2")
            await user.write("run/latest", b"step")
        await trio.sleep(200)
        bucket.come_back()
        await user.drained()
    assert bucket.sent()[0] == "run/"
    assert sorted(bucket.sent()[1:4]) == ["run/step/", "run/step/index", "run/step/model"]
    assert bucket.sent()[4:] == ["run/latest"]


# ---- answers that are lost or bad


@pytest.mark.case(25)
@pytest.mark.parametrize("method", ["put", "complete_multipart", "copy", "delete", "head"])
@pytest.mark.parametrize("after_effect", [False, True])
async def test_a_lost_answer_changes_nothing(
    bucket: Bucket, cache: Path, method: str, *, after_effect: bool
) -> None:
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await user.write("small", b"0")
        await user.drained()
        store.script(Fault(Unavailable("reset"), method, after_effect=after_effect, times=2))
        await user.write("large", b"1" * LARGE)
        await user.write("small", b"2")
        await user.rename("small", "renamed")
        await user.write("gone", b"3")
        await user.drained()
        await user.unlink("gone")
        await user.rename("large", "moved")
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
    assert files_in(bucket.shows()) == {"moved": b"1" * LARGE, "renamed": b"2"}
    assert bucket.memory.uploads() == ()


@pytest.mark.case(26)
async def test_an_upload_that_the_bucket_forgot_is_sent_again(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket, Fault(Unavailable("no answer"), "complete_multipart"))
    async with running_node(store, cache) as user:
        await user.write("large", b"1" * LARGE)
        with trio.fail_after(60):
            while not store.calls("complete_multipart"):  # noqa: ASYNC110  # a store has no events
                await trio.sleep(0.1)
        bucket.memory.lose_uploads()
        assert await user.drained() == "durable"
    assert bucket.shows() == {"large": b"1" * LARGE}


async def test_a_storm_of_refusals_ends_in_everything_published_once(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(
        bucket, Fault(Throttled("429"), "put", times=20), Fault(Unavailable("500"), "put", times=20)
    )
    async with running_node(store, cache) as user:
        await user.mkdir("d")
        for number in range(5):
            await user.write(f"d/{number}", b"%d" % number)
        assert await user.drained(6000) == "durable"
    assert sorted(bucket.sent()) == ["d/", *(f"d/{number}" for number in range(5))]


@pytest.mark.case(30)
async def test_writers_go_on_while_keys_are_refused_and_all_is_published_once_they_are_back(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(store := FaultyStore(bucket), cache) as user:
        await user.write("before", b"0")
        await user.drained()
        await user.tree()  # names are known for a second
        store.script(Fault(AccessDenied("403"), "*", times=None))
        await user.write("file", b"1")
        await trio.sleep(100)
        assert "403" in user.fs.statistics()["waiting_for"]
        store.heal()
        assert await user.drained() == "durable"
    assert bucket.shows() == {"before": b"0", "file": b"1"}


async def test_a_source_that_vanishes_before_its_copy_ends_the_rename_not_the_daemon(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await user.write("file", b"1")
        await user.drained()
        store.script(Fault(ObjectMissing("404"), "copy"))
        bucket_remove = bucket.memory.remove
        await user.rename("file", "other")
        bucket_remove("file")
        await user.write("next", b"2")
        await user.drained()
    assert bucket.shows() == {"next": b"2"}


# ---- refused for good


async def test_a_refused_file_is_kept_and_the_others_go_on(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket, Fault(Refused("EntityTooLarge"), "put", "bad", times=None))
    async with running_node(store, cache) as user:
        await user.write("bad", b"1")
        await user.write("good", b"2")
        assert await user.drained() == "error"
        assert await user.read("bad") == b"1"
        assert (await user.fs.status.path_state("bad")).startswith("error:")
        assert (await user.fs.wait_durable("good", None)).result == "durable"
    assert bucket.shows() == {"good": b"2"}
    async with running_node(store, cache) as user:
        answer = await user.fs.wait_durable("", None)
        assert (answer.result, "EntityTooLarge" in answer.message) == ("error", True)
        assert await user.read("bad") == b"1"


async def test_an_upload_whose_parts_are_refused_is_begun_anew(bucket: Bucket, cache: Path) -> None:
    store = FaultyStore(bucket, Fault(PartsRefused("InvalidPart"), "complete_multipart", times=2))
    async with running_node(store, cache) as user:
        await user.write("large", b"1" * LARGE)
        assert await user.drained() == "durable"
        assert user.fs.publisher.failure is None
        await trio.sleep(5)
    assert bucket.shows() == {"large": b"1" * LARGE}
    assert len(bucket.sent("create_multipart")) == 3
    assert bucket.memory.uploads() == ()


async def test_an_upload_whose_parts_are_refused_again_and_again_is_kept_and_reported(
    bucket: Bucket, cache: Path
) -> None:
    store = FaultyStore(bucket, Fault(PartsRefused("InvalidPart"), "complete_multipart", "bad", times=None))
    async with running_node(store, cache) as user:
        await user.write("bad", b"1" * LARGE)
        await user.write("good", b"2" * LARGE)
        assert await user.drained() == "error"
        assert await user.read("bad") == b"1" * LARGE
        assert (await user.fs.status.path_state("bad")).startswith("error:")
        await trio.sleep(5)
    assert bucket.shows() == {"good": b"2" * LARGE}
    assert 3 <= len(bucket.sent("create_multipart", "bad")) <= 10
    assert bucket.memory.uploads() == ()


@pytest.mark.parametrize("way_out", ["rewrite", "unlink"])
async def test_a_refused_file_is_forgotten_once_it_is_rewritten_or_removed(
    bucket: Bucket, cache: Path, way_out: str
) -> None:
    store = FaultyStore(bucket, Fault(Refused("policy"), "put", "bad", times=1))
    async with running_node(store, cache) as user:
        await user.write("bad", b"1")
        assert await user.drained() == "error"
        if way_out == "rewrite":
            await user.write("bad", b"2")
        else:
            await user.unlink("bad")
        assert await user.drained() == "durable"
        await trio.sleep(5)
        assert list((cache / "staging").iterdir()) == []
    assert bucket.shows() == ({"bad": b"2"} if way_out == "rewrite" else {})


async def test_bytes_that_cannot_be_read_back_are_never_published(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("broken", b"1" * MIB)
        await user.write("good", b"2")
        version = (await user.fs.resolve("broken")).version
        assert version is not None
        version.file.path.unlink()
        assert await user.drained() == "error"
    assert bucket.shows() == {"good": b"2"}


# ---- other clients


async def test_both_versions_survive_a_write_conflict(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("new", b"ours")
        bucket.memory.put_bytes("new", b"theirs")
        assert await user.drained() == "conflict"
        shown = bucket.shows()
        copies = [key for key in shown if key.startswith("new.conflict-")]
        assert [shown["new"], *(shown[key] for key in copies)] == [b"theirs", b"ours"]
        await trio.sleep(5)
        assert await user.read("new") == b"theirs"
        assert await user.read(copies[0]) == b"ours"


async def test_a_copy_of_an_earlier_conflict_of_the_same_name_survives_the_next(
    bucket: Bucket, cache: Path
) -> None:
    """Another node may have the same host name, or this one had another cache directory, with the same numbers."""
    async with running_node(bucket, cache) as user:
        await user.write("new", b"ours")
        version = (await user.fs.resolve("new")).version
        assert version is not None
        copy = f"new.conflict-{socket.gethostname()[:60]}-{version.sequence}"
        bucket.memory.put_bytes(copy, b"earlier")
        (await user.fs.resolve(copy)).lookups += 1  # the kernel knows it
        bucket.memory.put_bytes("new", b"theirs")
        assert await user.drained() == "conflict"
        shown = bucket.shows()
        assert (shown.pop("new"), shown.pop(copy)) == (b"theirs", b"earlier")
        ((other, data),) = shown.items()
        assert (other.startswith("new.conflict-"), data) == (True, b"ours")
        await trio.sleep(5)
        assert await user.tree() == bucket.shows()


@pytest.mark.parametrize("prefix", ["", "my/data/"])
@pytest.mark.parametrize(
    ("folders", "name"),
    [
        (["d"], "f" * 255),
        (["d"], "\u00e4\u5b57" * 51),
        ([*["d" * 250] * 3, "e" * 200], "f" * 50),  # the name makes way
        ([*["d" * 250] * 3, "e" * 240], "f" * 10),  # its directory leaves no room
        ([*["d" * 250] * 3, "e" * 60, *["x"] * 90], "f"),
    ],
    ids=["long name", "long Unicode name", "long path", "longer path", "deep path"],
)
async def test_both_versions_survive_a_conflict_of_a_long_key(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, folders: list[str], name: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-name-of-30-bytes-in-all")
    key = "/".join([prefix.rstrip("/"), *folders, name]).lstrip("/")
    assert len(key.encode()) <= 1024
    async with running_node(bucket, cache, prefix=prefix) as user:
        for depth in range(len(folders)):
            await user.mkdir("/".join(folders[: depth + 1]))
        assert await user.drained() == "durable"
        await user.write("/".join([*folders, name]), b"ours")
        bucket.memory.put_bytes(key, b"theirs")
        assert await user.drained() == "conflict"
        shown = {each: data for each, data in bucket.shows().items() if not each.endswith("/")}
        assert shown.pop(key) == b"theirs"
        ((copy, data),) = shown.items()
        assert data == b"ours"
        *above, copy_name = copy.removeprefix(prefix).split("/")
        assert (above, copy_name[:1]) == (folders[: len(above)], name[:1])
        mark = copy_name[copy_name.index(".conflict-a-host-name-of-30-bytes-in-all-") :]
        assert (len(copy.encode()) <= 1024, len(copy_name.encode()) <= 255) == (True, True)
        nearer = "/".join([*folders[: len(above) + 1], name[:1] + mark])
        assert above == folders or len((prefix + nearer).encode()) > 1024
        await trio.sleep(5)
        assert await user.read(copy.removeprefix(prefix)) == b"ours"
        assert await user.read("/".join([*folders, name])) == b"theirs"


async def test_a_conflict_of_a_large_file_leaves_no_upload_behind(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("new", b"1" * LARGE)
        bucket.memory.put_bytes("new", b"theirs")
        assert await user.drained() == "conflict"
        await trio.sleep(5)
    assert sorted(len(data) for data in bucket.shows().values()) == [6, LARGE]
    assert bucket.memory.uploads() == ()


@pytest.mark.case(42)
@pytest.mark.parametrize("data", [b"same", b"1" * LARGE], ids=["one request", "parts"])
async def test_the_same_bytes_from_another_node_are_success(
    bucket: Bucket, tmp_path: Path, data: bytes
) -> None:
    async with running_node(bucket, tmp_path / "1") as one, running_node(bucket, tmp_path / "2") as two:
        await one.write("file", data)
        await two.write("file", data)
        assert await one.drained() == "durable"
        assert await two.drained() == "durable"
    assert bucket.shows() == {"file": data}
    assert bucket.memory.uploads() == ()


async def test_a_newer_object_of_another_client_survives_our_queued_delete(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", b"ours")
        await user.drained()
        await user.unlink("file")
        bucket.memory.put_bytes("file", b"theirs")
        await user.drained()
        await trio.sleep(5)
        assert bucket.shows() == {"file": b"theirs"}
        assert await user.read("file") == b"theirs"


async def test_a_file_rewritten_just_while_it_is_published_is_no_conflict(
    bucket: Bucket, cache: Path
) -> None:
    """Every moment between the PUT and the journal's row for it is tried."""
    for steps in range(12):
        async with running_node(bucket, cache) as user:
            await user.write("file", b"first %d" % steps)
            await _next_request(bucket)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            await user.write("file", b"second %d" % steps)
            assert await user.drained() == "durable"
            assert bucket.shows() == {"file": b"second %d" % steps}


async def test_a_file_removed_just_while_it_is_published_is_gone(bucket: Bucket, cache: Path) -> None:
    for steps in range(12):
        async with running_node(bucket, cache) as user:
            await user.write("file", b"first %d" % steps)
            await _next_request(bucket)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            await user.unlink("file")
            assert await user.drained() == "durable"
            with pytest.raises(NotFound):
                await user.fs.resolve("file")
        assert bucket.shows() == {}


async def _next_request(bucket: Bucket) -> None:
    sent = len(bucket.requests)
    with trio.fail_after(60):
        while len(bucket.requests) == sent:  # noqa: ASYNC110  # the very moment matters
            await trio.sleep(0.001)


# ---- the node's own disk


async def test_a_full_disk_refuses_new_files_at_once_and_takes_them_later(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, cache_bytes=64 * MIB) as user:
        bucket.takes_nothing = True
        written = ["0", "1"]
        for name in written:
            await user.write(name, name.encode() * (20 * MIB))
        with pytest.raises(NoSpace):
            await user.write("2", b"2" * (20 * MIB))
        left = 64 * MIB * 7 // 10 - user.fs.cache.statistics().staging_bytes - MIB // 2
        assert user.fs.cache.reserve_staging_nowait(left)
        with pytest.raises(NoSpace):
            await user.open("more")
        user.fs.cache.release_staging(left)
        bucket.come_back()
        assert await user.drained(6000) == "durable"
        assert bucket.shows() == {name: name.encode() * (20 * MIB) for name in written}
        await user.write("later", b"x" * (20 * MIB))
        assert await user.drained() == "durable"


async def test_a_file_whose_write_failed_is_never_published(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        await user.write("file", b"old")
        await user.drained()
        handle = await user.open("file")
        await user.fs.file_io.write(handle, 0, b"new")
        version = handle.node.version
        assert version is not None

        def failing(*_: object) -> None:
            raise LocalDiskError("the disk is broken")

        version.file.write = failing  # type: ignore[method-assign]
        with pytest.raises(LocalDiskError):
            await user.fs.file_io.write(handle, 3, b"er")
        for _ in range(2):  # the second close tells it too
            with pytest.raises(LocalDiskError):
                await user.fs.close_protocol.flush(handle)
        await user.fs.file_io.release(handle)
        assert await user.drained() == "durable"
        assert await user.read("file") == b"old"
    assert bucket.shows() == {"file": b"old"}


async def test_when_the_journal_fails_writing_stops_and_reading_goes_on(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("there", b"1")
    async with running_node(bucket, cache) as user:
        await user.write("file", b"2")

        def failing(*_: object) -> None:
            raise StateError("the journal's disk is broken")

        user.fs.journal.journal.apply = failing  # type: ignore[method-assign]
        with pytest.raises((StateError, ReadOnly)):  # the publisher may have met it first
            await user.mkdir("folder")
        await trio.sleep(100)
        assert await user.read("there") == b"1"
        assert bucket.shows() == {"there": b"1"}
    async with running_node(bucket, cache) as user:
        assert await user.drained() == "durable"
    assert bucket.shows() == {"there": b"1", "file": b"2"}


async def test_a_thousand_files_wait_for_the_bucket_with_few_descriptors(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache) as user:
        bucket.takes_nothing = True
        await user.write("first", b"1")
        before = _descriptors()
        for number in range(200):
            await user.write(f"{number}", b"%d" % number)
        await trio.sleep(10)
        assert _descriptors() - before < 20
        bucket.come_back()
        await user.drained(6000)
    assert len(bucket.shows()) == 201


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_file_that_the_next_daemon_uploads_is_warm(bucket: Bucket, cache: Path) -> None:
    bucket.takes_nothing = True
    async with running_node(bucket, cache) as user:
        handle = await user.open("checkpoint")
        await user.fs.file_io.write(handle, 0, b"weights" * 100_000)
        await user.fs.close_protocol.fsync(handle)
        await user.close(handle)
    bucket.come_back()
    async with running_node(bucket, cache) as user:
        assert await user.drained() == "durable"
        await user.fs.publisher.retirement.wait_idle()
        assert await user.read("checkpoint") == b"weights" * 100_000
    assert bucket.gets == []


async def test_a_large_file_that_is_renamed_in_its_turn_is_published_once(
    bucket: Bucket, cache: Path
) -> None:
    supervisor = Supervisor()
    async with running_node(bucket, cache, supervisor=supervisor) as user:
        bucket.takes_nothing = True
        await user.write("large", bytes(9 * MIB))
        await trio.sleep(5)
        await user.rename("large", "other")
        await trio.sleep(5)
        bucket.come_back()
        assert await user.drained() == "durable"
    assert bucket.sent("complete_multipart") == ["other"]
    assert supervisor.statistics() == {}
