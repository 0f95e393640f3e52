"""`fusecache serve`: a mount's objects over S3's protocol, read-only, until a signal."""

import argparse
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusecache.cli.say import say
from fusecache.cli.status import status_of
from fusecache.config.values import as_argument, as_http_address, is_of_this_node
from fusecache.model.errors import ConfigError, MountError
from fusecache.mount.control_client import Mount
from fusecache.mount.launch import resolve_in_mount

if TYPE_CHECKING:
    from fusecache.serve.door import Door

_LOOK_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `fusecache serve` takes."""
    parser.add_argument("mount", metavar="MOUNT", help="a path in a mount")
    parser.add_argument(
        "--listen", required=True, type=as_argument(as_http_address), metavar="IP:PORT",
        help="where to serve; a port alone is one of 127.0.0.1",
    )  # fmt: skip
    parser.add_argument(
        "--key-file", type=Path, metavar="FILE",
        help="file with the secret key of clients, 16 characters or more; their access key is `fusecache`; only its "
        "owner may have access (chmod 600)",
    )  # fmt: skip
    parser.add_argument(
        "--peers-key-file", type=Path, metavar="FILE",
        help="file with the key of all nodes, as the mount's option peers_key_file names it: answer other nodes too",
    )  # fmt: skip
    parser.add_argument(
        "--no-keys", action="store_true",
        help="answer requests without a signature, on 127.0.0.1 only: every user of this node may read all objects",
    )  # fmt: skip
    parser.add_argument(
        "--certificate", type=Path, metavar="FILE", help="serve by TLS, with this chain (PEM)"
    )
    parser.add_argument(
        "--certificate-key", type=Path, metavar="FILE", help="the certificate's key [in the same file]"
    )
    parser.set_defaults(run=serve, parser=parser)


def serve(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Serve until a signal; return the exit status."""
    # The other commands need neither trio nor h11.
    from fusecache.serve.door import run

    if arguments.no_keys and not is_of_this_node(arguments.listen):
        raise ConfigError(
            f"--no-keys: every host that reaches {arguments.listen} could read all objects: listen on 127.0.0.1, or "
            "name a --key-file"
        )
    if arguments.no_keys and arguments.key_file:
        raise ConfigError("--no-keys and --key-file: clients need a key or none: leave one of the two out")
    if not (arguments.key_file or arguments.peers_key_file or arguments.no_keys):
        raise ConfigError(
            "name the clients' secret key with --key-file FILE, or the nodes' with --peers-key-file FILE; "
            "on 127.0.0.1, --no-keys needs none"
        )
    if arguments.certificate and arguments.peers_key_file:
        raise ConfigError(
            "--certificate and --peers-key-file: nodes ask each other without TLS: serve them by another process"
        )
    while found := _wait_for_mount(arguments.mount):
        if not run(_door_of(*found, arguments), say):
            break
    return 0


def _door_of(mount: Mount, status: Mapping[str, Any], arguments: argparse.Namespace) -> "Door":
    from fusecache.serve.door import Door  # as above

    is_plain = arguments.peers_key_file or not (arguments.certificate or is_of_this_node(arguments.listen))
    if is_plain and status["options"].get("sse") == "customer":
        raise ConfigError(
            f"{mount.root}: sse = customer:… is for objects that no one else may read, and they would be sent as plain "
            "bytes: serve by TLS with --certificate FILE, or on 127.0.0.1"
        )
    return Door(
        mount,
        str(status["endpoint"]),
        str(status["source"]),
        arguments.listen,
        key_file=arguments.key_file,
        peers_key_file=arguments.peers_key_file,
        certificate=arguments.certificate,
        certificate_key=arguments.certificate_key,
        without_keys=arguments.no_keys,
    )


def _wait_for_mount(path: str) -> tuple[Mount, dict[str, Any]] | None:
    """Return a mount and its status once there is one: it may start after this. None: a signal came first."""
    said = ""
    # Not a handler's work: as process 1 of a container, this one gets no signal that it does not ask for.
    signals = (signal.SIGTERM, signal.SIGINT)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        while True:
            try:
                mount, _inner = resolve_in_mount(path)
                return mount, status_of(str(mount.root))
            except MountError as exc:
                if str(exc) != said:
                    said = str(exc)
                    say(f"waiting: {said}")
            if signal.sigtimedwait(signals, _LOOK_SECONDS) is not None:
                return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
