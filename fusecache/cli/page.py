"""`fusecache page`: where the web pages of the mounts are, and how to open them from another machine."""

import argparse
import getpass
import shlex
import socket
from collections.abc import Sequence
from contextlib import suppress

from fusecache.cli.say import print_line, say_error
from fusecache.cli.views.status import status_of
from fusecache.config.values import split_http_address
from fusecache.model.errors import MountError
from fusecache.mount.bucket_folders import mounts_in
from fusecache.mount.mount_table import our_mountpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `fusecache page` takes."""
    parser.add_argument("paths", nargs="*", metavar="PATH", help="paths in the mounts [all mounts]")
    parser.set_defaults(run=page, parser=parser)


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
