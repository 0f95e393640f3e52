"""What every case works with: origins, sizes, results, a mount for a while, and figures that never end the run."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.origins import Origin, Origins, Site
from benchmarks.peers import Fusecache, Mount, Peer, mounted
from benchmarks.processes import BenchmarkError, TooSlow, drop_pages, run_child
from benchmarks.results import Results, Row

MIB = 2**20
GIB = 2**30
LIMIT_SECONDS = 60.0
Named = TypeVar("Named")
OURS = ("fusecache", "fusecache-loader")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each case reads and writes; the bars are meant for the defaults."""

    sequential_bytes: int = GIB
    stream_bytes: int = GIB // 2
    random_object_bytes: int = 8 * GIB
    random_seconds: float = 6.0
    first_bytes: int = 100
    names: int = 1000
    find_folders: int = 20
    find_files_a_folder: int = 1000
    small_files: int = 200
    small_bytes: int = 100_000
    request_files: int = 512
    endpoint_files: int = 320
    endpoint_file_bytes: int = 8 * MIB
    million: int = 1_000_000
    page_fillings: int = 6
    written_bytes: int = GIB
    written_small_bytes: int = GIB // 4
    saved_bytes: int = 2 * GIB
    checkpoint_bytes: int = 4 * GIB
    undisturbed_seconds: float = 8.0
    written_files: int = 10_000
    # Peers send one file after the other, or a few at once: their rate shows with fewer.
    peer_files: int = 200
    slow_peer_files: int = 40
    token_samples: int = 65_536
    blob_samples: int = 5_000
    # 320 shards of 32 MiB: a block of the shuffle takes from all of them.
    cold_shards: int = 320
    cold_shard_samples: int = 4_090
    cold_steps: int = 100
    # Of a million tokens: what 8 H100 need, at 40 % of their peak, for a model of half a billion weights.
    cold_step_seconds: float = 1.0
    steady_samples: int = 65_536
    steady_shard_bytes: int = 4 * MIB
    steady_epochs: int = 3
    # 256 steps, 40 s an epoch: a real one lasts hours, and what is fetched a second ahead takes no part of its cache.
    steady_step_seconds: float = 0.15
    image_files: int = 4_000
    tar_files: int = 40


QUICK = Sizes(
    sequential_bytes=GIB // 8,
    stream_bytes=GIB // 16,
    random_seconds=1.5,
    first_bytes=20,
    find_files_a_folder=100,
    small_files=50,
    request_files=64,
    endpoint_files=80,
    million=20_000,
    page_fillings=2,
    written_bytes=GIB // 4,
    written_small_bytes=GIB // 16,
    saved_bytes=GIB // 4,
    checkpoint_bytes=GIB // 2,
    undisturbed_seconds=3.0,
    written_files=500,
    peer_files=40,
    slow_peer_files=10,
    token_samples=8_192,
    blob_samples=640,
    cold_shards=16,
    cold_shard_samples=1_000,
    cold_steps=20,
    cold_step_seconds=0.1,
    steady_samples=32_768,
    steady_step_seconds=0.05,
    image_files=800,
    tar_files=12,
)


@dataclass
class Bench:
    """One run. directory: an empty folder on the disk under test; round: from 1; rounds_done: all their cases.

    alone: without competitors.
    """

    origins: Origins
    directory: Path
    sizes: Sizes
    results: Results = field(default_factory=Results)
    round: int = 1
    rounds_done: int = 0
    alone: bool = False

    def turn(self, competitors: Sequence[Named]) -> list[Named]:
        """Return the competitors in this round's order: everybody is first once. Alone: this project's only."""
        if self.alone:
            return [each for each in competitors if getattr(each, "name", each) in OURS]
        first = (self.round - 1) % max(1, len(competitors))
        return [*competitors[first:], *competitors[:first]]

    def record(self, case: str, competitor: str, measure: Callable[[], dict[str, float]]) -> bool:
        """Add what `measure` returns, or how it failed, to the results; return whether it succeeded."""
        try:
            self.results.add(Row(self.round, case, competitor, measure()))
        except TooSlow as exc:
            self.results.add(Row(self.round, case, competitor, error=str(exc), limit_seconds=exc.seconds))
        except (BenchmarkError, OSError) as exc:
            self.results.add(Row(self.round, case, competitor, error=str(exc)))
            note(f"{case}: {competitor}: {exc}")
        else:
            return True
        return False

    def record_failure(self, case: str, competitor: str, failure: BenchmarkError) -> None:
        """Add to the results that a competitor could not even begin."""

        def fail() -> dict[str, float]:
            raise failure

        self.record(case, competitor, fail)

    @contextmanager
    def mount(self, peer: Peer, origin: Origin, bucket: str) -> Iterator[Mount]:
        """Mount a peer with an empty cache, on a machine without old pages. Raises BenchmarkError."""
        with self.origins.answering(origin, bucket) as site, mounted(peer, site, self.directory) as mount:
            drop_pages()
            yield mount

    @contextmanager
    def writable(self, peer: Peer, origin: Origin, bucket: str) -> Iterator[Mount]:
        """Mount a peer on an empty bucket; throw away what it has not uploaded at the end. Raises BenchmarkError."""
        self.origins.add_bucket(origin, bucket)
        self.origins.reset(origin)
        if not isinstance(peer, Fusecache):
            # s3fs sends a last part larger than the others, and writes a key twice at once: R2 refuses both.
            self.origins.control(origin).set_rules(equal_parts=False, write_interval_seconds=0)
        with self.mount(peer, origin, bucket) as mount:
            try:
                yield mount
            finally:
                mount.kill()
        self.origins.reset(origin)

    def drop(self, mount: Mount) -> None:
        """Let caches settle, and drop the kernel's pages: of the mount and of the files of its cache."""
        time.sleep(1.0)
        drop_pages(mount.path, mount.cache)


def read(task: str, *, seconds: float = LIMIT_SECONDS, **request: Any) -> dict[str, Any]:
    """Run one task of `benchmarks.readers`. Raises BenchmarkError."""
    return run_child("benchmarks.readers", {"task": task, **request}, seconds=seconds)


def write(task: str, *, seconds: float = LIMIT_SECONDS, **request: Any) -> dict[str, Any]:
    """Run one task of `benchmarks.writers`. Raises BenchmarkError."""
    return run_child("benchmarks.writers", {"task": task, **request}, seconds=seconds)


def save(task: str, *, seconds: float = LIMIT_SECONDS, **request: Any) -> dict[str, Any]:
    """Run one task of `benchmarks.trainers`. Raises BenchmarkError."""
    return run_child("benchmarks.trainers", {"task": task, **request}, seconds=seconds)


def fetch(task: str, site: Site, *, seconds: float = LIMIT_SECONDS, **request: Any) -> dict[str, Any]:
    """Run one task of `benchmarks.clients`. Raises BenchmarkError."""
    return run_child(
        "benchmarks.clients",
        {"task": task, "site": asdict(site), **request},
        environment=site.environment(),
        seconds=seconds,
    )


def note(text: str) -> None:
    """Say something on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
