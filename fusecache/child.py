"""Starts helper processes of the daemon, and begins them: the mover, the page reader.

    python -I -S child.py VERSION PARENT PATH MODULE [WORD …]

A child imports MODULE and calls its `main` with the words. It has nothing of the daemon's environment, which has the
bucket's keys, ignores signals to the daemon's group, and ends with the daemon.

After an update of the package, a daemon that still runs the version before would start a newer child. That one ends
with STATUS_OTHER_VERSION: what the two say to each other may have changed. VERSION stays the first word for that.
"""

import ctypes
import json
import os
import signal
import sys
from importlib import import_module

# What else a daemon needs is imported there: a child starts without it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from socket import socket
    from subprocess import Popen

STATUS_OTHER_VERSION = 3
# For an interpreter that needs it; nothing else of the environment.
_PASSED_ON = ("LD_LIBRARY_PATH",)
# linux/prctl.h
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4


def start(module: str, fds: tuple[int, ...] = ()) -> "tuple[Popen[bytes], socket]":
    """Start a child; return it and a socket to it. Its `main` gets the number of its end, and of these descriptors.

    Call it in a thread that lives as long as the daemon: the child ends with that. Raises OSError.
    """
    from socket import AF_UNIX, SOCK_SEQPACKET, socketpair
    from subprocess import DEVNULL, Popen

    from fusecache import __version__

    # Where this package is: an editable installation is in no folder of the path.
    path = json.dumps([os.path.dirname(os.path.dirname(__file__)), *sys.path])
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    with theirs:
        passed = (theirs.fileno(), *fds)
        words = (__version__, str(os.getpid()), path, module, *map(str, passed))
        try:
            process = Popen(
                [sys.executable, "-I", "-S", __file__, *words],
                pass_fds=passed,
                cwd="/",
                env={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
                stdin=DEVNULL,
                stdout=DEVNULL,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def main() -> None:
    """Begin as a child."""
    version, parent, path, module, *words = sys.argv[1:]
    # The daemon says itself when this process is to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    # A process that is stopped, or within a system call, would not see the end of a socket.
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        return
    sys.path[:] = json.loads(path)
    if import_module("fusecache").__version__ != version:
        os._exit(STATUS_OTHER_VERSION)
    import_module(module).main(*map(int, words))


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except ConnectionError:
        pass  # the daemon has ended
    except Exception:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
    os._exit(status)  # without the end of the interpreter, which waits for threads
