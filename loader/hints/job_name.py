"""Chooses the job name that a run uses for its plans: the same after a restart, and used by no other process.

The kernel arbitrates the names of a machine. A process that uses one holds an abstract socket address, which is not a
file and is freed when the process ends, however it ends.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import re
import socket

from fusecache.model.hints import is_job
from loader.errors import ArgumentError

# Room for the number that each process adds.
_LONGEST = 95
_ADDRESS = "\0fusecache-job-"
# Names of this process -> their sockets; None if the kernel offers no such address.
_held: dict[str, socket.socket | None] = {}


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
