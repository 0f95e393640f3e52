"""What trainers and tools did to files, carried out on a local directory, on the engine and on a mount."""

import hashlib
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import trio

from fusecache.model.objects import symlink_target
from fusecache.remote.protocol.headers import decode_metadata
from tests.support.mounts import Mount, tree_of
from tests.support.s3_buckets import Bucket
from tests.traces.lives import PACES, Pace, run
from tests.traces.oracle import Broken, Oracle, Past, learn
from tests.traces.replay import Directory, replay
from tests.traces.trace import RECORDED, Call, Mark, load, recorded

NAMES = recorded()
# Traces that save checkpoints or data sets. Of the others, the oracle judges the end, and what each object holds.
WITH_CHECKPOINTS = [name for name in NAMES if load(name).marks]
# FUSECACHE_TEST_TRACES=all ends the node at every moment, `make traces-all`; else at one or two of each run.
IS_ALL = os.environ.get("FUSECACHE_TEST_TRACES") == "all"
# Without checkpoints there is nothing after which a pause could be.
RUNS = [(name, pace) for name in NAMES for pace in PACES if pace != "long steps" or name in WITH_CHECKPOINTS]
# On a mount: enough for uploads to begin, with the suite's settle time of 0.2 s.
MARK_SECONDS = 0.4
KILLED = ("lightning-link", "rsync-in-place", "transformers")


@cache
def past_of(name: str) -> Past:
    """Return what a trace promises."""
    return learn(load(name))


def promised(past: Past) -> dict[str, int | str | None]:
    """Return the tree at the end as a trace's last line has it."""
    last = past.moments[-1]
    files = {
        path: data.decode() if data.startswith(b"-> ") else len(data) for path, data in last.files.items()
    }
    return {**dict.fromkeys(last.folders), **files}


