"""What a run says of its future on a mount: messages that fit whatever the dataset, and names of its own."""

import errno
import json
import os
import socket
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from fusecache.model.hints import PLAN, Plan, decode_plan
from loader import ElasticBatchSampler, World
from loader.base.mount_endpoint import MountEndpoint
from loader.errors import ArgumentError
from loader.hints import Hints
from loader.hints import client as module
from loader.hints.job import hold_name, release_name
from loader.mds.index import Index
from loader.mds.index_parser import PackedNames, Schema
from loader.world import Machine
from tests.support import ROOT

# In one message they would be 23 MB, as 300 000 of shorter names.
MANY_SHARDS = 24_000
FOLDER = "/".join(["x" * 230] * 4)
DEADLINE_SECONDS = 60.0


@dataclass
class Facts:
    """A dataset, as far as orders and hints need it."""

    index: Index
    fingerprint: str = "0123456789abcdef"
    shard_sizes: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.shard_sizes = self.index.samples


def facts(directory: Path, names: list[str]) -> Facts:
    """A sample a shard, 8 bytes each."""
    none = np.zeros(len(names), np.int32)
    return Facts(
        Index(
            directories=(str(directory),),
            borders=(0, len(names)),
            samples=np.ones(len(names), np.int64),
            raw_bytes=np.full(len(names), 20, np.int64),
            zip_bytes=np.zeros(len(names), np.int64),
            schema_of=none,
            compression_of=none,
            schemas=(Schema(("number",), ("int",), (8,)),),
            compressions=("",),
            raw_names=PackedNames(names),
            zip_names=PackedNames([""] * len(names)),
        )
    )


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan | None]:
    """What goes through the door of a mount, in place of a daemon: plans, and None where all is taken back."""
    found: list[Plan | None] = []

    class Recorder(MountEndpoint):
        def send(self, file: str, message: bytes) -> None:
            if file.endswith(PLAN):
                found.append(decode_plan(message) if message else None)

    endpoint = Recorder(tmp_path)
    monkeypatch.setattr(module, "find_endpoint", lambda directory: (endpoint, f"{Path(directory).name}/"))
    return found


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def last_step(said: list[Plan | None]) -> int:
    return max((plan.first[-1] + plan.span[-1] for plan in said if plan and len(plan)), default=-1)


def test_windows_of_very_many_shards_are_as_short_as_a_message_can_be(
    tmp_path: Path, said: list[Plan | None]
) -> None:
    names = [f"{FOLDER}/{number:05}.mds" for number in range(MANY_SHARDS)]
    dataset = facts(tmp_path / "data", names)
    sampler = ElasticBatchSampler(dataset, global_batch_size=50, order="naive", world=World())
    steps = len(sampler)
    with Hints(dataset, sampler, job="run"):
        wait_until(lambda: last_step(said) >= steps - 1 or None in said, "an epoch's plan")
        assert None not in said
        windows = [plan for plan in said if plan is not None and not plan.is_exact and plan.first[0] < steps]
        named = {path for plan in said if plan is not None for path in plan.paths}
    assert len(windows) > 1
    assert {path.removeprefix("data/") for path in named} == set(names)
    # Nobody waits for that for long: it may come when the block has ended.
    wait_until(lambda: said[-1] is None, "that all is taken back at the end")


def test_of_a_step_that_is_too_long_for_a_message_the_beginning_is_named(
    tmp_path: Path, said: list[Plan | None]
) -> None:
    names = [f"{FOLDER}/{number:05}.mds" for number in range(MANY_SHARDS)]
    dataset = facts(tmp_path / "data", names)
    sampler = ElasticBatchSampler(dataset, global_batch_size=MANY_SHARDS, order="sequential", world=World())
    with Hints(dataset, sampler, job="run"):
        wait_until(lambda: len(said) > 2 or None in said, "the exact bytes, and an epoch")
        exact, whole, *_ = said
    assert exact is not None
    assert whole is not None
    assert exact.is_exact
    assert len(exact) > MANY_SHARDS // 2
    # What was not named by its bytes is named as a whole.
    assert set(exact.paths).isdisjoint(whole.paths)
    assert {*exact.paths, *whole.paths} == {f"data/{name}" for name in names}


@pytest.mark.parametrize(
    "place", [None, Machine(1, 0, [1]), Machine(1, 0, [0, 1]), Machine(1, 1, [1])], ids=str
)
def test_local_rank_0_of_a_machine_says_what_the_machine_reads_whichever_data_parallel_rank_it_is(
    tmp_path: Path, said: list[Plan | None], place: Machine | None
) -> None:
    names = [f"{number:05}.mds" for number in range(100)]
    dataset = facts(tmp_path / "data", names)
    worlds = [World(rank, 2, 2, place=place) for rank in (0, 1)]
    samplers = [
        ElasticBatchSampler(dataset, global_batch_size=10, canonical_nodes=2, world=world) for world in worlds
    ]
    with Hints(dataset, samplers[1], job="run") as hints:
        # Of the ranks of one machine, that is rank 0.
        assert hints.is_sending == (place is not None and place.local_rank == 0)
        if not hints.is_sending:
            return
        wait_until(lambda: last_step(said) >= 9 or None in said, "an epoch's plan")
        windows = [plan for plan in said if plan is not None]
    assert place is not None
    read = {number for rank in place.dp_ranks for batch in samplers[rank] for number in batch}
    named = {
        plan.paths[path]
        for plan in windows
        for path, first in zip(plan.path, plan.first, strict=True)
        if first < 10
    }
    assert named == {f"data/{names[number]}" for number in read}


