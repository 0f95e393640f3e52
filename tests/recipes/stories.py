"""The story that each recipe's test tells: a node dies in the middle, another one goes on, nothing is different."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fusecache.model.objects import symlink_target
from tests.recipes.runs import LOSS, Run, run_to_the_end
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, tree_of, wait_until
from tests.support.s3_buckets import WRITES, Bucket

WAIT_SECONDS = 900.0
# Name -> bytes, or the target of a link. Empty directories, which trainers make and remove, are left out.
Tree = dict[str, bytes | str]


@dataclass(frozen=True)
class Reference:
    """What a run without a break leaves on a local disk. losses: step -> loss; names: of its checkpoints' files."""

    losses: dict[int, str]
    names: list[str]


@dataclass(frozen=True)
class Resumed:
    """What the other node did. first: its first step; losses: step -> loss; objects: the checkpoints in the bucket."""

    first: int
    losses: dict[int, str]
    objects: Tree


class Story:
    """One trainer's words, `words(root)`, with all that it reads and writes below `root`; checkpoints in `folder`."""

    def __init__(
        self,
        words: Callable[[Path], Sequence[str | Path]],
        directory: Path,
        folder: str,
        line: re.Pattern[str] = LOSS,
    ) -> None:
        """line: what the trainer prints of each step."""
        self._words = words
        self._line = line
        self._directory = directory
        self._folder = folder

    def on_a_local_disk(self, root: Path) -> Reference:
        """Train to the end below a local directory, which holds the data already."""
        losses = run_to_the_end(self._words(root), self._directory / "local", self._line)
        return Reference(losses, sorted(files_below(root / self._folder)))

    def die(
        self,
        node: Mount,
        *,
        last: int,
        held: Sequence[Fault],
        when: Callable[[], bool],
        pause: Fault,
        first: Callable[[], bool],
    ) -> dict[int, str]:
        """Train until the bucket holds all of `held`; kill trainer and daemon then; return step -> loss so far.

        last: the last step, as the data of the next one is among `held`, the requests that never end. when: what
        must be true, too. pause: a request for data that waits until `first` is true: else the second checkpoint
        could replace the pointer to the first one before the bucket has that.
        """
        control, bucket = node.bucket.control, node.bucket
        paused, *_ = control.faults(pause, *held)

        def met(run: Run) -> bool:
            keys = {each.key for each in bucket.requests() if each.fault == FaultAction.HOLD.value}
            # The daemon may ask for data before the trainer does.
            return last in run.losses(self._line) and keys >= {each.key for each in held} and when()

        with Run(self._words(node.path), self._directory / "dies") as run:
            wait_until(lambda: run.ended() or first(), "the first checkpoint in the bucket", WAIT_SECONDS)
            control.clear_faults(paused)
            wait_until(lambda: run.ended() or met(run), "the requests that are held", WAIT_SECONDS)
            assert not run.ended(), run.log()
            losses = run.losses(self._line)
            node.kill()
        control.clear_faults()
        # The node is dead, but what it sent may still take effect.
        wait_until(lambda: all(each.finished for each in bucket.requests(*WRITES)), "the end of the requests")
        return losses

    def resume(self, node: Mount) -> Resumed:
        """Train to the end on another node; compare its files with the bucket's objects."""
        losses = run_to_the_end(self._words(node.path), self._directory / "resumes", self._line)
        node.sync()
        objects = objects_below(node.bucket, self._folder)
        assert objects == files_below(node.path / self._folder)
        return Resumed(min(losses), losses, objects)


def hold(bucket: Bucket, operation: str, name: str) -> Fault:
    """Return the fault that lets a request wait for ever. name: may be a glob."""
    return Fault(FaultAction.HOLD, operation=operation, key=bucket.prefix + name)


def objects_below(bucket: Bucket, folder: str) -> Tree:
    """Return name -> bytes, or the target of a link, of the objects below a folder; no markers of directories."""
    control, start = bucket.control, f"{bucket.prefix}{folder}/"
    found: Tree = {}
    for key, view in control.objects().items():
        if key.startswith(start) and not key.endswith("/"):
            with suppress(KeyError):  # it was removed a moment ago
                found[key.removeprefix(start)] = symlink_target(view.metadata) or control.read(key)
    return found


def upload(bucket: Bucket, root: Path, folder: str) -> None:
    """Put a local folder into the bucket, as another program would."""
    for name, data in files_below(root / folder).items():
        assert isinstance(data, bytes)
        bucket.put(f"{folder}/{name}", data)


def files_below(folder: Path) -> Tree:
    """Return the same of a local folder."""
    return {name: data for name, data in tree_of(folder).items() if data is not None}
