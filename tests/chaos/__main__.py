"""`make chaos`: faults at random under a load like a trainer's. Exits with 1 on any finding."""

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from fusecache.remote.store import PROBE_NAME
from loader import MDSWriter
from tests.chaos.bucket_faults import BucketFaults
from tests.chaos.checks import Markers, compare
from tests.chaos.load import Load
from tests.chaos.node import CACHE_BYTES, USUAL_DESCRIPTORS, Node, memory_group
from tests.chaos.plan import COPY, PROGRAMS, Plan, Planned, draw_plan
from tests.chaos.programs import FILES, RUNS, SAMPLES, twin_of
from tests.s3server import ServerProcess
from tests.support.daemons import Daemon
from tests.support.disks import has_disks

LOAD = ["trainer", "trainer", "holder", "mover", "mover", "reader", "reader", "job"]
TICK_SECONDS = 0.25
LOOK_SECONDS = 1.0
# After the last fault: to mount, to end the programs' calls, to publish everything, to unmount.
MOUNT_SECONDS, END_SECONDS, HEAL_SECONDS = 90.0, 320.0, 300.0
# Between two periods of faults: each queued version of a commit marker takes 1.1 s.
SYNC_SECONDS = 300.0
# A call may fail by a fault that ended that long before: requests are retried for 60 s.
EXCUSED_SECONDS = 65.0
# `--memory 64MiB`, Python itself, and what uploads hold.
MOST_RSS = 400 << 20
# Three runs of half an hour had 308 to 432.
MOST_DESCRIPTORS = 700
ABSENT = {"ENOENT", "ENOTCONN", "ECONNABORTED"}
# Where a fault is that is at no server.
NODE = -1
# By the shape of the mount: the server whose faults may fail a call of a program, NODE for neither; else it is 0.
SHAPES: dict[str, dict[tuple[str, str], int]] = {
    "one": {},
    "endpoints": {("reader", "read"): NODE},  # of an open file: names come from the first server
    "buckets": {("reader", ""): 1, ("job", ""): 1},
}
FINDINGS = (
    "lost", "wrong bytes", "unhealed", "order", "slow call", "error without a fault", "absent without a cause",
    "daemon", "program", "memory", "unmount",
)  # fmt: skip


