"""`fusecache pull --follow`: a loader starts before its data is there, and says what comes next."""

import hashlib
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from fusecache.folder.fetch_order import FetchOrder
from fusecache.folder.follow import followed
from fusecache.folder.local_folder import LocalFolder
from fusecache.folder.pull import WORKERS, Patience, Pull, list_bucket
from fusecache.model.hints import HintError, encode_cursor, encode_plan
from fusecache.model.objects import ObjectId
from loader import ElasticBatchSampler, MDSDataset, MDSWriter, World
from loader.base.pulled_files import open_pulled
from tests.folder.conftest import Node, files_of
from tests.s3server import Fault, FaultAction
from tests.support.memory_store import MemoryStore
from tests.support.mounts import wait_until

SHARDS = 64

READ = """
import hashlib, json, sys, time
from loader import ElasticBatchSampler, Hints, MDSDataset, World

dataset = MDSDataset(sys.argv[1])
sampler = ElasticBatchSampler(dataset, global_batch_size=8, seed=3, world=World())
hints = Hints(dataset, sampler)
while hints.is_sending and hints._planned_to < len(sampler):
    time.sleep(0.01)
print("planned", flush=True)
sys.stdin.readline()
order, content = [], hashlib.sha256()
for batch in sampler:
    for sample in batch:
        row = dataset[sample]
        order.append(row["number"])
        content.update(row["data"])
hints.close()
print(json.dumps([order, content.hexdigest()]))
"""


def make_dataset(node: Node, tmp_path: Path) -> MDSDataset:
    """Make a dataset of many shards, in the bucket below `data/`, and beside it."""
    local = tmp_path / "local"
    with MDSWriter(local, {"number": "int", "data": "bytes"}, size_limit=4096) as writer:
        for number in range(SHARDS * 6):
            writer.write({"number": number, "data": hashlib.sha256(b"%d" % number).digest() * 17})
    for path in local.iterdir():
        node.server.control.put(f"data/{path.name}", path.read_bytes())
    dataset = MDSDataset(local)
    assert dataset.index.samples.size > 2 * WORKERS
    return dataset


