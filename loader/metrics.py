"""Numbers of a training loop on a mount, as a plain dict for W&B, TensorBoard, Composer or a log.

    metrics = Metrics("/data")
    for step, batch in enumerate(metrics.batches(loader)):
        train(batch)
        metrics.count(tokens=batch["tokens"].size)
        if step % 1000 == 0:
            with metrics.checkpoint(f"/data/checkpoints/{step}.pt") as path:
                torch.save(model.state_dict(), path)
        if step % 10 == 0:
            wandb.log(metrics.read(), step=step)

The loop never waits for the daemon: a thread asks it.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from loader.base.mount_endpoint import find_endpoint

log = logging.getLogger(__name__)

# The daemon makes its numbers for each reader, some milliseconds of work.
POLL_SECONDS = 5.0
Batch = TypeVar("Batch")


class Metrics:
    """Counts what a loop waits for. directory: any on the mount; on a plain one, the numbers of the mount are absent.

    Each rank has its own. Those of the mount are the same for all ranks of a machine. poll_seconds: their age at most.
    """

    def __init__(self, directory: str | Path, *, poll_seconds: float = POLL_SECONDS) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._counts = {"batches": 0.0, "tokens": 0.0, "wait_seconds": 0.0}
        self._checkpoints: dict[str, float] = {}
        self._hits = self._shown_hits = (-1, -1)  # not known
        self._only_here: int | None = None
        self._poll_seconds, self._stopped = poll_seconds, threading.Event()
        place = find_endpoint(directory)
        if place is not None and not place[0].is_folder:
            stats = place[0].root / ".fusecache" / "stats.json"
            threading.Thread(target=self._poll, args=(stats,), name="fusecache-metrics", daemon=True).start()

    def batches(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield batches, and count them and the seconds that the loop waits for each."""
        source = iter(batches)
        while True:
            began = time.monotonic()
            try:
                batch = next(source)
            except StopIteration:
                return
            self.count(batches=1, wait_seconds=time.monotonic() - began)
            yield batch

    def count(self, *, batches: int = 0, tokens: int = 0, wait_seconds: float = 0.0) -> None:
        """Count what `batches` does not see, for example in the callbacks of a trainer."""
        with self._lock:
            for name, more in (("batches", batches), ("tokens", tokens), ("wait_seconds", wait_seconds)):
                self._counts[name] += more

    @contextlib.contextmanager
    def checkpoint(self, path: str | Path) -> Iterator[str | Path]:
        """Measure how long the body takes, and then how long until the bucket has the file or directory `path`."""
        began = time.monotonic()
        yield path
        ended = time.monotonic()
        with self._lock:
            self._checkpoints["stall_seconds"] = ended - began
            self._checkpoints["pending"] = self._checkpoints.get("pending", 0) + 1
        threading.Thread(
            target=self._watch, args=(path, ended), name="fusecache-durable", daemon=True
        ).start()

    def read(self) -> dict[str, float]:
        """Return the numbers since the last call; those of checkpoints are of the last one.

        `data/wait_seconds`, `data/wait_share` (of the time), `data/batches_per_second`, `data/tokens_per_second`,
        `cache/hit_share` (of the daemon's reads; absent if there were none), `mount/bytes_only_here`,
        `checkpoint/stall_seconds`, `checkpoint/durable_seconds` (from its end until the bucket had it),
        `checkpoint/pending` and `checkpoint/failed` (checkpoints that the bucket lacks still, or was refused).
        """
        with self._lock:
            now = time.monotonic()
            seconds, self._began = max(now - self._began, 1e-9), now
            counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
            found = {
                "data/wait_seconds": counts["wait_seconds"],
                "data/wait_share": counts["wait_seconds"] / seconds,
                "data/batches_per_second": counts["batches"] / seconds,
                "data/tokens_per_second": counts["tokens"] / seconds,
            }
            hits, misses = (new - old for new, old in zip(self._hits, self._shown_hits, strict=True))
            self._shown_hits = self._hits
            if hits + misses > 0:
                found["cache/hit_share"] = hits / (hits + misses)
            if self._only_here is not None:
                found["mount/bytes_only_here"] = self._only_here
            return found | {f"checkpoint/{name}": value for name, value in self._checkpoints.items()}

    def close(self) -> None:
        """Stop asking the daemon."""
        self._stopped.set()

    # ---- threads

    def _poll(self, stats: Path) -> None:
        while True:
            try:
                status: dict[str, Any] = json.loads(stats.read_bytes())
                with self._lock:
                    self._only_here = int(status["exposed_bytes"])
                    self._hits = int(status["cache"]["hits"]), int(status["cache"]["misses"])
                    if self._shown_hits[0] < 0 or self._hits < self._shown_hits:
                        self._shown_hits = self._hits  # the first look, or a daemon that was started again
            except (OSError, ValueError, KeyError, TypeError) as problem:
                log.debug("no numbers of the mount: %s", problem)
            if self._stopped.wait(self._poll_seconds):
                return

    def _watch(self, path: str | Path, ended: float) -> None:
        """Wait until the bucket has a path."""
        failure = ""
        try:
            place = find_endpoint(os.path.dirname(os.path.abspath(path)))
            is_on_mount = place is not None and not place[0].is_folder
            if place is not None and is_on_mount:
                failure = place[0].wait_durable(place[1] + os.path.basename(path))
        except (OSError, ValueError) as problem:
            is_on_mount, failure = True, str(problem)
        with self._lock:
            self._checkpoints["pending"] -= 1
            if failure:
                self._checkpoints["failed"] = self._checkpoints.get("failed", 0) + 1
            elif is_on_mount:
                self._checkpoints["durable_seconds"] = time.monotonic() - ended
        if failure:
            log.warning("the bucket may lack the checkpoint %s: %s", path, failure)
