"""Play the demo: `python -m examples.demo [--bucket s3://BUCKET/PREFIX]`. Status 0 only if all of it held.

1. Tokenise real text into MDS shards, through a mount, straight into the bucket.
2. Train some steps without telling the mount what will be read: how long is data waited for?
3. Node A, 2 ranks: train through the mount, now with hints, and lose trainers and daemon to SIGKILL mid-epoch.
4. Node B, 1 rank, another cache: resume from the newest whole checkpoint; stop on SIGTERM. Then a trainer is
   killed in the middle of overwriting that very checkpoint.
5. Node C, 4 ranks, another cache: resume from it all the same, and finish the epoch.
6. Compare every global batch with an uninterrupted run, and every byte in the bucket with what was written.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from examples.demo import history, report, steps
from examples.demo.bucket import BUCKET_ERRORS, DemoBucket, credentials, describe
from examples.demo.nodes import unmount_below, wait_until
from examples.demo.processes import StepError, adopt_orphans, end_everything
from examples.demo.report import Check
from examples.demo.steps import say

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "demo"
LATENCY_SECONDS = 0.005  # of the embedded server: a bucket in the same region


def play(bucket: DemoBucket, scratch: Path) -> bool:
    """Play all steps and write the report; returns whether everything held."""
    demo = steps.Demo(bucket, scratch, report.Report())
    demo.logs.mkdir()
    steps.write_dataset(demo, steps.SAMPLES)
    steps.train_without_hints(demo)
    with steps.DurableWatch(bucket) as durable:
        steps.train_and_lose_everything(demo, durable)
        steps.train_until_notice(demo)
        steps.finish_epoch(demo)
        wait_until(
            "the last checkpoint in the bucket's listing",
            lambda: steps.SAMPLES // steps.GLOBAL_BATCH_SIZE in durable.seen,
            steps.STEP_TIMEOUT_SECONDS,
        )
    phases = [history.read_phase(demo.logs, name, ranks) for name, ranks in (("A", 2), ("B", 1), ("C", 4))]
    before = history.read_phase(demo.logs, steps.NO_HINTS, 2)
    steps.compare(demo, before, phases)
    steps.compare_waits(demo, before, phases[0])

    counters = demo.counters[before.name]
    rows = [report.phase_row(before, set(), counters, {}, steps.GLOBAL_BATCH_SIZE)]
    done: set[int] = set()
    for phase in phases:
        delays = history.durable_seconds(phase, phases, durable.seen)
        rows.append(report.phase_row(phase, done, demo.counters[phase.name], delays, steps.GLOBAL_BATCH_SIZE))
        done |= phase.steps.keys()
    demo.report.notes["seconds"] = round(time.monotonic() - steps.BEGAN, 1)
    OUTPUT.mkdir(exist_ok=True)
    report.plot_losses(OUTPUT / "loss.png", phases, {"A": "SIGKILL", "B": "SIGTERM"})
    report.write_report(OUTPUT / "report.json", demo.report, rows, phases)
    say(report.table(rows))
    for name in Check:
        say(f"{'yes' if demo.report.checks.get(name, False) else 'NO '}  {name}")
    say(f"order identical: {'yes' if demo.report.checks[Check.ORDER] else 'NO'}")
    say(f"see {OUTPUT / 'report.json'} and {OUTPUT / 'loss.png'}")
    return demo.report.held()


@contextlib.contextmanager
def open_bucket(url: str | None, scratch: Path) -> Iterator[DemoBucket]:
    """Yield a fresh prefix of the bucket at `url`, or of a server of our own; empty it again at the end."""
    name = f"fusecache-demo-{time.strftime('%Y%m%d-%H%M%S')}"
    with contextlib.ExitStack() as stack:
        if url is None:
            from tests.s3server import ServerProcess

            server = stack.enter_context(ServerProcess(scratch / "objects"))
            server.control.set(latency=LATENCY_SECONDS)
            stack.enter_context(credentials(server.access_key, server.secret_key, "auto"))
            bucket = DemoBucket(server.bucket, f"{name}/", server.endpoint_url)
            stack.callback(bucket.close)
            say(f"{bucket.url} on a server of our own, {LATENCY_SECONDS * 1e3:.0f} ms away")
        else:
            root, _, prefix = url.removeprefix("s3://").partition("/")
            path = "/".join(part for part in (prefix.strip("/"), name) if part)
            endpoint = os.environ.get("AWS_ENDPOINT_URL")
            try:
                bucket = DemoBucket(root, f"{path}/", endpoint)
                stack.callback(bucket.close)
                bucket.objects()
            except BUCKET_ERRORS as exc:
                raise StepError(f"s3://{root} at {endpoint or 'AWS'}: {describe(exc)}") from exc
            say(f"below {bucket.url} only, at {endpoint or 'AWS'}; deleted again at the end")
        if bucket.objects():
            raise StepError(f"{bucket.url} is not empty")
        try:
            yield bucket
        finally:
            ignore_signals()
            try:
                say(f"deleted {bucket.delete_everything()} objects below {bucket.url}")
            except BUCKET_ERRORS as exc:
                raise StepError(f"objects below {bucket.url} are left there: {describe(exc)}") from exc


def ignore_signals() -> None:
    """From here on it is clean-up, which no signal shall cut short."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def stop(_number: int, _frame: FrameType | None) -> None:
    """End through every clean-up on the way out."""
    ignore_signals()
    raise KeyboardInterrupt


def keep_logs(scratch: Path) -> None:
    """Copy what daemons and trainers said to `demo/failed/`: it would go with the scratch folder."""
    logs = list(scratch.rglob("*.log"))
    if not logs:
        return
    for path in logs:
        kept = OUTPUT / "failed" / path.relative_to(scratch)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, kept)
    say(f"logs of daemons and trainers: {OUTPUT / 'failed'}")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder; at the end, end every process and mount that is left, then remove the folder."""
    (ROOT / "scratch").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=ROOT / "scratch"))
    try:
        yield folder
    except Exception:  # whatever went wrong, the daemons may know why
        keep_logs(folder)
        raise
    finally:
        ignore_signals()
        left = end_everything()
        unmount_below(folder)  # before anything is removed: through a mount, that would reach the bucket
        shutil.rmtree(folder)
        if left:
            raise StepError(f"processes that would not end: {sorted(left)}")


def main() -> int:
    """Play the demo on a fresh prefix and leave only `demo/` behind."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bucket",
        metavar="[s3://]BUCKET[/PREFIX]",
        help="a real bucket; AWS_ENDPOINT_URL, and AWS's usual credentials",
    )
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    adopt_orphans()
    try:
        with scratch_folder() as scratch, open_bucket(options.bucket, scratch) as bucket:
            held = play(bucket, scratch)
            if not held:
                keep_logs(scratch)
    except (StepError, OSError) as exc:  # a mount whose daemon died answers with an OSError
        say(f"FAILED: {exc}")
        return 1
    except Exception as exc:  # noqa: BLE001 - one line for whoever plays it, the rest for whoever mends it
        path = OUTPUT / "failed" / "traceback.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc())
        say(f"FAILED: {describe(exc) or type(exc).__name__}; where: {path}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; nothing is left behind")
        return 130
    say("everything held" if held else "NOT everything held")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
