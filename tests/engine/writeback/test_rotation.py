"""Old checkpoints are removed faster than new ones go up: the bucket always has a whole one, and gets newer ones."""

from collections.abc import Awaitable, Callable
from functools import cache as cache_of_values
from pathlib import Path

import pytest
import trio

from fusecache.model.errors import Unavailable
from fusecache.model.objects import MIB
from fusecache.remote.store import FileSlice
from tests.support.inline_offload import InlineOffload
from tests.support.node import Bucket, User, files_in, photograph, running_node

ROUNDS = 14
EVERY = 3.0
PART_SECONDS = 4.0


class Uplink(InlineOffload):
    """One part at a time, each of which takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        self._line = trio.Lock()

    async def upload(self, call, *args):  # type: ignore[no-untyped-def,override]
        if not any(isinstance(each, FileSlice) for each in args):
            return await self.network(call, *args)
        async with self._line:
            await trio.sleep(PART_SECONDS)
            return await self.network(call, *args)

    async def publish(self, call, *args):  # type: ignore[no-untyped-def,override]
        return await self.network(call, *args)


@cache_of_values
def content(step: int) -> bytes:
    return bytes([step]) * (5 * MIB)


@cache_of_values
def half(step: int) -> bytes:
    return content(step)[: 4 * MIB]


async def save_file(user: User, step: int) -> None:
    await user.write(f"run/step-{step}", content(step))


async def remove_file(user: User, step: int) -> None:
    await user.unlink(f"run/step-{step}")


async def save_by_rename(user: User, step: int) -> None:
    await user.write(f"run/step-{step}.tmp", content(step))
    await user.rename(f"run/step-{step}.tmp", f"run/step-{step}")


async def save_directory(user: User, step: int) -> None:
    await user.mkdir(f"run/step-{step}")
    for name in ("model", "optimizer"):
        await user.write(f"run/step-{step}/{name}", half(step))


async def remove_directory(user: User, step: int) -> None:
    await remove_parts(user, f"run/step-{step}")


async def save_nested(user: User, step: int) -> None:
    await user.mkdir(f"run/step-{step}")
    await save_parts(user, f"run/step-{step}/rank-0", step)


async def remove_nested(user: User, step: int) -> None:
    await remove_parts(user, f"run/step-{step}/rank-0")
    await user.rmdir(f"run/step-{step}")


async def save_in_root(user: User, step: int) -> None:
    await save_parts(user, f"step-{step}", step)


async def remove_in_root(user: User, step: int) -> None:
    await remove_parts(user, f"step-{step}")


async def save_parts(user: User, folder: str, step: int) -> None:
    await user.mkdir(folder)
    await user.write(f"{folder}/model", content(step))
    await user.write(f"{folder}/optimizer", half(step))


async def remove_parts(user: User, folder: str) -> None:
    for name in ("model", "optimizer"):
        await user.unlink(f"{folder}/{name}")
    await user.rmdir(folder)


async def point(user: User, step: int) -> None:
    await user.write("run/latest", b"%d" % step)


async def point_by_rename(user: User, step: int) -> None:
    await user.write("run/latest.tmp", b"%d" % step)
    await user.rename("run/latest.tmp", "run/latest")


async def point_by_link(user: User, step: int) -> None:
    if step:
        await user.unlink("run/latest")
    await user.symlink(f"step-{step}", "run/latest")


def whole_steps(state: dict[str, bytes]) -> set[int]:
    """Return which checkpoints a bucket has all files of."""
    files = {key.removeprefix("run/"): data for key, data in files_in(state).items()}
    return {step for step in range(ROUNDS) if any(each.items() <= files.items() for each in _layouts(step))}


def _layouts(step: int) -> list[dict[str, bytes]]:
    """Return what a checkpoint consists of, saved in each way."""
    folder = f"step-{step}"
    return [
        {folder: content(step)},
        {f"{folder}/{name}": half(step) for name in ("model", "optimizer")},
        {f"{folder}/model": content(step), f"{folder}/optimizer": half(step)},
        {f"{folder}/rank-0/model": content(step), f"{folder}/rank-0/optimizer": half(step)},
    ]


def pointed_at(state: dict[str, bytes]) -> int | None:
    """Return which checkpoint `latest` names in a bucket."""
    latest = state.get("run/latest")
    return None if latest is None else int(latest.removeprefix(b"-> ").removeprefix(b"step-"))


Step = Callable[[User, int], Awaitable[None]]


@pytest.mark.parametrize(
    ("save", "remove", "tell"),
    [
        (save_file, remove_file, None),
        (save_file, remove_file, point),
        (save_file, remove_file, point_by_rename),
        (save_file, remove_file, point_by_link),
        (save_by_rename, remove_file, point),
        (save_directory, remove_directory, None),
        (save_directory, remove_directory, point),
        (save_nested, remove_nested, None),
        (save_nested, remove_nested, point),
        (save_in_root, remove_in_root, None),
    ],
)
async def test_a_rotation_that_is_faster_than_the_uplink_leaves_a_whole_checkpoint(
    bucket: Bucket, tmp_path: Path, save: Step, remove: Step, tell: Step | None
) -> None:
    async with running_node(bucket, tmp_path / "1", offload=Uplink()) as user:
        await user.mkdir("run")
        await save(user, 0)
        if tell is not None:
            await tell(user, 0)
        assert await user.drained() == "durable"
        bucket.states.clear()
        for step in range(1, ROUNDS):
            await save(user, step)
            if tell is not None:
                await tell(user, step)
            await remove(user, step - 1)
            await trio.sleep(EVERY)
        arrived = set().union(*map(whole_steps, bucket.states))
        assert len(arrived) >= 3, arrived
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2", offload=Uplink()) as user:
        assert await user.drained() == "durable"
        assert whole_steps(await user.tree("")) == {ROUNDS - 1}  # type: ignore[arg-type]
    for state in bucket.states:
        assert whole_steps(state)
        assert tell is None or pointed_at(state) in whole_steps(state)
    assert whole_steps(bucket.shows()) == {ROUNDS - 1}


@pytest.mark.parametrize("tell", [point, point_by_rename, point_by_link])
async def test_each_pointer_arrives_once_its_checkpoint_is_whole_although_newer_ones_are_on_their_way(
    bucket: Bucket, cache: Path, tell: Step
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.mkdir("run")
        for step in range(6):
            await save_file(user, step)
            await tell(user, step)
            await trio.sleep(EVERY)
        assert await user.drained() == "durable"
    pointers = [pointed_at(state) for state in bucket.states]
    assert list(dict.fromkeys(pointers)) == [None, *range(6)]
    assert all(
        pointer is None or pointer in whole_steps(state)
        for pointer, state in zip(pointers, bucket.states, strict=True)
    )


async def test_a_link_removed_on_its_way_does_not_arrive_without_what_it_names(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.mkdir("run")
        for step in range(3):
            await save_file(user, step)
            await point_by_link(user, step)
        await remove_file(user, 1)
        assert await user.drained() == "durable"
    assert {pointed_at(state) for state in bucket.states} == {None, 0, 2}


@pytest.mark.parametrize("names", [("run/step-0", "run/latest"), ("run/latest", "run/step-0")])
async def test_a_link_that_is_removed_with_what_it_names_costs_no_request(
    bucket: Bucket, cache: Path, names: tuple[str, str]
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.mkdir("run")
        assert await user.drained() == "durable"
        bucket.requests.clear()
        await save_file(user, 0)
        await point_by_link(user, 0)
        for name in names:
            await user.unlink(name)
        assert await user.drained() == "durable"
        assert not [key for method, key in bucket.requests if method in ("put", "delete")]
    assert bucket.shows() == {"run/": b""}


async def test_a_directory_that_is_removed_while_it_goes_up_goes_up_no_further(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.mkdir("run")
        await user.mkdir("run/data")
        for number in range(8):
            await user.write(f"run/data/{number}", half(number))
        await trio.sleep(3 * PART_SECONDS)
        assert bucket.shows().keys() > {"run/", "run/data/"}, "some are there, others are not"
        for number in range(8):
            await user.unlink(f"run/data/{number}")
        await user.rmdir("run/data")
        await trio.sleep(2 * PART_SECONDS)
        bucket.requests.clear()
        assert await user.drained() == "durable"
        assert not [key for method, key in bucket.requests if method == "put"]
    assert bucket.shows() == {"run/": b""}


# ---- what goes on beside a rotation


async def write_beside(user: User, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        await user.write(path, data)


async def test_what_says_that_all_is_there_goes_before_the_rest_is_written_anew(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.mkdir("run")
        await user.mkdir("run/last")
        await write_beside(user, {"run/last/shard": b"old", "run/last/.metadata": b"old"})
        assert await user.drained() == "durable"
        bucket.states.clear()
        await write_beside(user, {"run/big": content(1), "run/log.part": b"log"})
        await user.unlink("run/last/.metadata")
        await user.write("run/last/shard", b"new")
        await user.rename("run/log.part", "run/log")
        await user.write("run/other", b"")
        await user.unlink("run/big")
        assert await user.drained() == "durable"
    for state in bucket.states:
        assert state["run/last/shard"] == b"old" or "run/last/.metadata" not in state


async def test_a_deleted_checkpoint_with_a_markers_name_is_replaced_although_a_temporary_file_is_beside_it(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.write("last.ckpt", content(0))
        assert await user.drained() == "durable"
        bucket.states.clear()
        await user.write("last.ckpt.tmp", content(1))
        await user.unlink("last.ckpt")
        await user.write("log.tmp", b"log")
        await user.rename("last.ckpt.tmp", "last.ckpt")
        await trio.sleep(30)
        assert bucket.shows() == {"last.ckpt": content(1)}
    assert all("last.ckpt" in state for state in bucket.states)


async def test_removals_that_come_later_keep_their_order(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        for folder in ("run", "run/0", "run/1", "run/2"):
            await user.mkdir(folder)
        await write_beside(user, {"run/0/shard": b"s", "run/0/.metadata": b"m", "run/z": b"z"})
        assert await user.drained() == "durable"
        bucket.states.clear()
        await user.write("run/1/a", content(0))
        await user.unlink("run/z")
        await user.write("run/1/b", content(1))
        await user.unlink("run/0/.metadata")
        await user.write("run/2/c", content(2))
        await user.unlink("run/0/shard")
        await user.unlink("run/1/b")
        assert await user.drained() == "durable"
    assert all("run/0/shard" in state for state in bucket.states if "run/0/.metadata" in state)


async def test_what_a_markers_delete_waits_for_goes_up_although_it_was_removed_if_files_follow_beside_the_marker(
    bucket: Bucket, cache: Path
) -> None:
    """The delete may not move behind them, and another delete is the oldest."""
    async with running_node(bucket, cache, offload=Uplink()) as user:
        for folder in ("run", "run/0"):
            await user.mkdir(folder)
        await write_beside(user, {"run/0/shard": b"old", "run/0/.metadata": b"m", "run/z": b"z"})
        assert await user.drained() == "durable"
        bucket.states.clear()
        await user.write("run/a", content(0))
        await user.unlink("run/z")
        await user.write("run/b", content(1))
        await user.unlink("run/0/.metadata")
        await user.write("run/0/shard", b"new")
        await user.unlink("run/b")
        assert await user.drained() == "durable"
    for state in bucket.states:
        assert state["run/0/shard"] == b"old" or "run/0/.metadata" not in state
    assert set(files_in(bucket.shows())) == {"run/0/shard", "run/a"}


async def test_a_directorys_marker_goes_after_a_delete_in_it_that_waits_for_renamed_content(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.mkdir("d")
        await user.write("d/old", b"old")
        assert await user.drained() == "durable"
        bucket.states.clear()
        await user.write("new.tmp", content(0))
        await user.unlink("d/old")
        await user.rmdir("d")
        await user.write("later", content(1))
        await user.rename("new.tmp", "new")
        assert await user.drained() == "durable"
    assert all("d/" in state for state in bucket.states if "d/old" in state)
    assert set(bucket.shows()) == {"later", "new"}


async def test_a_marker_that_is_removed_on_its_way_does_not_arrive_without_its_files(
    bucket: Bucket, cache: Path
) -> None:
    """A delete waits for the marker, so that goes up although it is removed. Then a rename frees the delete."""
    async with running_node(bucket, cache, offload=Uplink()) as user:
        for folder in ("run", "run/0", "run/1"):
            await user.mkdir(folder)
        await write_beside(user, {"run/0/shard": b"s", "run/0/.metadata": b"m"})
        assert await user.drained() == "durable"
        bucket.states.clear()
        await write_beside(user, {"run/big": content(0), "run/1/shard": content(1), "run/1/.metadata": b"m"})
        await user.write("run/log.1", b"log")
        await user.unlink("run/0/.metadata")
        await user.write("run/newer", content(2))
        await user.unlink("run/1/.metadata")
        await user.rename("run/log.1", "run/log")
        await user.unlink("run/1/shard")
        assert await user.drained() == "durable"
    assert all("run/1/shard" in state for state in bucket.states if "run/1/.metadata" in state)
    assert set(files_in(bucket.shows())) == {"run/0/shard", "run/big", "run/log", "run/newer"}


async def come_to_step_2(user: User) -> None:
    """Have step 0 in the bucket and removed, and steps 1 and 2, to which `latest` points, on their way."""
    await user.mkdir("run")
    await write_beside(user, {"run/latest": b"0", "run/step-0": content(0)})
    assert await user.drained() == "durable"
    await user.write("run/step-1", content(1))
    await user.unlink("run/step-0")
    await write_beside(user, {"run/step-2": content(2), "run/latest": b"2"})


async def test_a_pointer_that_is_passed_over_is_still_read_by_who_has_it_open(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await come_to_step_2(user)
        reader = user.fs.file_io.open(await user.fs.resolve("run/latest"), writable=False, pid=0)
        await user.write("run/step-3", content(3))
        await point_by_rename(user, 3)
        await user.unlink("run/step-2")
        assert bytes(await user.fs.file_io.read(reader, 0, 10)) == b"2"
        await user.fs.file_io.release(reader)
        assert await user.drained() == "durable"
    assert bucket.shows()["run/latest"] == b"3"


async def test_sync_of_a_pointer_that_is_passed_over_waits_for_the_newer_one(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await come_to_step_2(user)
        shown = []

        async def sync() -> None:
            assert (await user.fs.wait_durable("run/latest", None)).result == "durable"
            shown.append(bucket.shows()["run/latest"])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(sync)
            await trio.sleep(0.1)
            await write_beside(user, {"run/step-3": content(3), "run/latest": b"3"})
            await user.unlink("run/step-2")
        assert shown == [b"3"]


@pytest.mark.parametrize("ends", ["is killed", "drains"])
async def test_a_delete_never_moves_behind_newer_content_of_its_name_that_was_closed_and_not_released_yet(
    bucket: Bucket, tmp_path: Path, ends: str
) -> None:
    async with running_node(bucket, tmp_path / "1", offload=Uplink()) as user:
        await user.write("old", b"old")
        assert await user.drained() == "durable"
        await user.write("big", content(0))
        await user.unlink("old")
        await user.write("later", content(1))
        handle = await user.open("old")
        await user.fs.file_io.write(handle, 0, b"new")
        await user.fs.close_protocol.flush(handle)
        await user.rename("big", "bigger")  # the delete waited for it, and may wait for `later` now
        photograph(tmp_path / "1", tmp_path / "2")
        await user.fs.file_io.release(handle)
        bucket.is_cut_off = is_killed = ends == "is killed"
        if not is_killed:
            assert await user.drained() == "durable"
    if is_killed:
        bucket.come_back()
        async with running_node(bucket, tmp_path / "2", offload=Uplink()) as user:
            assert await user.drained() == "durable"
    assert bucket.shows() == {"old": b"new", "bigger": content(0), "later": content(1)}


async def test_nor_behind_content_that_was_closed_before_a_kill(bucket: Bucket, tmp_path: Path) -> None:
    """The next daemon queues it behind the delete, which it does not supersede then."""
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("old", b"old")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.write("big", content(0))
        await user.unlink("old")
        handle = await user.open("old")
        await user.fs.file_io.write(handle, 0, b"new")
        await user.fs.close_protocol.flush(handle)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    async with running_node(bucket, tmp_path / "2", offload=Uplink()) as user:
        await user.write("later", content(1))
        await user.rename("big", "bigger")
        assert await user.drained() == "durable"
    assert bucket.shows() == {"old": b"new", "bigger": content(0), "later": content(1)}


@pytest.mark.parametrize("before", ["a file", "a directory"])
@pytest.mark.parametrize("how", ["made", "renamed"])
async def test_nor_behind_a_file_or_directory_that_takes_its_name(
    bucket: Bucket, cache: Path, before: str, how: str
) -> None:
    """Other nodes would take the two for a conflict."""
    async with running_node(bucket, cache, offload=Uplink()) as user:
        if before == "a directory":
            await user.mkdir("name")
        await user.write("name" if before == "a file" else "name/x", b"old")
        assert await user.drained() == "durable"
        bucket.states.clear()
        await user.mkdir("new")
        await user.write("new/big", content(0))
        if before == "a file":
            await user.unlink("name")
        else:
            await user.unlink("name/x")
            await user.rmdir("name")
        if how == "renamed":
            await user.rename("new" if before == "a file" else "new/big", "name")
        else:
            await (user.mkdir("name") if before == "a file" else user.write("name", b"new"))
            await user.rename("new/big", "new/bigger")
        assert await user.drained() == "durable"
    for state in bucket.states:
        assert not ("name" in state and any(key.startswith("name/") for key in state)), sorted(state)


class SlowBucket(Uplink):
    """Requests of few bytes take a second, too."""

    async def publish(self, call, *args):  # type: ignore[no-untyped-def,override]
        await trio.sleep(1)
        return await self.network(call, *args)


async def test_an_old_checkpoint_waits_for_a_new_one_that_is_renamed_on_its_way(
    bucket: Bucket, cache: Path
) -> None:
    async with running_node(bucket, cache, offload=SlowBucket()) as user:
        await user.mkdir("run")
        await user.mkdir("run/0")
        await write_beside(user, {"run/0/model": b"0", "run/0/optimizer": b"0"})
        assert await user.drained() == "durable"
        bucket.states.clear()
        await user.mkdir("run/1")
        await write_beside(user, {"run/1/model": b"1", "run/1/optimizer": content(1) * 2})
        await trio.sleep(1.4)
        assert [item.in_flight for item in user.fs.queue.items()] == [True, True, False]
        await user.unlink("run/0/model")
        await user.unlink("run/0/optimizer")
        await user.rename("run/1", "run/final")
        assert await user.drained() == "durable"
    for state in bucket.states:
        assert {"run/0/model", "run/0/optimizer"} <= set(state) or {
            key.rpartition("/")[2] for key in files_in(state) if not key.startswith("run/0/")
        } == {"model", "optimizer"}


async def test_newer_ones_go_up_also_while_the_oldest_stays_on_purpose(bucket: Bucket, cache: Path) -> None:
    async with running_node(bucket, cache, offload=Uplink(), delete_delay=3600.0) as user:
        await user.mkdir("run")
        await save_file(user, 0)
        assert await user.drained() == "durable"
        for step in range(1, 30):
            await save_file(user, step)
            await remove_file(user, step - 1)
            await trio.sleep(EVERY)
        await trio.sleep(200)
        steps = {int(key.rpartition("-")[2]) for key in files_in(bucket.shows())}
        assert {0, 29} <= steps
        newest = [
            max(int(key.rpartition("-")[2]) for key in files_in(state))
            for state in bucket.states
            if files_in(state)
        ]
        assert len(set(newest)) >= 5  # not only the first and the last


@pytest.mark.parametrize("name", ["log.tmp", "log"])
async def test_removals_come_whatever_is_written_and_renamed_beside_them(
    bucket: Bucket, cache: Path, name: str
) -> None:
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.mkdir("run")
        await user.write("run/old", b"old")
        assert await user.drained() == "durable"
        await user.write(f"run/0-{name}", b"log")
        await user.unlink("run/old")
        for number in range(1, 70):  # it follows them 16 times
            await user.write(f"run/{number}-{name}", content(1)[:100])
            await user.rename(f"run/{number - 1}-{name}", f"run/{number - 1}")
            await trio.sleep(1)
        assert "run/old" not in bucket.shows()


async def test_a_rename_frees_no_delete_that_must_stay(bucket: Bucket, cache: Path) -> None:
    """The delete was moved back as often as it may be; then the content that it waits for is renamed."""
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.mkdir("run")
        await save_file(user, 0)
        assert await user.drained() == "durable"
        bucket.states.clear()
        bucket.takes_nothing = True
        await save_file(user, 1)
        await user.write("run/0.log", b"log")
        await remove_file(user, 0)
        for number in range(20):
            await user.rename(f"run/{number}.log", f"run/{number + 1}.log")
        await user.write("run/newest", b"newest")
        await user.rename("run/step-1", "run/best")
        bucket.come_back()
        assert await user.drained() == "durable"
    for state in bucket.states:
        assert content(0) in state.values() or content(1) in state.values()
    assert set(files_in(bucket.shows())) == {"run/20.log", "run/newest", "run/best"}


async def test_content_that_joins_before_a_delete_that_failed_stays_before_it(
    bucket: Bucket, cache: Path
) -> None:
    def refuse(method: str, _key: str) -> None:
        if method == "delete" and is_refusing:
            raise Unavailable("503")

    is_refusing, bucket.on_request = True, refuse
    async with running_node(bucket, cache, offload=Uplink()) as user:
        await user.write("old", content(0))
        assert await user.drained() == "durable"
        bucket.states.clear()
        handle = await user.open("new")
        await user.fs.file_io.write(handle, 0, content(1))
        await user.fs.close_protocol.flush(handle)
        await user.unlink("old")
        await trio.sleep(5)  # its request fails
        await user.fs.file_io.release(handle)
        await user.write("log", b"log")
        await user.rename("new", "best")
        is_refusing = False
        assert await user.drained() == "durable"
    for state in bucket.states:
        assert content(0) in state.values() or content(1) in state.values(), sorted(state)


async def test_renames_move_a_delete_a_limited_number_of_times(bucket: Bucket, cache: Path) -> None:
    """Each time costs as much as all deletes that move, and the mount waits for it."""
    async with running_node(bucket, cache) as user:
        await user.write("old", b"old")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        for number in range(20):
            await user.write(f"{number}.tmp", b"new")
        await user.unlink("old")
        positions = set()
        for number in range(20):
            await user.rename(f"{number}.tmp", f"{number}")
            (delete,) = user.fs.queue.for_key("old")
            positions.add(delete.sequence)
        assert len(positions) == 16
        bucket.come_back()
        assert await user.drained() == "durable"
    assert bucket.shows() == {f"{number}": b"new" for number in range(20)}
