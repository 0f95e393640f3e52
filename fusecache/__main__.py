"""Entry point of `fusecache` and of `python -m fusecache`."""

import os
import signal
import sys

from fusecache.installation import CAME_BY_PATH, next_in_path


def main() -> int:
    """Run one command; return its exit status. Ctrl-C ends it without a traceback also while it is being loaded."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # not where it is ignored, as below nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    other = next_in_path()
    os.environ.pop(CAME_BY_PATH, None)
    if other is not None:
        os.execve(other, [other, *sys.argv[1:]], {**os.environ, CAME_BY_PATH: other})
    from fusecache.cli.main import main as run_command

    signal.signal(signal.SIGINT, handler)
    return run_command()


if __name__ == "__main__":
    sys.exit(main())