class Run:
    """One run: the server, the node, the load, and the lanes of faults."""

    def __init__(
        self, plan: Plan, seed: int, directory: Path, *, shape: str, is_kept: bool, whole_machine: bool
    ) -> None:
        """shape: of the mount, a key of `SHAPES`. is_kept: the mount outlives its daemon."""
        self._plan, self._seed, self._shape = plan, seed, shape
        self.findings: list[tuple[str, str]] = []
        self.injected: Counter[str] = Counter()
        # Faults in force, and when the last one ended, by where they are: a server, or NODE.
        self._active: dict[str, int] = {}
        self._last_fault = dict.fromkeys(range(NODE, 2), -EXCUSED_SECONDS)
        self._ends = threading.Event()
        self._may_begin = threading.Event()
        self._may_begin.set()
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._servers = [ServerProcess(directory / "bucket")]
        self._server = self._servers[0]
        self._server.start()
        flags: tuple[str, ...] = ()
        if shape != "one":
            self._servers.append(ServerProcess(directory / "other", bucket=self._server.bucket))
            self._servers[1].start()
            flags = ("--config", str(directory / "mount.toml"))
        self.node = Node(self._server, directory, seed, *flags, whole_machine=whole_machine)
        self.node.daemon.has_buckets = shape == "buckets"
        self.node.daemon.is_kept = is_kept
        # Another node, which nothing happens to but what happens to the bucket. It mounts one bucket.
        self._twin: Daemon | None = None
        if shape == "one":
            self._twin = Daemon(
                self._server, twin_of(self.node.daemon.path).parent, "--cache-size", str(CACHE_BYTES)
            )
        # These explain no error of a program.
        self._silent = {*PROGRAMS, *(["daemon killed"] if is_kept else [])}
        keys = [self.node.credentials, directory / "other-keys"]
        self._faults = [BucketFaults(*each) for each in zip(self._servers, keys, strict=False)]
        if flags:
            Path(flags[1]).write_text(_tables(shape, self._servers, keys))
        self._other_gets = 0
        self.load = Load(self.node.daemon.path, seed, self.report, self._is_excused)
        self.markers = Markers(self._server, self.load.ledger, directory, self.report)

    def report(self, kind: str, text: str) -> None:
        """Note a finding, and say it at once."""
        with self._lock:
            self.findings.append((kind, text))
            if len(self.findings) <= 100:
                active = ", ".join(sorted(self._active)) or "no fault"
                self._say(f"FINDING {kind}: {text} [{active}]")

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)  # noqa: T201

    # ---- the run

    def carry_out(self, seconds: float) -> None:
        """Do everything; findings are in `findings`."""
        _fill_buckets(self._servers)
        with self.node:
            try:
                if problem := self.node.start(MOUNT_SECONDS):
                    self.report("daemon", f"did not mount: {problem}")
                    return
                if self._twin is not None:
                    self._twin.mount()
                self._began = time.monotonic()
                self._inject(seconds)
                self._heal()
            finally:
                self._ends.set()
                for server in self._servers:
                    server.control.clear_faults()
                    server.control.resume()
                self.load.stop(5.0)
                if self._twin is not None:
                    self._twin.clean_up()
        if self._shape != "one":
            self._other_gets = self._servers[1].control.counts().get("GetObject", 0)
            if not self._other_gets:
                self.report("program", "no read went to the other server")
        for server in self._servers:
            server.stop()

    def _inject(self, seconds: float) -> None:
        self.load.start([*LOAD, *(["twin"] if self._twin else [])])
        lanes = [
            threading.Thread(
                target=self._guard, args=(lambda faults=faults, name=name: self._lane(name, faults),)
            )
            for name, faults in self._plan.lanes.items()
        ]
        lanes.append(threading.Thread(target=self._guard, args=(self._look_on,)))
        for lane in lanes:
            lane.start()
        try:
            self._watch(seconds)
        finally:
            self._ends.set()
            for lane in lanes:
                lane.join()
        self._say(self.summary())

    def _watch(self, seconds: float) -> None:
        """Look at the programs and the daemon until the time is over."""
        rests = list(self._plan.rests)
        minute = 1
        while (now := time.monotonic() - self._began) < seconds:
            time.sleep(TICK_SECONDS)
            self.load.watch()
            self.node.measure()
            if now >= minute * 60:
                self._say(self.summary())
                minute += 1
            if rests and now >= rests[0]:
                rests.pop(0)
                self._rest()

    def _guard(self, work: Callable[[], None]) -> None:
        """Make an error of this program a finding, not a thread that is missing."""
        try:
            work()
        except Exception:  # noqa: BLE001 (whatever it is, it must be seen)
            self.report("program", traceback.format_exc())

    def _lane(self, name: str, faults: list[Planned]) -> None:
        is_node = name == "node"
        for fault in faults:
            where = NODE if name in ("node", "programs", "kills") else self._server_of(fault)
            if fault.kind in COPY and where == 0:
                continue  # what the primary serves is right
            if self._wait(fault.start - (time.monotonic() - self._began), is_node=is_node):
                break
            self._may_begin.wait()
            with self._lock:
                if fault.kind not in self._silent:
                    self._active[fault.kind] = where
                self.injected[f"{fault.kind}{' at the other server' if where == 1 else ''}"] += 1
                self._say(
                    f"{fault.kind}, {fault.seconds:.0f} s, {'at the other server' if where == 1 else ''}"
                )
            try:
                self._begin(name, fault)
                self._wait(fault.seconds, is_node=is_node)
            finally:
                self._end(name, fault)
                with self._lock:
                    if self._active.pop(fault.kind, None) is not None:
                        self._last_fault[where] = time.monotonic()
        if is_node:
            while not self._wait(TICK_SECONDS, is_node=True):
                pass

    def _server_of(self, fault: Planned) -> int:
        return self._plan.server_of(fault) if self._shape != "one" else 0

    def _begin(self, lane: str, fault: Planned) -> None:
        if lane in ("node", "kills"):
            self.node.begin(fault.kind)
        elif lane == "programs":
            self.load.kill_one(fault.choice)
        else:
            self._faults[self._server_of(fault)].begin(fault.kind, fault.choice)

    def _end(self, lane: str, fault: Planned) -> None:
        if lane == "node":
            self.node.end(fault.kind)
            if self.node.is_down_on_purpose():
                self._mount()
        elif lane not in ("programs", "kills"):
            self._faults[self._server_of(fault)].end(fault.kind)

    def _mount(self) -> None:
        # While the bucket is away no daemon starts: its service manager goes on trying.
        while problem := self.node.start(MOUNT_SECONDS):
            if time.monotonic() - max(self._last_fault.values()) > EXCUSED_SECONDS and len(self._active) <= 1:
                self.report("daemon", f"does not mount: {problem}")
                return

    def _wait(self, seconds: float, *, is_node: bool = False) -> bool:
        """Return whether the faults are over. The node's lane also replaces a daemon that ended by itself."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self._ends.wait(min(left, TICK_SECONDS)):
                return True
            if is_node and not self.node.is_down_on_purpose() and not self.node.daemon.is_running():
                self.node.note_down()
                self.report("daemon", f"ended by itself with {self.node.daemon.take_ended()}")
                self._mount()
        return self._ends.is_set()

    def _look_on(self) -> None:
        while not self._ends.wait(LOOK_SECONDS):
            self.markers.look()

    def _rest(self) -> None:
        """All faults ended a while ago: everything closed until now must reach the bucket before the next begins."""
        self._may_begin.clear()
        try:
            if self.node.daemon.sync(timeout=SYNC_SECONDS):
                self.report("unhealed", f"sync failed, and there is no fault: {self._state()}")
        finally:
            self._may_begin.set()

    def _is_excused(self, program: str, call: str, error: str, began: float, ended: float) -> bool:
        """Return whether a fault explains an error of a call."""
        if self.node.was_down(began, ended):
            return True
        if error in ABSENT:
            return False
        if error in {"EMFILE", "ENFILE"} and self.node.has_few_descriptors():
            return True
        server = SHAPES[self._shape].get((program, call), SHAPES[self._shape].get((program, ""), 0))
        with self._lock:
            return any(
                where in self._active.values()
                or ended - self._last_fault[where] < EXCUSED_SECONDS
                or began < self._last_fault[where]
                for where in (NODE, server)
            )

    # ---- the end

    def _heal(self) -> None:
        """Without a person's help: everything in the bucket, byte for byte, and an unmount that succeeds."""
        began = time.monotonic()
        self.load.stop(END_SECONDS)
        deadline = time.monotonic() + HEAL_SECONDS
        while True:
            status = self.node.daemon.sync(timeout=60.0)
            status = status or (self._twin.sync(timeout=60.0) if self._twin else 0)
            self.node.measure()
            wrong = compare(self._server, self.load.ledger)
            # A daemon that is killed while it tests the store's conditions leaves an upload to a later one.
            uploads = [each.key for each in self._server.control.uploads() if PROBE_NAME not in each.key]
            failing = self._failing_endpoints()
            if not (status or wrong or uploads or failing) or time.monotonic() > deadline:
                break
            time.sleep(1.0)
        self._say(f"healed or given up {time.monotonic() - began:.0f} s after the last fault")
        for path, text in wrong.items():
            kind, _, rest = text.partition(": ")
            self.report(kind, f"{path}: {rest}")
        if status:
            self.report("unhealed", f"sync ends with {status}: {self._state()}")
        if uploads:
            self.report("unhealed", f"uploads left: {uploads}")
        if failing:
            self.report("unhealed", f"endpoints fail, and there is no fault: {failing}")
        self.markers.look()
        self._unmount()
        if self.node.most_rss > MOST_RSS:
            self.report("memory", f"the daemon had {self.node.most_rss >> 20} MiB")
        if self.node.most_descriptors > MOST_DESCRIPTORS:
            self.report("memory", f"the daemon had {self.node.most_descriptors} descriptors")

    def _failing_endpoints(self) -> list[str]:
        """Return endpoints that the daemon does not read from. A request probes them: this one for names."""
        try:
            os.listdir(self.node.daemon.path / "data")
            rows = self.node.daemon.status().get("endpoints") or []
        except OSError as exc:
            return [f"no status: {exc}"]
        return [f"{each['endpoint']}: {each['error']}" for each in rows if each["state"] == "failing"]

    def _state(self) -> str:
        try:
            status = self.node.daemon.status()
        except OSError as exc:
            return f"no status: {exc}"
        names = (
            "state",
            "waiting_for",
            "pending_files",
            "rejected_files",
            "rejected",
            "conflicts",
            "waiting",
        )
        return str({name: status[name] for name in names if status.get(name)})

    def _unmount(self) -> None:
        daemon = self.node.daemon
        done = daemon.command("unmount", daemon.path)
        if done.returncode:
            self.report("unmount", f"ended with {done.returncode}: {done.stderr}")
        elif status := daemon.wait(60.0):
            self.report("unmount", f"the daemon ended with {status}")

    # ---- words

    def summary(self) -> str:
        """Return the state of the run in one line."""
        ledger = self.load.ledger
        return (
            f"faults {sum(self.injected.values())}, closes {ledger.closes}, calls {sum(ledger.calls.values())}, "
            f"read {ledger.read_bytes >> 20} MiB, errors {sum(ledger.errors.values())}, looks {self.markers.looks}, "
            f"RSS {self.node.most_rss >> 20} MiB, descriptors {self.node.most_descriptors}, "
            f"findings {len(self.findings)}"
        )

    def table(self) -> str:
        """Return the result as a table."""
        ledger = self.load.ledger
        counts = Counter(kind for kind, _ in self.findings)
        rows: list[tuple[str, object]] = [
            (f"fault: {kind}", count) for kind, count in sorted(self.injected.items())
        ]
        rows += [(f"error: {name}", count) for name, count in sorted(ledger.errors.items())]
        rows += [
            ("daemons started", self.node.starts),
            ("acknowledged closes", ledger.closes),
            ("files at the end", ledger.certain()),
            ("GETs at the other server", self._other_gets),
            ("highest RSS, MiB", self.node.most_rss >> 20),
            (f"highest descriptors (of {USUAL_DESCRIPTORS})", self.node.most_descriptors),
        ]
        rows += [(f"finding: {kind}", counts[kind]) for kind in FINDINGS]
        return "\n".join(f"{name:40} {value!s:>10}" for name, value in rows)


