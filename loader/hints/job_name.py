"""The name under which a run tells a daemon what it reads: the same when it is started again, and nobody else's.

Which names are taken on this machine the kernel knows: who has one holds an address of its own, which is no file, and
free as soon as its process has ended, however that ends.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import re
import socket

_ADDRESS = "\0fusecache-job-"
# Names of this process; None where the kernel has no such addresses.
_held: dict[str, socket.socket | None] = {}


def hold_name(fingerprint: str, node: int, about: str) -> str:
    """Return a name for the reader of a dataset on a machine, and keep it from all others until it is released.

    about: what else tells it from the other runs of one allocation, such as the dataset's place and the seed.
    """
    # Slurm's step is left out: a script that starts a failed step again has the same run.
    run = _from_environment("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID") or f"{socket.gethostname()}-{os.getpid()}"
    # Ranks that each read on their own, as an evaluation does, are jobs of their own.
    rank = _from_environment("LOCAL_RANK", "SLURM_LOCALID") or "0"
    told_by = repr((run, _from_environment("CUDA_VISIBLE_DEVICES"), about)).encode(errors="surrogateescape")
    digest = hashlib.blake2b(told_by, digest_size=4).hexdigest()
    stem = re.sub("[^A-Za-z0-9._-]", "_", f"{fingerprint[:12]}-{run[:40]}-{node}-{rank[:6]}-{digest}")
    return next(name for number in itertools.count(1) if _hold(name := f"{stem}.{number}"))


def release_name(name: str) -> None:
    """Let others have a name; nothing happens where this process has it not."""
    holder = _held.pop(name, None)
    if holder is not None:
        holder.close()


def _hold(name: str) -> bool:
    """Take a name, if it is free."""
    if name in _held:
        return False
    holder: socket.socket | None = None
    with contextlib.suppress(OSError):  # a sandbox may have no sockets of this family
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if holder is not None:
        try:
            holder.bind(_ADDRESS + name)
        except OSError as problem:
            holder.close()
            if problem.errno == errno.EADDRINUSE:
                return False
            holder = None  # then it is known within this process alone
    _held[name] = holder
    return True


def _leave_to_the_parent() -> None:
    """A worker that outlives its run would keep the name from the next start."""
    for name in list(_held):
        release_name(name)


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _from_environment(*names: str) -> str:
    """Return the first variable that says something; torchrun's run id is "none" where nobody chose one."""
    return next((value for name in names if (value := os.environ.get(name, "")) not in ("", "none")), "")
