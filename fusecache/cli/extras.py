"""The optional parts of the package (`[project.optional-dependencies]`): which module comes with which of them."""

import gc
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fusecache.config.options import MountOptions
from fusecache.installation import extra_command
from fusecache.keeper import KEEPER_VARIABLE
from fusecache.model.errors import ConfigError

if TYPE_CHECKING:  # most commands do not need it
    from fusecache.daemon.keeping import DaemonStart

# Extra -> the modules that its packages bring and that this package imports.
MODULES = {
    "mount": ("boto3", "botocore", "h11", "lmdb", "trio", "xxhash"),
    "folder": ("boto3", "botocore", "lmdb", "trio", "xxhash"),
    "pyfuse3": ("boto3", "botocore", "h11", "lmdb", "pyfuse3", "trio", "xxhash"),
    "metrics": ("prometheus_client",),
    "loader": ("msgspec", "numpy", "xxhash", "zstandard"),
}


def require_extra(extra: str) -> None:
    """Raise ConfigError if a module of an extra is not installed. Imports none of them."""
    for module in MODULES[extra]:
        if find_spec(module) is None:
            raise _missing(module, extra)


def require_mount_extras(options: MountOptions) -> None:
    """Raise ConfigError if what a mount with these options needs is not installed."""
    require_extra("pyfuse3" if options.session.fuse_library == "pyfuse3" else "mount")


def missing_package(error: ModuleNotFoundError) -> ConfigError | None:
    """Return what to install for a module that an import did not find; None for a module of no extra."""
    module = (error.name or "").partition(".")[0]
    return next((_missing(module, extra) for extra, modules in MODULES.items() if module in modules), None)


def _missing(module: str, extra: str) -> ConfigError:
    return ConfigError(f"this command needs {module}: {extra_command(extra)}")


def serve(
    load: Callable[[str], MountOptions],
    config: Path | None,
    words: Sequence[str],
    report: int | None,
    ready: Callable[[str], None],
    *,
    is_one_of_several: bool = False,
    is_beside_others: bool = False,
) -> int:
    """Mount, and serve until the end; return the exit status. load, config: as of `begin`; words, report: of
    `become_keeper`.

    ready: called once the mount answers, with a message for the user who mounts. is_one_of_several,
    is_beside_others: as of `DaemonStart`.
    """
    # The other commands need neither FUSE nor botocore.
    from fusecache.daemon.keeping import become_keeper, begin, failures_told

    with failures_told():
        start = replace(
            begin(load, config), is_one_of_several=is_one_of_several, is_beside_others=is_beside_others
        )
        become_keeper(start.options, words, report)
        return _daemon()(start, ready)


def stand_by(report: int | None) -> int | None:
    """If a keeper started this process: import all that a daemon needs, and leave it a copy that waits for its turn.

    report: as of `become_keeper`; returned, None in a process that waited.
    """
    if KEEPER_VARIABLE not in os.environ:
        return report
    from fusecache.daemon.keeping import failures_told, leave_standby

    with failures_told():
        _daemon()
        return leave_standby(report)


def _daemon() -> "Callable[[DaemonStart, Callable[[str], None]], int]":
    """Import the daemon; return what runs it."""
    # Collections while 800 modules are imported took a third of a start's CPU time, and free nothing.
    gc.disable()
    # botocore looks for it first. It brings 60 modules, and the same context as the standard library's.
    sys.modules.setdefault("urllib3.contrib.pyopenssl", None)  # type: ignore[arg-type]  # Python's way to say: not here
    from fusecache.daemon.main import run

    gc.freeze()
    gc.enable()
    return run
