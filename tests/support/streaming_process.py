"""Runs the real StreamingDataset in a process of its own, as it keeps shared memory and lock files.

Each line of stdin is a JSON object {"local", "options", "read", "stop", "locks"}. options may have "streams", the
arguments of each, in place of local. locks is a folder for lock files. Each answer is a line of JSON: the `id` of every
sample by index or by iteration, the other columns' digest, and the state after `stop` samples. If a shard is
missing, read "loaders" tells how an epoch ends, without workers and with two: {"count", "end"} of each.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from typing import Any

from tests.support.real_streaming import import_streaming

PATIENCE_SECONDS = 2


class Waited(BaseException):
    """Nothing came for too long."""


def give_up(*_: object) -> None:
    """The alarm's answer."""
    raise Waited


# To the process's end: to let go of a dataset or loader whose shard is missing may take for ever.
kept: list[object] = []


def epoch(streaming: Any, command: dict[str, Any], workers: int) -> dict[str, Any]:
    """Read an epoch through a DataLoader; say how many samples came, and "end", "hang" or the error's name."""
    size = command["options"]["batch_size"]
    count, end = 0, "end"
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(5 * PATIENCE_SECONDS)  # until the first batch
    try:
        dataset = streaming.StreamingDataset(local=command["local"], **command["options"])
        batches = iter(streaming.StreamingDataLoader(dataset, batch_size=size, num_workers=workers))
        kept.extend((dataset, batches))
        for batch in batches:
            count += len(batch["id"])
            signal.alarm(PATIENCE_SECONDS)
    except (Exception, Waited) as problem:  # noqa: BLE001 -- whatever it is, it is told
        end = "hang" if isinstance(problem, Waited) else type(problem).__name__
    signal.alarm(0)
    return {"count": count, "end": end}


def digest(sample: dict[str, Any]) -> str:
    """A digest of all columns of a sample."""
    parts = [
        f"{name}={getattr(value, 'tolist', lambda v=value: v)()!r}" for name, value in sorted(sample.items())
    ]
    return hashlib.sha256(";".join(parts).encode()).hexdigest()


def answer(streaming: Any, command: dict[str, Any]) -> Any:
    """Read as told."""
    warnings.simplefilter("ignore")
    if command["read"] == "loaders":
        return [epoch(streaming, command, workers) for workers in (0, 2)]
    options = command["options"]
    if "streams" in options:
        options["streams"] = [streaming.Stream(**stream) for stream in options["streams"]]
    else:
        options["local"] = command["local"]
    dataset = streaming.StreamingDataset(**options)
    if command["read"] == "index":
        return {"digests": [digest(dataset[number]) for number in range(dataset.size)]}
    iterator = iter(dataset)
    return {
        "ids": [next(iterator)["id"] for _ in range(command["stop"])],
        "state": dataset.state_dict(command["stop"], from_beginning=True),
        "rest": [sample["id"] for sample in iterator],
    }


def main() -> None:
    """Answer each line in a process of its own, which need not import the library again."""
    streaming = import_streaming()
    for line in sys.stdin:
        if os.fork() == 0:
            command = json.loads(line)
            tempfile.tempdir = command["locks"]
            try:
                text = json.dumps(answer(streaming, command))
            except BaseException:  # noqa: BLE001 -- whatever it is, it is told
                text = json.dumps({"error": traceback.format_exc()})
            print(text, flush=True)  # noqa: T201 -- the answer to the test
            for worker in multiprocessing.active_children():
                worker.kill()
            os._exit(0)
        os.wait()


if __name__ == "__main__":
    main()
