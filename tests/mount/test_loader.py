"""The loader on a mount: the daemon knows what comes next from the making of the loader until it is gone."""

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from loader import ElasticBatchSampler, MDSDataset, MDSWriter, World
from loader.fast import Loader
from loader.hints.client import READING_STEPS
from loader.streaming import StreamingDataset
from tests.support.frozen import frozen
from tests.support.mounts import Mount, run_python, wait_until
from tests.support.s3_buckets import Bucket

COUNT = 4096
BATCH = 64
STEPS = COUNT // BATCH
END_SECONDS = 20.0


@pytest.fixture
def numbers(mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path) -> tuple[Mount, Path]:
    """A mount, and a dataset of 64 shards on it."""
    with MDSWriter(tmp_path / "numbers", {"number": "int"}, size_limit=1024) as writer:
        for number in range(COUNT):
            writer.write({"number": number})
    for path in (tmp_path / "numbers").iterdir():
        bucket.put(f"numbers/{path.name}", path.read_bytes())
    one = mount("--read-only")
    return one, one.path / "numbers"


def jobs(one: Mount) -> list[dict[str, Any]]:
    return one.status()["hints"]["jobs"]


def wait_for_step(one: Mount, step: int) -> dict[str, Any]:
    """Return what the daemon knows of its one job, once that is planned an epoch ahead of a step."""

    def shown() -> dict[str, Any] | None:
        found = jobs(one)
        assert len(found) <= 1
        return next((job for job in found if job["step"] == step and job["planned_steps"] >= STEPS), None)

    return wait_until(shown, f"step {step}, and an epoch behind it: {jobs(one)}")


def sampler_of(dataset: MDSDataset) -> ElasticBatchSampler:
    return ElasticBatchSampler(dataset, global_batch_size=BATCH, world=World())


def test_a_loader_tells_what_comes_as_soon_as_it_is_made_and_until_it_is_gone(
    numbers: tuple[Mount, Path],
) -> None:
    one, path = numbers
    dataset = MDSDataset(path)
    loader = Loader(dataset, sampler_of(dataset))
    wait_for_step(one, 0)
    state = {**loader.state_dict(), "epoch": 2, "samples": 40 * BATCH}
    loader.load_state_dict(state)
    wait_for_step(one, 2 * STEPS + 40 - READING_STEPS)
    plain = sampler_of(dataset)
    plain.load_state_dict(state)
    assert [batch["number"].tolist() for batch in loader] == list(plain)
    wait_for_step(one, 3 * STEPS - READING_STEPS)  # the next epoch, which has not begun, is planned
    assert [batch["number"].tolist() for batch in loader] == list(plain)
    wait_for_step(one, 4 * STEPS - READING_STEPS)
    twin = copy.deepcopy(loader)
    assert len(jobs(one)) == 1
    del twin
    assert len(jobs(one)) == 1
    del loader
    wait_until(lambda: jobs(one) == [], "the end of the hints")


def test_each_loader_is_a_job_of_its_own_unless_it_shall_tell_nothing(numbers: tuple[Mount, Path]) -> None:
    one, path = numbers
    dataset = MDSDataset(path)
    first, second = Loader(dataset, sampler_of(dataset)), Loader(dataset, sampler_of(dataset))
    silent = Loader(dataset, sampler_of(dataset), hints=False)
    wait_until(lambda: len(jobs(one)) == 2, "both jobs")
    second.close()
    wait_until(lambda: len(jobs(one)) == 1, "one job")
    assert len(list(silent)) == len(list(second)) == STEPS  # a closed loader reads on, and tells nothing
    assert len(jobs(one)) == 1
    first.close()
    wait_until(lambda: jobs(one) == [], "the end of the hints")


WORKERS = """
import json, os, sys
import loader.hints
from torch.utils.data import DataLoader
from loader import ElasticBatchSampler, Hints, MDSDataset, World
from loader.torch.collate import collate

loader.hints.job._CLOSE_SECONDS = 30.0  # a busy machine may take longer to take back what was said
dataset = MDSDataset(sys.argv[1])
sampler = ElasticBatchSampler(dataset, global_batch_size=64, world=World())
hints = Hints(dataset, sampler)
read = []
for _ in range(3):  # workers are forked while the hints' threads are at work, and end while they are
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, collate_fn=collate)
    read += [batch["number"].tolist() for batch in loader]
    jobs = {name.rpartition(".")[0] for name in os.listdir(sys.argv[1] + "/../.fusecache/hints")}
    assert len(jobs) == 1, jobs
print(json.dumps(read))
"""


def test_workers_are_forked_beside_the_hints_and_the_end_of_the_process_takes_them_back(
    numbers: tuple[Mount, Path],
) -> None:
    one, path = numbers
    done = run_python(WORKERS, path)
    sampler = sampler_of(MDSDataset(path))
    assert json.loads(done.stdout) == [ids for _ in range(3) for ids in sampler]
    assert done.stderr == ""
    assert jobs(one) == []


ENDING = """
import sys
from loader import ElasticBatchSampler, MDSDataset, World
from loader.fast import Loader

dataset = MDSDataset(sys.argv[1])
loader = Loader(dataset, ElasticBatchSampler(dataset, global_batch_size=64, world=World()))
print("made", flush=True)
sys.stdin.readline()
"""


def is_quiet(one: Mount) -> bool:
    before = one.status()
    time.sleep(2)  # for less, a busy disk may be what it waits for
    after = one.status()
    (job,) = after["hints"]["jobs"]
    return before["cache"] == after["cache"] and job["horizon_steps"] == job["planned_steps"]


def test_a_process_ends_though_the_mount_does_not_answer(numbers: tuple[Mount, Path]) -> None:
    one, path = numbers
    with subprocess.Popen(
        [sys.executable, "-c", ENDING, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        wait_for_step(one, 0)
        # Not in the middle of a request, and with no file open there: these the kernel does not let go of.
        wait_until(lambda: is_quiet(one), "what was hinted to be read ahead", seconds=60)
        with frozen(one.pid):
            process.communicate(b"\n", timeout=END_SECONDS)
        assert process.returncode == 0


def test_the_streaming_face_tells_once_a_machine_how_far_its_workers_are(numbers: tuple[Mount, Path]) -> None:
    one, path = numbers
    dataset = StreamingDataset(local=str(path), shuffle=True, batch_size=BATCH)
    wait_for_step(one, 0)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=BATCH, num_workers=2)
    assert sum(1 for _ in loader) == STEPS
    wait_for_step(one, STEPS - READING_STEPS)
    assert sum(1 for _ in loader) == STEPS
    wait_for_step(one, 2 * STEPS - READING_STEPS)
    state = dataset.state_dict(0, from_beginning=True)
    dataset.load_state_dict({**state, "epoch": 5, "sample_in_epoch": 20 * BATCH, "shuffle_seed": 3})
    wait_for_step(one, 5 * STEPS + 20 - READING_STEPS)
    assert sum(1 for _ in loader) == STEPS - 20
    wait_for_step(one, 6 * STEPS - READING_STEPS)
    del loader, dataset
    wait_until(lambda: jobs(one) == [], "the end of the hints")


def test_a_url_is_read_where_a_mount_shows_it(numbers: tuple[Mount, Path]) -> None:
    one, path = numbers
    dataset = StreamingDataset(
        remote=f"{one.bucket.source}/numbers", local="/no/copy", batch_size=1, hints=False
    )
    assert dataset.streams[0].local == str(path)
    assert dataset[COUNT - 1]["number"] == COUNT - 1
