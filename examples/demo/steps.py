"""The steps of the demo, one function each, and what they check along the way."""

import contextlib
import hashlib
import json
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from examples.demo import history, prepare
from examples.demo.bucket import BUCKET_ERRORS, DemoBucket, Listed
from examples.demo.nodes import Counters, Node, Trainers, wait_until
from examples.demo.processes import StepError, run, start
from examples.demo.report import Check, Report

BEGAN = time.monotonic()
NO_HINTS = "no-hints"

SAMPLES = 10_240  # of 8 KiB: 84 MB in ten shards
GLOBAL_BATCH_SIZE = 32  # whole on 1, 2 and 4 ranks; 320 steps an epoch
CHECKPOINT_EVERY = 25
ORDER = {"global_batch_size": GLOBAL_BATCH_SIZE, "seed": 17, "order": "py1e", "canonical_nodes": 4}
KILL_STEP = 130  # past a checkpoint, so that there is work to lose
NOTICE_STEP = 210
WAIT_STEPS = 60  # of node A, compared with the same ones without hints
STREAMING_TIMEOUT_SECONDS = 120.0
STEP_TIMEOUT_SECONDS = 120.0  # start-up of four ranks takes fifteen on two idle cores, more on busy ones
TORN_BYTES = 4 * 2**20
# The mount publishes a closed file after a settle time of 1 s; a torn one must not follow in five of them.
SETTLE_SECONDS = 5.0


def say(text: str) -> None:
    """Print one line with the time since the start, above any progress bar."""
    for line in text.splitlines():
        tqdm.write(f"[{time.monotonic() - BEGAN:6.1f} s] {line}", file=sys.stdout)
    sys.stdout.flush()


@dataclass
class Demo:
    """What the steps share."""

    bucket: DemoBucket
    scratch: Path
    report: Report
    # key -> SHA-256, read through the mount right after it was written, before it reached the bucket
    written: dict[str, str] = field(default_factory=dict)
    # (samples,), by id: the CRC-32 of the tokens, taken before they were written
    checksums: NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, dtype=np.uint32))
    counters: dict[str, Counters] = field(default_factory=dict)

    def node(self, name: str) -> Node:
        """Return a new node, not yet mounted."""
        return Node(name, self.bucket, self.scratch / f"node-{name}")

    @property
    def copy(self) -> Path:
        """Where a plain copy of the bucket's dataset is."""
        return self.scratch / "copy"

    @property
    def logs(self) -> Path:
        """Where the trainers' step logs are, on a local disk."""
        return self.scratch / "logs"

    def note_written(self, node: Node, folder: str) -> None:
        """Remember what the files of `folder` hold, as the writing node sees them, and no earlier ones."""
        # a checkpoint that is redone on fewer ranks has fewer files, and the lost ones were never published
        self.written = {
            key: digest for key, digest in self.written.items() if not key.startswith(f"{folder}/")
        }
        for path in sorted((node.mountpoint / folder).iterdir()):
            self.written[f"{folder}/{path.name}"] = sha256(path)


class DurableWatch:
    """Looks at the bucket all the time and notes when each checkpoint's last file, `.metadata`, is there."""

    LOOK_SECONDS = 0.25

    def __init__(self, bucket: DemoBucket) -> None:
        self.seen: dict[int, float] = {}  # step -> seconds since the epoch
        self._bucket = bucket
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="durable-watch", daemon=True)

    def __enter__(self) -> "DurableWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(self.LOOK_SECONDS):
            with contextlib.suppress(*BUCKET_ERRORS):  # it looks again; who waits for more has a time limit
                for step in whole_checkpoints(self._bucket.objects("checkpoints/")):
                    self.seen.setdefault(step, time.time())