def read_here(dataset: MDSDataset) -> tuple[list[int], str, dict[str, int]]:
    """Return what the program reads, and the step that first needs each shard."""
    sampler = ElasticBatchSampler(dataset, global_batch_size=8, seed=3, world=World())
    samples = [sample for batch in sampler for sample in batch]
    content = hashlib.sha256()
    for sample in samples:
        content.update(dataset[sample]["data"])
    ends = np.cumsum(dataset.index.samples)
    first: dict[str, int] = {}
    for place, sample in enumerate(samples):
        shard = int(np.searchsorted(ends, sample, side="right"))
        first.setdefault(f"data/{dataset.index.raw_names[shard]}", place // 8)
    return [dataset[sample]["number"] for sample in samples], content.hexdigest(), first


def test_a_loader_reads_before_the_data_is_there(node: Node, tmp_path: Path) -> None:
    dataset = make_dataset(node, tmp_path)
    numbers, content, _ = read_here(dataset)
    control = node.server.control
    control.faults(
        *(
            Fault(FaultAction.HOLD, operation="GetObject", key="data/shard*", nth=number)
            for number in range(1, WORKERS + 1)
        )
    )
    folder = tmp_path / "folder"
    begun = node.run("pull", "--follow", node.source, folder)
    assert begun.returncode == 0, begun.stderr
    control.wait_requests(WORKERS, "GetObject", finished=False)
    trainer = node.start_program(sys.executable, "-c", READ, folder / "data")
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "planned\n"  # it has the index, which no worker was free for
    control.clear_faults()
    out, err = trainer.communicate(timeout=120)
    assert (trainer.returncode, json.loads(out)) == (0, [numbers, content]), err
    wait_until(lambda: not (folder / ".fusecache" / "socket").exists(), "the end of the pull")
    assert files_of(folder / "data") == files_of(tmp_path / "local")


class GatedStore(MemoryStore):
    """Gives no shard before its gate is opened."""

    gate = threading.Event()

    def get_into(self, object_id: ObjectId, *rest: Any) -> None:
        """Wait for the gate, unless it is the index."""
        if "shard" in object_id.key:
            assert self.gate.wait(60)
        super().get_into(object_id, *rest)


async def test_what_a_pull_fetches_after_the_hints_of_a_loader_comes_in_the_order_of_its_steps(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset(node, tmp_path)
    needed = read_here(dataset)[2]
    store, begun, take_next = GatedStore(), [], FetchOrder.next
    for path in (tmp_path / "local").iterdir():
        store.put_bytes(f"data/{path.name}", path.read_bytes())

    def recorded(order: FetchOrder) -> str | None:
        name = take_next(order)
        begun.append(name)
        return name

    monkeypatch.setattr(FetchOrder, "next", recorded)
    with LocalFolder(tmp_path / "folder", "memory", "pull", create=True) as folder:
        pull = Pull(
            folder, store, list_bucket(store, "", Patience(300)), Patience(300), order_last=("index.json",)
        )
        async with followed(pull, folder.own), trio.open_nursery() as nursery:
            nursery.start_soon(pull.run, lambda _: None)
            trainer = node.start_program(
                sys.executable, "-c", READ, folder.root / "data", stdin=subprocess.PIPE
            )
            assert trainer.stdout is not None
            assert trainer.stdin is not None
            assert await trio.to_thread.run_sync(trainer.stdout.readline) == "planned\n"
            before = [name for name in begun if name in needed]
            trainer.stdin.write("\n")  # now it reads, and so asks for shards itself
            trainer.stdin.flush()
            store.gate.set()
    _, err = trainer.communicate(timeout=60)
    assert (trainer.returncode, err) == (0, "")
    steps = [needed[name] for name in begun if name in needed and name not in before]
    assert len(before) == WORKERS
    assert steps[-1] >= 10
    assert steps == sorted(steps)


def test_a_file_that_never_comes_is_an_error_with_its_reason_and_a_killed_pull_is_no_wait(
    node: Node, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    control = node.server.control
    for name in ("held", "refused"):
        control.put(name, b"data")
    control.faults(
        Fault(FaultAction.HOLD, operation="GetObject", key="held"),
        Fault(FaultAction.ANSWER, operation="GetObject", key="refused", status=403, code="AccessDenied"),
    )
    folder = tmp_path / "folder"
    puller = node.start("pull", "--follow", "--foreground", node.source, folder)
    wait_until((folder / ".fusecache" / "socket").is_socket, "the socket")
    with pytest.raises(OSError, match=r"cannot fetch it: .*refused"):
        open_pulled(str(folder / "refused"), 0)
    with pytest.raises(OSError, match="the bucket had no such object when the pull began"):
        open_pulled(str(folder / "unknown"), 0)
    puller.send_signal(signal.SIGKILL)
    puller.wait()
    with pytest.raises(FileNotFoundError):
        open_pulled(str(folder / "held"), 0)
    assert "run `fusecache pull` again" in caplog.text


def plan(paths: list[str], *, first: list[int], window: int = 1, step: int = 0) -> bytes:
    names = sorted(paths)
    return encode_plan(
        window=window,
        step=step,
        paths=names,
        path=[names.index(path) for path in paths],
        start=[0] * len(paths),
        length=[1] * len(paths),
        first=first,
        span=[0] * len(paths),
    )


def rest(order: FetchOrder) -> list[str]:
    return list(iter(order.next, None))


def test_readers_come_before_hints_and_hints_before_the_rest() -> None:
    order = FetchOrder(["a", "b", "c", "d", "e"], late=["index"])
    order.take("job.plan", plan(["d", "c", "a"], first=[5, 6, 9]))
    order.ask("e")
    order.ask("index")
    order.ask("unknown")
    assert rest(order) == ["e", "index", "d", "c", "a", "b"]


def test_late_objects_wait_for_their_release_unless_a_hint_names_them() -> None:
    order = FetchOrder(["a"], late=["x/done", "done"])
    assert rest(order) == ["a"]
    assert order.release_late() == ["x/done", "done"]
    assert rest(order) == ["x/done", "done"]
    order = FetchOrder(["a"], late=["index"])
    order.take("job.plan", plan(["index"], first=[0]))
    assert rest(order) == ["index", "a"]


def test_a_newer_window_replaces_the_later_ones_and_the_nearest_step_of_all_jobs_counts() -> None:
    order = FetchOrder(["a", "b", "c", "d"])
    order.take("job.plan", plan(["a"], first=[1], window=1))
    order.take("job.plan", plan(["b"], first=[2], window=2))
    order.take("job.plan", plan(["c"], first=[8], window=1))  # windows 1 and 2 are gone
    order.take("other.plan", plan(["d"], first=[103], step=100))
    assert rest(order) == ["d", "c", "a", "b"]


def test_hints_that_are_wrong_are_refused_and_change_nothing() -> None:
    order = FetchOrder(["a", "b"])
    for file, message in (
        ("job.cursor", encode_cursor(3)),
        ("../job.plan", plan(["b"], first=[0])),
        ("job.other", b"x"),
        ("job.plan", b"x"),
    ):
        with pytest.raises(HintError):
            order.take(file, message)
    order.take("job.plan", plan(["b"], first=[0]))
    order.take("job.cursor", encode_cursor(1))
    order.take("job.plan", b"")
    assert rest(order) == ["a", "b"]


def test_a_sign_of_life_leaves_the_step_as_it_is() -> None:
    order = FetchOrder(["a", "b"])
    order.take("job.plan", plan(["a"], first=[5]))
    order.take("job.cursor", encode_cursor(9, by_reads=True))
    order.take("other.plan", plan(["b"], first=[3]))
    assert rest(order) == ["b", "a"]
