"""The same node killed at each request that it would send: what the bucket shows then is what other nodes find.

A trainer runs on a mount that publishes nothing yet (`SLEEPY`), its daemon is killed, and the cache directory is kept.
From a copy of that, and the bucket as it was then, a daemon is started once for each request that changes the bucket:
the request is held, everything that need not wait for it goes on, and the daemon is killed. The held request may have
taken effect or not; both are looked at.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fusecache.model.objects import symlink_target
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, run, wait_until
from tests.support.s3_buckets import WRITES, Bucket

# Closed files settle so long that nothing is published while a trainer runs.
SLEEPY = ("--settle-seconds", "3600")
# Of one test; a run that would never end is one.
MOST_REQUESTS = 200


@dataclass(frozen=True)
class Stored:
    """An object's content."""

    data: bytes
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class Frozen:
    """A node that was killed with its changes in the journal, and what the bucket showed then."""

    cache: Path
    shown: Mapping[str, Stored]


@dataclass(frozen=True)
class Found:
    """What the bucket shows after a kill. request: the operation and name that the kill met; links: name -> target."""

    request: tuple[str, str]
    files: Mapping[str, bytes]
    links: Mapping[str, str]

    def below(self, folder: str) -> dict[str, bytes]:
        """Return name -> bytes of the files below a folder; markers of directories are left out."""
        start = folder.rstrip("/") + "/"
        return {
            name.removeprefix(start): data
            for name, data in self.files.items()
            if name.startswith(start) and not name.endswith("/")
        }


class Kills:
    """Freezes nodes and kills them. frozen: how many; count: how many kills there were since."""

    def __init__(self, bucket: Bucket, mount: Callable[..., Mount], directory: Path) -> None:
        self._bucket = bucket
        self._mount = mount
        self._directory = directory
        self.frozen = 0
        self.count = 0

    def freeze(self, node: Mount) -> Frozen:
        """Kill a node; return what is left of it."""
        node.kill()
        self.frozen += 1
        cache = self._directory / f"frozen-{self.frozen}"
        _copy(node.cache, cache)
        return Frozen(cache, _content(self._bucket))

    def at_every_request(self, frozen: Frozen, folder: str, *, methods: str = "[PD]*") -> Iterator[Found]:
        """Yield what the bucket shows at each kill; it goes on showing it until the next one is asked for.

        folder, methods: requests for keys below it are those at which the node is killed; PUT, POST and DELETE.
        """
        for nth in range(1, MOST_REQUESTS):
            _restore(self._bucket, frozen.shown)
            request = self._kill_at(frozen, nth, folder, methods)
            if request is None:
                return
            self.count += 1
            before = _content(self._bucket)
            yield _found(request, before)
            # The node is dead, but its request is on the way and may still arrive.
            self._let_go()
            after = _content(self._bucket)
            if after != before:
                yield _found(request, after)
        raise AssertionError(f"more than {MOST_REQUESTS} requests")

    def _kill_at(self, frozen: Frozen, nth: int, folder: str, methods: str) -> tuple[str, str] | None:
        """Start the node, kill it at its nth request; return that, or None if all was published before."""
        bucket, control = self._bucket, self._bucket.control
        cache = self._directory / "copy"
        shutil.rmtree(cache, ignore_errors=True)
        _copy(frozen.cache, cache)
        control.clear_log()
        control.faults(Fault(FaultAction.HOLD, method=methods, key=f"{bucket.prefix}{folder}/*", nth=nth))
        node = self._mount(cache=cache)

        def held() -> list[tuple[str, str]]:
            return [
                (entry.operation, entry.key.removeprefix(bucket.prefix))
                for entry in bucket.requests(*WRITES)
                if entry.fault == FaultAction.HOLD.value
            ]

        wait_until(lambda: held() or node.status()["pending_files"] == 0, f"request {nth}, or the end")
        if not held():
            node.unmount()
            control.clear_faults()
            return None
        # A plain file elsewhere waits for nothing; when it is there, whatever else did not wait is there too.
        (node.path / f"elsewhere-{nth}").write_bytes(b"")
        wait_until(lambda: f"elsewhere-{nth}" in bucket.names(), "a file elsewhere, which does not wait")
        node.kill()
        return held()[0]

    def _let_go(self) -> None:
        self._bucket.control.clear_faults()
        wait_until(
            lambda: all(entry.finished for entry in self._bucket.requests(*WRITES)), "the end of the requests"
        )


def _copy(source: Path, target: Path) -> None:
    """Copy a cache directory as it is: with its holes, its socket, its times."""
    run("cp", "--archive", "--sparse=always", source, target)


def _content(bucket: Bucket) -> dict[str, Stored]:
    """Return everything below the prefix, but what `_kill_at` wrote."""
    control = bucket.control
    return {
        key.removeprefix(bucket.prefix): Stored(control.read(key), view.metadata)
        for key, view in control.objects().items()
        if key.startswith(bucket.prefix) and "/elsewhere-" not in key
    }


def _found(request: tuple[str, str], content: Mapping[str, Stored]) -> Found:
    links = {name: target for name, each in content.items() if (target := symlink_target(each.metadata))}
    return Found(request, {name: content[name].data for name in content if name not in links}, links)


def _restore(bucket: Bucket, shown: Mapping[str, Stored]) -> None:
    """Let the bucket show what it showed, under the same ETags."""
    control = bucket.control
    for key in control.objects():
        if key.startswith(bucket.prefix):
            control.delete(key)
    for name, each in shown.items():
        control.put(bucket.prefix + name, each.data, dict(each.metadata))
