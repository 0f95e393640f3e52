"""A job as daemons know it: its name, the messages that it sends, and their withdrawal at its end.

A run uses the same name after a restart, and no other process uses it. The kernel arbitrates the names of a machine. A
process that uses one holds an abstract socket address, which is not a file and is freed when the process ends, however
it ends.
"""

import atexit
import contextlib
import errno
import hashlib
import itertools
import logging
import math
import os
import re
import socket
import threading
import time
import weakref
from collections.abc import Generator

from fusecache.model.hints import CURSOR, PLAN, HintError, encode_cursor, is_job
from loader.base.mount_endpoint import MountEndpoint
from loader.errors import ArgumentError
from loader.hints.plan_messages import FileRow, plan_message

# The daemon forgets a job after ten minutes without a message. An evaluation may last longer, so repeat the step.
KEEPALIVE_SECONDS = 60.0
# Retry after a failure that may pass, such as a mount that is being mounted again.
RETRY_SECONDS = 10.0
# Retry what the daemon rejects. EPERM: other jobs use up its limit on plans. They end in hours rather than seconds.
LIMIT_RETRY_SECONDS = 60.0
# Time to withdraw the plans at exit: a mount that does not answer must not block the exit.
_CLOSE_SECONDS = 2.0
# A hint file reports a reached limit as an errno alone.
_LIMIT_ADVICE = (
    ": all jobs together have as many jobs, plans or extents as it takes, or another user's job has this name. "
    "`fusecache status` shows the jobs. The loader tries again"
)

# Room for the number that each process adds.
_LONGEST = 95
_ADDRESS = "\0fusecache-job-"
# Names of this process -> their sockets; None if the kernel offers no such address.
_held: dict[str, socket.socket | None] = {}


class HintJob:
    """Sends the plans and steps of one job to the daemons of mounts, and withdraws them at its end.

    name: as held by `hold_name`. log: takes each kind of problem once at INFO, then at DEBUG. The job ends with `close`
    or with its last reference. A job with a thread also ends at the exit of the process. A job without one does not
    delay the exit: the daemon sees the end of the process. A forked child withdraws nothing.
    """

    def __init__(self, name: str, log: logging.Logger) -> None:
        self.name = name
        self.stopped = threading.Event()
        self._log = log
        self._warned: set[str] = set()
        # Mount to which a plan was sent -> the time of the last message, by the monotonic clock.
        self._spoken_at: dict[MountEndpoint, float] = {}
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._end = weakref.finalize(self, _withdraw, name, self._spoken_at, log, self._process)
        self._end.atexit = False

    def plan(self, endpoint: MountEndpoint, message: bytes) -> None:
        """Send a plan. Raises OSError: EINVAL if the daemon rejects it, EPERM until other jobs end."""
        self._spoken_at.setdefault(endpoint, -math.inf)
        endpoint.send(self.name + PLAN, message)
        self._spoken_at[endpoint] = time.monotonic()

    def move(self, endpoint: MountEndpoint, step: int, *, by_reads: bool = False) -> None:
        """Tell a daemon that all steps before this one are done; by_reads: only that the job lives. Raises OSError."""
        endpoint.send(self.name + CURSOR, encode_cursor(step, by_reads=by_reads))
        self._spoken_at[endpoint] = time.monotonic()

    def begin(self, endpoint: MountEndpoint, rows: list[FileRow]) -> None:
        """Send all that a job reads, then its first step. A failure is said, and raises nothing."""
        try:
            self.plan(endpoint, plan_message(rows, window=0, step=0))
        except (OSError, HintError) as problem:  # for example: more than one message holds
            self.refused(problem)
        self.tell(0)  # a process that sends its step is known to the daemon, which sees its end

    def tell(self, step: int) -> None:
        """Move the job at each daemon that was sent a plan. A failure is said, and raises nothing."""
        for endpoint in self._spoken_at:
            try:
                self.move(endpoint, step)
            except OSError as problem:  # for example: the daemon has forgotten the job
                self.refused(problem)

    def is_quiet(self, endpoint: MountEndpoint) -> bool:
        """Return whether it is time for a sign of life."""
        return time.monotonic() >= self._spoken_at.get(endpoint, -math.inf) + KEEPALIVE_SECONDS

    def say(self, kind: str, text: str, *values: object) -> None:
        """Log the first problem of a kind at INFO, later ones at DEBUG."""
        self._log.log(logging.DEBUG if kind in self._warned else logging.INFO, text, *values)
        self._warned.add(kind)

    def refused(self, problem: Exception, endpoint: MountEndpoint | None = None) -> float:
        """Say why a daemon took no hints, once for each endpoint; return the seconds until the next attempt."""
        place = "" if endpoint is None else f"{endpoint.root}: "
        number = problem.errno if isinstance(problem, OSError) else None
        advice = _LIMIT_ADVICE if number == errno.EPERM else ""
        text = "%sthe daemon takes no hints; reading continues without them: %s%s"
        self.say(f"refused {place}", text, place, problem, advice)
        is_rejected = number in (errno.EPERM, errno.EINVAL) or isinstance(problem, HintError)
        return LIMIT_RETRY_SECONDS if is_rejected else RETRY_SECONDS

    # ---- the thread

    def start(self, turns: Generator[float], thread: str) -> None:
        """Take turns on a thread: each yields the seconds until the next. The job ends when they do."""
        self._thread = threading.Thread(target=self._run, args=(turns,), name=thread, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def wake(self) -> None:
        """Begin the next turn now."""
        self._woken.set()

    def stop(self) -> None:
        """Let the thread withdraw the plans, and end: now, or when the mount answers again."""
        if self._process == os.getpid():
            self.stopped.set()
            self._woken.set()
            atexit.unregister(self.close)

    def close(self) -> None:
        """Stop, and wait a moment for it."""
        self.stop()
        if self._thread is None:
            self._end()
        # The garbage collector may close this job on its thread.
        elif self._process == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self, turns: Generator[float]) -> None:
        try:
            while not self.stopped.is_set() and (pause := next(turns, None)) is not None:
                self._woken.wait(pause)
                self._woken.clear()
        finally:
            turns.close()
            self._end()