def test_names_are_said_as_the_daemon_knows_them_and_those_it_cannot_know_are_left_out(
    tmp_path: Path, said: list[Plan | None]
) -> None:
    spellings = [unicodedata.normalize(form, "café.mds") for form in ("NFC", "NFD")]
    names = ["./a.mds", "b//c.mds", *spellings, "d.mds", "e\0f"]
    dataset = facts(tmp_path / "data", names)
    sampler = ElasticBatchSampler(dataset, global_batch_size=2, canonical_nodes=1, world=World())
    with Hints(dataset, sampler, job="run"):
        wait_until(lambda: last_step(said) >= len(sampler) or None in said, "the next epoch's plan")
        assert None not in said
    named = {path for plan in said if plan is not None for path in plan.paths}
    assert named == {
        "data/a.mds",
        "data/b/c.mds",
        *(f"data/{name}" for name in spellings),
        "data/d.mds",
    }


def test_a_plan_that_is_refused_takes_none_back_that_was_taken(
    tmp_path: Path, said: list[Plan | None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "loader")
    refused = OSError(errno.EINVAL, "refused")

    class Narrow(MountEndpoint):
        def send(self, file: str, message: bytes) -> None:
            plan = decode_plan(message) if message and file.endswith(PLAN) else None
            if plan is not None and not plan.is_exact:
                raise refused
            if file.endswith(PLAN):
                said.append(plan)

    monkeypatch.setattr(module, "find_endpoint", lambda _: (Narrow(tmp_path), "data/"))
    dataset = facts(tmp_path / "data", ["a.mds", "b.mds"])
    sampler = ElasticBatchSampler(dataset, global_batch_size=1, canonical_nodes=1, world=World())
    with Hints(dataset, sampler, job="run") as hints:
        wait_until(lambda: "takes no hints" in caplog.text, "the log line")
        time.sleep(2 * module.CURSOR_SECONDS)
        assert [plan is not None and plan.is_exact for plan in said] == [True]
        assert hints.is_sending


# Names


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment of every process of one allocation, which is no other test's: names are the whole machine's."""
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_RANK", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", uuid4().hex)
    return monkeypatch


HOLD = """
import json, sys
from loader.hints.job import hold_name
print(json.dumps(hold_name(*json.loads(sys.argv[1]))), flush=True)
sys.stdin.readline()
"""


def test_runs_of_one_allocation_that_differ_have_names_that_differ(slurm: pytest.MonkeyPatch) -> None:
    held = []

    def stem(fingerprint: str = "0123456789abcdef", node: int = 0, about: str = "data, seed 1") -> str:
        held.append(hold_name(fingerprint, node, about))
        return held[-1].rpartition(".")[0]

    try:
        stems = [stem(), stem(about="data, seed 2"), stem(about="copy, seed 1"), stem("1123"), stem(node=1)]
        slurm.setenv("CUDA_VISIBLE_DEVICES", "1")
        stems.append(stem())
        slurm.setenv("LOCAL_RANK", "1")
        stems.append(stem())
        slurm.setenv("TORCHELASTIC_RUN_ID", "none")  # torchrun's, where nobody chose one
        assert stem() == stems[-1]
        slurm.setenv("TORCHELASTIC_RUN_ID", "x" * 80)
        stems.append(stem())
        slurm.setenv("TORCHELASTIC_RUN_ID", "x" * 81)
        stems.append(stem())
        assert len(set(stems)) == len(stems)
        assert all(len(name) <= 100 for name in held)
    finally:
        for name in held:
            release_name(name)


@pytest.mark.parametrize("name", ["", "../../evil", "my run", "a/b", ".a", "a" * 96])
def test_a_name_that_a_daemon_would_refuse_is_refused(tmp_path: Path, name: str) -> None:
    """It is a part of a path on the mount: `../../evil` would make an object in the bucket."""
    dataset = facts(tmp_path / "data", ["a.mds", "b.mds"])
    sampler = ElasticBatchSampler(dataset, global_batch_size=2, canonical_nodes=1, world=World())
    with pytest.raises(ArgumentError, match=r"job is .*: use 1 to 95 letters"):
        Hints(dataset, sampler, job=name)


def test_a_name_is_one_live_process_alone_and_that_of_a_run_that_is_started_again(
    slurm: pytest.MonkeyPatch,
) -> None:
    about = ("0123456789abcdef", 0, "data, seed 1")
    command = [sys.executable, "-c", HOLD, json.dumps(about)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        first = json.loads(other.stdout.readline())
        second, third = hold_name(*about), hold_name(*about)
        assert [name.rpartition(".")[2] for name in (first, second, third)] == ["1", "2", "3"]
        assert len({name.rpartition(".")[0] for name in (first, second, third)}) == 1
        other.kill()
    # A worker that was forked meanwhile, and outlives its run, holds no name.
    ours, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        its.send(b"1")
        its.recv(1)
        os._exit(0)
    its.close()
    again: tuple[str, ...] = ()
    try:
        ours.recv(1)
        release_name(second)
        release_name(third)
        again = hold_name(*about), hold_name(*about)
        assert again == (first, second)
    finally:
        ours.close()
        os.waitpid(child, 0)
        for name in again:
            release_name(name)