def _tables(shape: str, servers: Sequence[ServerProcess], keys: Sequence[Path]) -> str:
    """Return the options of a mount of both servers."""
    if shape == "endpoints":
        return f'[[endpoint]]\nurl = "{servers[1].endpoint_url}"\ncredentials_file = "{keys[1]}"\n'
    return "".join(
        f'[[bucket]]\nname = "{name}"\nsource = "s3://{servers[number].bucket}/{name}"\n'
        f'endpoint_url = "{servers[number].endpoint_url}"\ncredentials_file = "{keys[number]}"\n'
        for number, name in ((0, RUNS), (1, "data"), (1, "samples"))
    )


def _fill_buckets(servers: Sequence[ServerProcess]) -> None:
    servers[0].control.put(f"{RUNS}/", b"")
    for server in servers:
        for number, size in enumerate(FILES):
            server.control.add_synthetic(f"data/f{number}", size, number)
    with tempfile.TemporaryDirectory() as folder:
        with MDSWriter(Path(folder) / "samples", {"number": "int"}, size_limit=8192) as writer:
            for number in range(SAMPLES):
                writer.write({"number": number})
        for path in (Path(folder) / "samples").iterdir():
            for server in servers:
                server.control.put(f"samples/{path.name}", path.read_bytes())


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=None, help="[the clock]")
    parser.add_argument("--only", default="", help="kinds of faults, separated by commas")
    parser.add_argument("--without", default="", help="kinds of faults to leave out")
    parser.add_argument(
        "--shape", choices=SHAPES, default="one",
        help="endpoints: another server has a copy of what is read; buckets: what is read is a bucket of that server. "
        "The bucket's faults are at one of the servers at a time, and must not reach what the other can do [one]",
    )  # fmt: skip
    parser.add_argument(
        "--kept", action="store_true", help="the mount has a keeper: a killed daemon explains no error"
    )
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    parser.add_argument(
        "--whole-machine", action=argparse.BooleanOptionalAction, default=has_disks() and memory_group() is not None,
        help="also faults of disk and memory [if root, and there are loop devices and control groups]",
    )  # fmt: skip
    options = parser.parse_args()
    seed = int(time.time()) % 1_000_000 if options.seed is None else options.seed
    whole_machine = options.whole_machine
    plan = draw_plan(
        seed,
        options.minutes,
        whole_machine=whole_machine,
        has_copy=options.shape == "endpoints",
        is_kept=options.kept,
        only=[kind for kind in options.only.split(",") if kind],
        without=[kind for kind in options.without.split(",") if kind],
    )
    directory = Path(tempfile.mkdtemp(prefix="fusecache-chaos-", dir=options.directory))
    print(  # noqa: T201
        f"seed {seed}, log {directory / 'node' / 'log'}"
        + (
            ""
            if whole_machine
            else "; no faults of disk and memory, which need root, loop devices and control groups"
        ),
        flush=True,
    )
    run = Run(plan, seed, directory, shape=options.shape, is_kept=options.kept, whole_machine=whole_machine)
    run.carry_out(options.minutes * 60)
    print(run.table())  # noqa: T201
    if run.findings:
        print(f"FAILED: {len(run.findings)} findings; seed {seed}, log {directory / 'node' / 'log'}")  # noqa: T201
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
