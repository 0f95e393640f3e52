"""What trains on plain files, one task in a process of its own; prints JSON. Used by `benchmarks.cases_files`.

Each task is a torch DataLoader over files on a mount that has nothing cached, and a pause as each step. waited_seconds:
for batches, from the first request on.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from loader import FileHints


class Images(Dataset[int]):
    """An ImageFolder whose samples are the files' sizes: decoding costs the same with hints and without."""

    def __init__(self, root: str) -> None:
        self.samples = sorted(str(path) for path in Path(root).glob("*/*"))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        with open(self.samples[index], "rb") as file:
            return len(file.read())


def images(
    root: str, batch: int, workers: int, step_seconds: float, *, hints: bool, seed: int
) -> dict[str, Any]:
    """Train an epoch on single files in a random order."""
    folder = Images(root)
    order = random.Random(seed).sample(range(len(folder)), len(folder))
    began = time.monotonic()
    sampler: Iterable[int] = FileHints(folder.samples, Sampler(order)) if hints else order
    loader = DataLoader(folder, batch_size=batch, sampler=sampler, num_workers=workers, drop_last=True)
    return _train(loader, began, step_seconds)


class Sampler(Iterable[int]):
    """A sampler with a fixed order, which is known only when it is iterated over."""

    def __init__(self, order: list[int]) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def tars(
    root: str, batch: int, workers: int, step_seconds: float, *, hints: bool, seed: int
) -> dict[str, Any]:
    """Train an epoch on tars of WebDataset, in a shuffled order, each from end to end."""
    import webdataset as wds

    urls = sorted(str(path) for path in Path(root).iterdir())
    random.Random(seed).shuffle(urls)
    stages: list[Any] = [wds.SimpleShardList(urls), wds.split_by_worker]
    if hints:
        stages.append(FileHints(itemgetter("url")).follow)
    began = time.monotonic()
    pipeline: IterableDataset[Any] = wds.DataPipeline(*stages, wds.tarfile_to_samples(), wds.batched(batch))
    return _train(DataLoader(pipeline, batch_size=None, num_workers=workers), began, step_seconds)


def _train(batches: Iterable[Any], began: float, step_seconds: float) -> dict[str, Any]:
    waited, asked, steps = 0.0, began, 0
    for _ in batches:
        waited += time.monotonic() - asked
        steps += 1
        time.sleep(step_seconds)
        asked = time.monotonic()
    waited += time.monotonic() - asked
    return {"waited_seconds": waited, "seconds": time.monotonic() - began, "steps": steps}


TASKS: dict[str, Callable[..., dict[str, Any]]] = {"images": images, "tars": tars}


def main() -> None:
    """Do the one task of the command line. What libraries print goes to standard error."""
    request = json.loads(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr
    answer = TASKS[request.pop("task")](**request)
    answers.write(json.dumps(answer))
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
