"""The process of `fusecache serve`: its keys, its certificate, its listener, its end."""

import logging
import signal
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import trio

from fusecache.config.values import split_http_address
from fusecache.model.errors import ConfigError, MountError
from fusecache.mount.control_client import Mount
from fusecache.remote.endpoints import read_secret
from fusecache.remote.protocol.signing import PEER_KEY, mount_digest, peer_secret
from fusecache.serve.objects import DaemonObjects
from fusecache.serve.server import ObjectServer
from fusecache.serve.signature import CLIENT_KEY, SignatureCheck


@dataclass(frozen=True, slots=True)
class Door:
    """What is served, and how. endpoint, source: of the mount; key_file: of clients. without_keys: clients need no
    signature."""

    mount: Mount
    endpoint: str
    source: str
    address: str
    key_file: Path | None = None
    peers_key_file: Path | None = None
    certificate: Path | None = None
    certificate_key: Path | None = None
    without_keys: bool = False


def run(door: Door, say: Callable[[str], None]) -> bool:
    """Serve until SIGTERM or SIGINT. say: gets a line once it serves.

    Returns True once another daemon serves the mount, with another cache directory and perhaps another source: serve
    that. Raises ConfigError, MountError.
    """
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    secrets = {} if door.key_file is None else {CLIENT_KEY: read_secret("--key-file", door.key_file)}
    if door.peers_key_file is not None:
        shared = read_secret("--peers-key-file", door.peers_key_file)
        secrets[PEER_KEY] = peer_secret(shared, door.endpoint, door.source)
    bucket = door.source.partition("://")[2].partition("/")[0]
    mount = mount_digest(door.endpoint, door.source)
    check = SignatureCheck(secrets, needs_signature=not door.without_keys, mount=mount)
    objects = DaemonObjects(door.mount)
    server = ObjectServer(bucket, objects, check, _tls_of(door))
    trio.run(_serve, server, door, bucket, objects.is_replaced, say)
    return objects.is_replaced.is_set()


def _tls_of(door: Door) -> ssl.SSLContext | None:
    if door.certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(door.certificate, door.certificate_key)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(
            f"--certificate {door.certificate}: {exc.strerror or exc}; it needs the chain and the key as PEM"
        ) from exc
    return context


async def _serve(
    server: ObjectServer, door: Door, bucket: str, is_replaced: trio.Event, say: Callable[[str], None]
) -> None:
    host, port = split_http_address(door.address)
    try:
        listeners = await trio.open_tcp_listeners(port, host=host, backlog=1024)
    except OSError as exc:
        raise MountError(
            f"--listen {door.address}: {exc.strerror or exc}; choose a free port, and an address of this node"
        ) from exc
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run, listeners)
            scheme = "http" if door.certificate is None else "https"
            port = listeners[0].socket.getsockname()[1]
            shown = f"[{host}]" if ":" in host else host
            say(f"s3://{bucket} of {door.mount.root} is at {scheme}://{shown}:{port}")
            nursery.start_soon(_end_after, is_replaced.wait, nursery.cancel_scope)
            nursery.start_soon(_end_after, signals.__anext__, nursery.cancel_scope)


async def _end_after(wait: Callable[[], Awaitable[object]], scope: trio.CancelScope) -> None:
    await wait()
    scope.cancel()
