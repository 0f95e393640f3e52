"""`fusecache metrics`: the numbers of a mount for Prometheus, printed or written for node-exporter."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fusecache.cli.extras import require_extra
from fusecache.cli.say import write_whole
from fusecache.cli.views.status import status_of
from fusecache.model.errors import ConfigError
from fusecache.mount.launch import mount_of_this_node
from fusecache.mount.metrics import metrics_text
from fusecache.mount.mount_table import root_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `fusecache metrics` takes."""
    parser.add_argument(
        "mount", nargs="?", help="a path in a mount [the working directory, or the only mount]"
    )
    parser.add_argument(
        "--textfile",
        type=Path,
        metavar="PATH",
        help="write to this file, NAME.prom in the directory of node-exporter's textfile collector, in its format; "
        "the file is whole at any moment",
    )
    parser.set_defaults(run=metrics, parser=parser)


def metrics(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the metrics of a mount as OpenMetrics, or write them to a file; return the exit status."""
    require_extra("metrics")
    path: Path | None = arguments.textfile
    if path is not None and path.suffix != ".prom":
        raise ConfigError(f"--textfile {path}: node-exporter reads only files named *.prom")
    place = arguments.mount or mount_of_this_node(Path.cwd())
    text = metrics_text(status_of(root_of(place) or place), is_open_metrics=path is None)
    if path is None:
        sys.stdout.write(text.decode())
    else:
        write_whole(path, text)  # node-exporter is another user
    return 0
