"""What every case works with: origins, sizes, results, a mount for a while, and figures that never end the run."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.origins import Origin, Origins, Site
from benchmarks.peers import Mount, Peer, mounted
from benchmarks.processes import BenchmarkError, TooSlow, drop_pages, run_child
from benchmarks.results import Results, Row

MIB = 2**20
GIB = 2**30
LIMIT_SECONDS = 60.0
Named = TypeVar("Named")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much each case reads; the bars are meant for the defaults."""

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
    million: int = 1_000_000
    page_fillings: int = 6


QUICK = Sizes(
    sequential_bytes=GIB // 8,
    stream_bytes=GIB // 16,
    random_seconds=1.5,
    first_bytes=20,
    find_files_a_folder=100,
    small_files=50,
    million=20_000,
    page_fillings=2,
)


@dataclass
class Bench:
    """One run. directory: an empty folder on the disk under test; round: from 1."""

    origins: Origins
    directory: Path
    sizes: Sizes
    results: Results = field(default_factory=Results)
    round: int = 1

    def turn(self, competitors: Sequence[Named]) -> list[Named]:
        """Return the competitors in this round's order: everybody is first once."""
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

    def drop(self, mount: Mount) -> None:
        """Let caches settle, and drop the kernel's pages: of the mount and of the files of its cache."""
        time.sleep(1.0)
        drop_pages(mount.path, mount.cache)


def read(task: str, *, seconds: float = LIMIT_SECONDS, **request: Any) -> dict[str, Any]:
    """Run one task of `benchmarks.readers`. Raises BenchmarkError."""
    return run_child("benchmarks.readers", {"task": task, **request}, seconds=seconds)


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