def test_the_table_of_the_traces_names_each_with_its_library_and_calls() -> None:
    text = (RECORDED.parent / "README.md").read_text()
    rows = re.findall(r"^\| `([\w-]+)` \| (.+?) \| (\d+) \|", text, re.MULTILINE)
    traces = [load(name) for name in NAMES]
    counts = [sum(isinstance(line, Call) for line in trace.lines) for trace in traces]
    assert sorted(rows) == [
        (trace.name, trace.versions, str(count)) for trace, count in zip(traces, counts, strict=True)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_local_directory_ends_as_the_program_left_it(name: str) -> None:
    assert promised(past_of(name)) == dict(load(name).end)


@pytest.mark.parametrize("name", WITH_CHECKPOINTS)
def test_on_a_local_directory_the_program_can_always_resume(name: str) -> None:
    """Else the oracle would ask of the bucket what no disk gives."""
    oracle = Oracle(past_of(name))
    for moment in past_of(name).moments:
        oracle.see(moment.files)


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize(("name", "pace"), RUNS)
def test_the_bucket_alone_can_always_resume_also_after_a_crash_at_any_moment(name: str, pace: str) -> None:
    past = past_of(name)
    every = 1 if IS_ALL else len(past.trace.lines)
    outcome = run(past, PACES[pace], every=every, first=zlib.crc32(f"{name} {pace}".encode()) % every)
    assert outcome.crashes >= (outcome.moments if IS_ALL else 1)


# ---- the oracle can object


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize("name", ["dcp-one-rank", "dcp-two-ranks", "transformers"])
def test_the_oracle_objects_where_the_daemon_does_not_know_commit_markers(name: str) -> None:
    """Requests that take different times arrive in another order than that of the closes."""
    pace = Pace(mark_seconds=90.0, request_seconds=1.0, is_shuffled=True)
    assert run(past_of(name), pace).requests
    with pytest.raises(Broken, match="looks complete and is not"):
        run(past_of(name), pace, order_last=())


def test_the_oracle_objects_to_a_checkpoint_of_two_versions_and_to_a_lost_one() -> None:
    past = past_of("transformers")
    first, second = past.checkpoints[:2]
    oracle = Oracle(past)
    oracle.see({})
    oracle.see({path: data for path, data in first.files.items() if path not in first.shows})
    oracle.see(first.files)
    weights = next(path for path in second.files if path.endswith("model.safetensors"))
    with pytest.raises(Broken, match="looks complete and is not"):
        oracle.see({**first.files, **{path: data for path, data in second.files.items() if path != weights}})
    with pytest.raises(Broken, match="no checkpoint looks complete"):
        oracle.see({path: data for path, data in first.files.items() if path not in first.shows})
    with pytest.raises(Broken, match="no file held"):
        oracle.see({**first.files, weights: second.files[weights][:-1]})


def test_the_oracle_objects_to_an_end_that_lacks_a_file_or_shows_an_older_one() -> None:
    past = past_of("torch-in-place")
    oracle, last = Oracle(past), past.moments[-1]
    oracle.see_end(last.files, [last])
    with pytest.raises(Broken, match="nothing"):
        oracle.see_end({"ckpt.pt": last.files["ckpt.pt"]}, [last])
    with pytest.raises(Broken, match=r"ckpt\.pt shows"):
        oracle.see_end({**last.files, **past.checkpoints[0].files}, [last])


# ---- a mount


class Watch:
    """Looks at the bucket all the time, as the server holds it. states: how many it saw."""

    def __init__(self, bucket: Bucket, past: Past) -> None:
        self._bucket = bucket
        self._oracle = Oracle(past)
        contents = {data for values in past.shown.values() for data in values}
        self._known = {hashlib.md5(data, usedforsecurity=False).hexdigest(): data for data in contents}
        self._ended = threading.Event()
        self._failure: Broken | None = None
        self.states: set[tuple[tuple[str, bytes], ...]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the end of the block. Raises Broken."""
        thread = threading.Thread(target=self._watch)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
        if self._failure is not None:
            raise self._failure

    def shows(self) -> dict[str, bytes]:
        """Return what the bucket shows now, as the bucket in memory says it."""
        shown = {}
        for key, view in self._bucket.control.objects().items():
            name = key.removeprefix(self._bucket.prefix)
            if key.startswith(self._bucket.prefix) and name:
                target = symlink_target(decode_metadata(view.metadata))
                shown[name] = f"-> {target}".encode() if target else self._data(key, view.etag)
        return shown

    def _data(self, key: str, etag: str) -> bytes:
        return self._known[etag] if etag in self._known else self._bucket.control.read(key)

    def _watch(self) -> None:
        while self._failure is None and not self._ended.wait(0.01):
            shown = self.shows()
            self.states.add(tuple(sorted(shown.items())))
            try:
                self._oracle.see(shown)
            except Broken as exc:
                self._failure = exc


class Interrupted(Exception):
    """A line at which the replay ends was reached."""


def replay_on_mount(past: Past, directory: Directory, until: int | None = None) -> None:
    """Carry a trace out, with a pause at each checkpoint, up to a line: raises Interrupted."""

    async def after(line: int) -> None:
        if isinstance(past.trace.lines[line], Mark):
            time.sleep(MARK_SECONDS)  # noqa: ASYNC251  # nothing else runs in this loop
        if line == until:
            raise Interrupted

    async def main() -> None:
        await replay(past.trace, directory, after=after)

    trio.run(main)


@pytest.mark.parametrize("name", NAMES)
def test_a_mount_shows_the_same_tree_and_its_bucket_can_always_resume(place: Any, name: str) -> None:
    past = past_of(name)
    watch = Watch(place.bucket, past)
    with watch.watching():
        replay_on_mount(past, Directory(place.path))
        found = {
            path: f"-> {data}".encode() if isinstance(data, str) else data
            for path, data in tree_of(place.path).items()
        }
        assert found == {**dict.fromkeys(past.moments[-1].folders), **past.moments[-1].files}
        place.sync()
    Oracle(past).see_end(watch.shows(), past.moments[-1:])
    assert len(watch.states) >= min(2, len(past.checkpoints))


@pytest.mark.parametrize("name", KILLED)
def test_what_was_closed_before_a_kill_of_the_daemon_reaches_the_bucket(
    mount: Any, bucket: Bucket, expect_log: Any, name: str
) -> None:
    past = past_of(name)
    line = len(past.trace.lines) * 3 // 5
    watch = Watch(bucket, past)
    node: Mount = mount()
    directory = Directory(node.path)
    with watch.watching():
        with pytest.raises(Interrupted):
            replay_on_mount(past, directory, until=line)
        if directory.files:
            expect_log("quarantined key=")
        node.kill()
        directory.abandon()
        expect_log("recovered files=")
        again: Mount = mount(cache=node.cache)
        again.sync()
    Oracle(past).see_end(watch.shows(), [past.moments[line + 1]])