def whole_checkpoints(objects: dict[str, Listed]) -> list[int]:
    """Return the steps of the checkpoints whose last file is among `objects`, oldest first."""
    return sorted(
        int(key.split("/")[1].removeprefix("step-")) for key in objects if key.endswith("/.metadata")
    )


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_dataset(demo: Demo, samples: int) -> None:
    """Step 1: text to tokens to shards to the bucket."""
    with demo.node("writer") as node:
        say(f"1. tokenise Python sources into MDS shards, through the mount at {node.mountpoint}")
        roots = [Path(sysconfig.get_path(name)) for name in ("purelib", "stdlib")]
        demo.checksums = prepare.write_dataset(node.mountpoint / "dataset", roots, samples)
        demo.note_written(node, "dataset")
        began = time.monotonic()
        node.sync("dataset")
        say(f"   all of it in the bucket {time.monotonic() - began:.1f} s after the last close")
        node.unmount()
    check_dataset(demo)


def check_dataset(demo: Demo) -> None:
    """Download the dataset with plain boto3; compare it with what was written, by hash and another reader."""
    keys = demo.bucket.download_all("dataset/", demo.copy)
    found = {key: sha256(demo.copy / key) for key in tqdm(keys, total=len(demo.written), desc="download")}
    shards = [key for key in found if key.endswith(".mds")]
    shard_bytes = sum((demo.copy / key).stat().st_size for key in shards)
    demo.report.notes["dataset"] = {
        "shards": len(shards),
        "bytes": shard_bytes,
        "samples": len(demo.checksums),
    }
    demo.report.check(Check.DATASET, held=found == demo.written and len(shards) > 1)
    say(f"   {len(shards)} shards, {shard_bytes / 1e6:.0f} MB, by boto3: {same(found == demo.written)}")

    command = [sys.executable, "-m", "examples.demo.check_streaming", str(demo.copy / "dataset")]
    outcome = json.loads(run(command, os.environ, STREAMING_TIMEOUT_SECONDS).splitlines()[-1])
    equal = outcome["installed"] and outcome["crcs"] == demo.checksums.tolist()
    demo.report.notes["mosaicml-streaming installed"] = outcome["installed"]
    demo.report.check(Check.STREAMING, held=equal or not outcome["installed"])
    say(f"   by mosaicml-streaming: {same(equal) if outcome['installed'] else 'it is not installed'}")


def train_without_hints(demo: Demo) -> None:
    """Step 2: node A's first steps by a node that gives no hints; it saves nothing, and leaves nothing behind."""
    say(f"2. a node without hints: 2 ranks, an empty cache, {WAIT_STEPS} steps, to compare with")
    with (
        demo.node(NO_HINTS) as node,
        start_trainers(demo, node, "--no-hints", ranks=2, checkpoint_every=SAMPLES) as trainers,
    ):
        for event in follow(demo, node, trainers, until=WAIT_STEPS):
            if event["step"] > WAIT_STEPS:  # then the other rank has logged the one before
                demo.counters[NO_HINTS] = node.counters()
                break
        else:
            raise StepError("the node without hints ended before its time")
        trainers.kill()
        node.kill()


def train_and_lose_everything(demo: Demo, durable: DurableWatch) -> None:
    """Step 3: node A trains on 2 ranks until nothing of it is left."""
    say("3. node A: 2 ranks, an empty cache")
    with demo.node("A") as node, start_trainers(demo, node, ranks=2) as trainers:
        last = 0
        for event in follow(demo, node, trainers, until=KILL_STEP):
            last = event["step"]
            if last >= KILL_STEP and last % CHECKPOINT_EVERY >= 3 and durable.seen:
                demo.counters["A"] = node.counters()
                break
        else:
            raise StepError("node A finished the epoch before a checkpoint was in the bucket")
        trainers.kill()
        node.kill()
    say(f"   step {last}: trainers and daemon killed with SIGKILL, the node's disk is gone")


