"""The nodes that the option `peers` names, looked up again and again: a list, a file, a DNS name, a job of Slurm.

A list that cannot be looked up stays as it was: a wrong list costs requests, and nothing else.
"""

import logging
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import trio

from fusecache.config.options import MountOptions
from fusecache.config.values import is_host_port
from fusecache.daemon.bucket_link import endpoint_fact
from fusecache.disk.cache_files import granule_checksums
from fusecache.model.errors import ConfigError
from fusecache.remote.endpoints import read_secret
from fusecache.remote.http.peers import PeerNodes
from fusecache.remote.protocol.signing import mount_digest, peer_secret

log = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
NO_PEERS = PeerNodes("", "", granule_checksums)
SLURM_VARIABLE = "SLURM_JOB_NODELIST"
_MOST_NODES = 4096
_SLURM_PART = re.compile(r"([^\[\],]+)(?:\[([0-9,-]+)\])?([^\[\],]*)(?:,|$)")


def open_peers(
    options: MountOptions, carry: Callable[[Any, Any, bytes], Literal[True] | None] | None = None
) -> PeerNodes | None:
    """Return the peers of a mount, none of them known yet; None if it has none. carry: as for `PeerNodes`.

    Raises ConfigError.
    """
    requests = options.requests
    if not requests.peers:
        return None
    assert requests.peers_key_file is not None
    shared = read_secret("peers_key_file", requests.peers_key_file)
    place = endpoint_fact(options), options.source
    secret, mount = peer_secret(shared, *place), mount_digest(*place)
    return PeerNodes(options.bucket, secret, granule_checksums, mount, carry)


class PeerList:
    """Keeps the peers as the option names them."""

    def __init__(self, peers: PeerNodes, options: MountOptions, environment: Mapping[str, str]) -> None:
        self._peers = peers
        self._entries = options.requests.peers
        self._own = options.requests.peer_address or ""
        self._environment = environment
        self._said = ""

    async def run(self) -> None:
        """Look the nodes up until cancelled."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Look the nodes up once."""
        try:
            nodes, own = await trio.to_thread.run_sync(self._found, abandon_on_cancel=True)
        except (OSError, ValueError) as exc:
            self._peers.list_error = f"peers={','.join(self._entries)}: {exc}"
            self._say(f"{self._peers.list_error}; the nodes known before stay")
            return
        self._peers.set_nodes(nodes, own)
        self._peers.list_error = ""
        hint = self._hint(own, nodes)
        self._say(f"peers nodes={len(nodes)} own={own or 'none'}{hint and '; '}{hint}", is_fine=not hint)

    def _hint(self, own: str, nodes: Sequence[str]) -> str:
        host = own.rpartition(":")[0]
        if not nodes or (own and self._own):
            return ""
        if self._own:
            return f"this node is not among them: peer_address={self._own} is none of these"
        if not own:
            return "this node is not among them: set peer_address to its own HOST:PORT"
        if sum(node.rpartition(":")[0] == host for node in nodes) > 1:
            return f"several of them are at {host}: set peer_address to this node's own HOST:PORT"
        return ""

    def _say(self, text: str, *, is_fine: bool = False) -> None:
        if text != self._said:
            self._said = text
            log.log(logging.INFO if is_fine else logging.WARNING, "%s", text)

    def _found(self) -> tuple[tuple[str, ...], str]:
        nodes = tuple(sorted(set(nodes_of(self._entries, self._environment))))
        if len(nodes) > _MOST_NODES:
            raise ValueError(f"{len(nodes)} nodes, of at most {_MOST_NODES}")
        if self._own:
            return nodes, self._own if self._own in nodes else ""
        return nodes, next((node for node in nodes if _is_here(node)), "")


def check_entries(entries: Sequence[str]) -> None:
    """Raise ConfigError for an entry of `peers` that names no nodes."""
    for entry in entries:
        kind, _, rest = entry.partition(":")
        is_good = {
            "file": bool(rest),
            "slurm": is_host_port(f"node:{rest}"),
            "dns": is_host_port(rest),
        }
        if not is_good.get(kind, is_host_port(entry)):
            raise ConfigError(f"peers: {entry}: allowed is HOST:PORT, file:PATH, dns:NAME:PORT or slurm:PORT")


def nodes_of(entries: Iterable[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the nodes as HOST:PORT. Raises OSError, ValueError. Blocks."""
    for entry in entries:
        kind, _, rest = entry.partition(":")
        if kind == "file":
            lines = (line.partition("#")[0].strip() for line in Path(rest).read_text().splitlines())
            yield from (_checked(line, rest) for line in lines if line)
        elif kind == "dns":
            name, _, port = rest.rpartition(":")
            yield from (_address(*each) for each in one_kind(_addresses(name, port)))
        elif kind == "slurm":
            if SLURM_VARIABLE not in environment:
                raise ValueError(f"{SLURM_VARIABLE} is not set: start the mount within the job")
            yield from (f"{host}:{rest}" for host in slurm_hosts(environment[SLURM_VARIABLE]))
        else:
            yield entry


def one_kind(addresses: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """Return the addresses of IPv4 if there are any: a node that has both kinds counts once."""
    return [each for each in addresses if ":" not in each[0]] or addresses


def slurm_hosts(text: str) -> list[str]:
    """Return the hosts of a node list of Slurm, such as `gpu[01-03,7],login`. Raises ValueError."""
    hosts: list[str] = []
    at = 0
    while at < len(text):
        match = _SLURM_PART.match(text, at)
        if match is None:
            raise ValueError(f"{SLURM_VARIABLE}={text}: not a list of nodes")
        front, ranges, end = match.groups()
        at = match.end()
        for each in (ranges or "").split(","):
            first, _, last = each.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else [None]
            if len(hosts) + len(numbers) > _MOST_NODES:
                raise ValueError(f"{SLURM_VARIABLE}={text}: more than {_MOST_NODES} nodes")
            hosts += [f"{front}{'' if n is None else str(n).zfill(len(first))}{end}" for n in numbers]
    return hosts


def _checked(node: str, path: str) -> str:
    if not is_host_port(node):
        raise ValueError(f"{path}: {node!r} is not HOST:PORT")
    return node


def _addresses(host: str, port: str) -> list[tuple[str, str]]:
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return sorted({(str(address[0]), port) for *_, address in found})


def _address(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_here(node: str) -> bool:
    """Return whether an address is one of this node's: only such can be bound."""
    host, _, port = node.rpartition(":")
    with suppress(OSError):
        for address, _ in _addresses(host, port):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe, suppress(OSError):
                probe.bind((address, 0))
                return True
    return False