def _withdraw(name: str, endpoints: dict[MountEndpoint, float], log: logging.Logger, process: int) -> None:
    if process != os.getpid():  # a forked child does not own the parent's plans
        return
    for endpoint in endpoints:
        try:
            endpoint.send(name + PLAN, b"")
        except OSError as problem:  # for example: the daemon has forgotten the job
            log.debug("hints not withdrawn: %s", problem)
    release_name(name)


def check_job(name: str | None) -> None:
    """Raise ArgumentError for a name that a daemon would refuse: it is a part of a file name on the mount."""
    if name is not None and (len(name) > _LONGEST or not is_job(name)):
        raise ArgumentError(
            f"job is {name!r}: use 1 to {_LONGEST} letters, digits, '.', '_' and '-', and no dot at the beginning"
        )


def hold_name(fingerprint: str, node: int, about: str) -> str:
    """Return a job name for the reader of a dataset on a machine, and reserve it until it is released.

    about: what else distinguishes runs of one allocation, such as the dataset's location and the seed.
    """
    # Without Slurm's step id: a script that starts a failed step again is the same run.
    run = _from_environment("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID") or f"{socket.gethostname()}-{os.getpid()}"
    # Ranks that read independently, as in an evaluation, are separate jobs.
    rank = _from_environment("LOCAL_RANK", "SLURM_LOCALID") or "0"
    told_by = repr((run, _from_environment("CUDA_VISIBLE_DEVICES"), about)).encode(errors="surrogateescape")
    digest = hashlib.blake2b(told_by, digest_size=4).hexdigest()
    stem = re.sub("[^A-Za-z0-9._-]", "_", f"{fingerprint[:12]}-{run[:40]}-{node}-{rank[:6]}-{digest}")
    return hold_numbered(stem)


def hold_numbered(stem: str) -> str:
    """Return a job name that begins with a text, and reserve it until it is released."""
    return next(name for number in itertools.count(1) if _hold(name := f"{stem}.{number}"))


def release_name(name: str) -> None:
    """Free a name for other processes; does nothing if this process does not hold it."""
    holder = _held.pop(name, None)
    if holder is not None:
        holder.close()


def _hold(name: str) -> bool:
    """Reserve a name; return False if it is taken."""
    if name in _held:
        return False
    holder: socket.socket | None = None
    with contextlib.suppress(OSError):  # a sandbox may forbid sockets of this family
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if holder is not None:
        try:
            holder.bind(_ADDRESS + name)
        except OSError as problem:
            holder.close()
            if problem.errno == errno.EADDRINUSE:
                return False
            holder = None  # then only this process knows that the name is taken
    _held[name] = holder
    return True


def _release_in_child() -> None:
    """Release all names in a forked worker: if it outlives its run, the next start could not reuse them."""
    for name in list(_held):
        release_name(name)


os.register_at_fork(after_in_child=_release_in_child)


def _from_environment(*names: str) -> str:
    """Return the first variable that is set; torchrun's default run id is "none", which does not count."""
    return next((value for name in names if (value := os.environ.get(name, "")) not in ("", "none")), "")