def train_until_notice(demo: Demo) -> None:
    """Step 4: node B resumes on 1 rank, stops on SIGTERM; then its newest checkpoint is half overwritten."""
    expected = newest_in_bucket(demo)
    say(f"4. node B: 1 rank, another cache; the newest whole checkpoint in the bucket is step {expected}")
    with demo.node("B") as node:
        with start_trainers(demo, node, ranks=1) as trainers:
            told = False
            for event in follow(demo, node, trainers, until=NOTICE_STEP):
                if event["step"] >= NOTICE_STEP and not told:
                    trainers.terminate()
                    told = True
            trainers.wait(STEP_TIMEOUT_SECONDS)
        check_resume(demo, "B", ranks=1, expected=expected)
        demo.counters["B"] = node.counters()
        node.sync("checkpoints")
        newest = newest_in_bucket(demo)
        say(f"   SIGTERM: stopped with a checkpoint at step {newest}, in the bucket")
        tear_checkpoint(demo, node, newest)
        node.unmount()
        say("   node B unmounted in peace")


def tear_checkpoint(demo: Demo, node: Node, step: int) -> None:
    """Kill a trainer in the middle of overwriting checkpoint `step` and of adding a file to it."""
    name = f"checkpoints/step-{step:04d}"
    before = demo.bucket.objects(f"{name}/")
    torn = [node.mountpoint / name / "__0_0.distcp", node.mountpoint / name / "torn.pt"]
    command = [sys.executable, "-m", "examples.demo.torn_writer", *map(str, torn)]
    writer = start(command, demo.scratch / "torn_writer.log", os.environ)
    try:
        wait_until(
            f"{TORN_BYTES} bytes in each of {torn}",
            lambda: writer.poll() is None and all(p.exists() and p.stat().st_size > TORN_BYTES for p in torn),
            STEP_TIMEOUT_SECONDS,
        )
    finally:
        writer.kill()
        writer.wait()
    time.sleep(SETTLE_SECONDS)  # nothing must happen: there is no event to wait for
    unchanged = demo.bucket.objects(f"{name}/") == before
    demo.report.check(Check.TORN, held=unchanged and writer.returncode == -signal.SIGKILL)
    say(f"   a trainer was killed while it overwrote step {step}")
    say(f"   the bucket, {SETTLE_SECONDS:.0f} s later: {same(unchanged)}")


