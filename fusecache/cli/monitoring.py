"""The numbers of a mount outside a terminal: `fusecache metrics` for Prometheus, and `fusecache page` for a browser."""

import argparse
import getpass
import shlex
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fusecache.cli.extras import require_extra
from fusecache.cli.say import print_line, say_error, write_whole
from fusecache.cli.status import status_of
from fusecache.config.values import split_http_address
from fusecache.model.errors import ConfigError, MountError
from fusecache.mount.bucket_folders import mounts_in
from fusecache.mount.launch import mount_of_this_node
from fusecache.mount.metrics import metrics_text
from fusecache.mount.mount_table import our_mountpoints, root_of


def add_arguments(of_metrics: argparse.ArgumentParser, of_page: argparse.ArgumentParser) -> None:
    """Add the arguments of both commands."""
    of_metrics.add_argument(
        "mount", nargs="?", help="a path in a mount [the working directory, or the only mount]"
    )
    of_metrics.add_argument(
        "--textfile",
        type=Path,
        metavar="PATH",
        help="write to this file, NAME.prom in the directory of node-exporter's textfile collector, in its format; "
        "the file is whole at any moment",
    )
    of_metrics.set_defaults(run=metrics, parser=of_metrics)
    of_page.add_argument("paths", nargs="*", metavar="PATH", help="paths in the mounts [all mounts]")
    of_page.set_defaults(run=page, parser=of_page)


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


def page(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the addresses of the pages, and one command of ssh that leads to all of them; return the exit status."""
    places = [str(each) for path in arguments.paths for each in mounts_in(path) or [path]]
    places = places or sorted(our_mountpoints())
    if not places:
        raise MountError("no fusecache mount on this node")
    tunnels, pages, failures = [], [], 0
    for place in places:
        try:
            status = status_of(place)
            address = status["options"].get("http_address")
            if not address:
                raise MountError(
                    f"{status['mountpoint']} has no page: mount it with --http-address 127.0.0.1:9469, or add "
                    'http_address = "127.0.0.1:9469" to its configuration'
                )
        except (MountError, OSError) as exc:
            failures += 1
            say_error(exc)
            continue
        host, port = split_http_address(address)
        # An address for all networks is one of loopback, too.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        shown = f"[{host}]" if ":" in host else host
        print_line(f"{status['mountpoint']}  http://{shown}:{port}/")
        tunnels.append(f"-L {shlex.quote(f'{port}:{shown}:{port}')}")
        pages.append(f"http://localhost:{port}/")
    if tunnels:
        place = socket.gethostname()
        with suppress(KeyError, OSError):  # a user of a container may have no name
            place = f"{getpass.getuser()}@{place}"
        print_line(f"from another machine: ssh -N {' '.join(tunnels)} {place}, then open {' '.join(pages)}")
    return int(failures > 0)