def finish_epoch(demo: Demo) -> None:
    """Step 5: node C resumes on 4 ranks and finishes."""
    expected = newest_in_bucket(demo)
    say(f"5. node C: 4 ranks, another cache; resumes from step {expected}")
    with demo.node("C") as node:
        with start_trainers(demo, node, ranks=4) as trainers:
            for _ in follow(demo, node, trainers, until=SAMPLES // GLOBAL_BATCH_SIZE):
                pass
            trainers.wait(STEP_TIMEOUT_SECONDS)
        check_resume(demo, "C", ranks=4, expected=expected)
        demo.counters["C"] = node.counters()
        node.sync("checkpoints")
        node.unmount()
    say("   epoch finished, everything in the bucket, node C unmounted in peace")


def start_trainers(
    demo: Demo, node: Node, *more: str, ranks: int, checkpoint_every: int = CHECKPOINT_EVERY
) -> Trainers:
    """Start the trainers of a phase. more: options of theirs."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ORDER.items() if name != "order"]
    return node.trainers(ranks, demo.logs, [*options, *more, f"--checkpoint-every={checkpoint_every}"])


def follow(demo: Demo, node: Node, trainers: Trainers, *, until: int) -> Iterator[dict[str, Any]]:
    """Yield rank 0's step events, with a progress bar; notes what each checkpoint holds as it is closed."""
    with tqdm(total=until, desc=f"node {node.name}", unit=" steps") as bar:
        for event in trainers.follow(STEP_TIMEOUT_SECONDS):
            if event["event"] == "start":
                bar.reset(total=until)
                bar.initial = event["step"]
                bar.update(event["step"])
            elif event["event"] == "checkpoint":
                demo.note_written(node, f"checkpoints/{event['name']}")
            elif event["event"] == "step":
                bar.set_postfix(loss=f"{event['loss']:.3f}", refresh=False)
                bar.update(event["step"] - bar.n)
                yield event


def newest_in_bucket(demo: Demo) -> int:
    """Return the step of the newest whole checkpoint, as the bucket alone knows it."""
    steps = whole_checkpoints(demo.bucket.objects("checkpoints/"))
    if not steps:
        raise StepError("no whole checkpoint in the bucket")
    return steps[-1]


def check_resume(demo: Demo, name: str, *, ranks: int, expected: int) -> None:
    """Check that a phase began where the bucket's newest whole checkpoint ends."""
    resumed_from = history.read_phase(demo.logs, name, ranks).resumed_from
    demo.report.check(Check.RESUME, held=resumed_from == expected)
    say(f"   node {name} resumed from step {resumed_from}")


def compare_waits(demo: Demo, before: history.Phase, after: history.Phase) -> None:
    """Tell how long node A waited for data with hints, and its predecessor without."""
    waits = {
        name: {
            "first batch": history.waited_seconds(phase, 1),
            f"first {WAIT_STEPS} batches": history.waited_seconds(phase, WAIT_STEPS),
        }
        for name, phase in (("without hints", before), ("with hints", after))
    }
    demo.report.notes["seconds waited for data"] = waits
    for name, seconds in waits.items():
        told = ", ".join(f"{value:.2f} s for the {what}" for what, value in seconds.items())
        say(f"   waited for data {name}: {told}")


def compare(demo: Demo, before: history.Phase, phases: list[history.Phase]) -> None:
    """Step 6: against an uninterrupted run, and against what was written. before: what came to nothing."""
    say("6. the same epoch once more, uninterrupted, in one process, on the plain copy: ids only")
    reference = history.uninterrupted(demo.copy / "dataset", ORDER)
    differing = history.differing_steps([before, *phases], reference)
    effective = history.effective_steps(phases)
    redone = history.redone_steps(phases)
    demo.report.check(Check.ORDER, held=not differing and list(effective) == list(reference))
    read = {sample: crc for samples in reference.values() for sample, crc in samples}
    demo.report.check(Check.DATASET, held=read == dict(enumerate(demo.checksums.tolist())))
    ids = [sample for step in effective.values() for sample, _ in step.samples]
    demo.report.check(Check.EPOCH, held=sorted(ids) == list(range(SAMPLES)))
    demo.report.check(Check.LOST_WORK, held=len(redone) > 0)
    largest = max(redone.values(), default=float("nan"))
    demo.report.check(Check.LOSS, held=largest <= history.LOSS_TOLERANCE)
    demo.report.notes["global batches"] = {
        "compared": sum(len(phase.steps) for phase in (before, *phases)),
        "effective": len(effective),
        "redone": len(redone),
        "different": differing,
        "largest loss difference of a redone step": largest,
    }
    say(f"   {len(effective)} global batches, {len(redone)} of them done twice, {len(differing)} differ")
    say(f"   redone steps: the losses differ by {largest:.2g} at most")

    folder = demo.scratch / "bucket"
    keys = list(tqdm(demo.bucket.download_all("checkpoints/", folder), desc="checkpoints", unit=" files"))
    equal = [key for key in keys if sha256(folder / key) == demo.written.get(key)]
    whole = whole_checkpoints(demo.bucket.objects("checkpoints/"))
    missing = [
        key for step in whole for key in demo.written if f"/step-{step:04d}/" in key and key not in keys
    ]
    demo.report.check(Check.CHECKPOINTS, held=equal == keys and not missing and len(whole) > 1)
    folders = {f"{parent}/": 0 for key in demo.written for parent in PurePosixPath(key).parents}
    stray = [
        key
        for key, item in demo.bucket.objects().items()
        if key not in demo.written and folders.get(key) != item.size  # a folder's marker is an empty object
    ]
    unfinished = demo.bucket.unfinished_uploads()
    demo.report.check(Check.NOTHING_ELSE, held=not stray and not unfinished)
    demo.report.notes["bucket"] = {"checkpoints": whole, "stray": stray, "unfinished uploads": unfinished}
    say(f"   {len(whole)} whole checkpoints, {len(equal)} of {len(keys)} objects as written")
    say(f"   {len(stray)} objects that nobody wrote, {len(unfinished)} unfinished uploads")


def same(held: bool) -> str:  # noqa: FBT001 - a value to put in words, not a switch
    """Put a comparison in words."""
    return "the same" if held else "DIFFERENT"
