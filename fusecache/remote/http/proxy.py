"""The HTTP proxy that the environment names: HTTP_PROXY, HTTPS_PROXY and NO_PROXY, also in lower case."""

import base64
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from fusecache.model.errors import ConfigError

_HEAD_BYTES = 16384


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy. authorization: the value of its header, from the user name and the password in its URL, or empty."""

    host: str
    port: int
    authorization: str = field(default="", repr=False)


def proxy_for(url: str) -> Proxy | None:
    """Return the proxy for requests to a URL; None if they go straight there. Raises ConfigError."""
    target = urlsplit(url)
    chosen = getproxies().get(target.scheme)
    if not chosen or proxy_bypass(target.netloc):
        return None
    parts = urlsplit(chosen if "://" in chosen else f"http://{chosen}")
    variable = f"{target.scheme.upper()}_PROXY"
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        raise ConfigError(
            f"{variable} = {shown}: a proxy must be like http://HOST:PORT; change it, or add {target.hostname} to "
            "NO_PROXY"
        )
    authorization = ""
    if parts.username is not None:
        keys = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {base64.b64encode(keys.encode()).decode('ascii')}"
    return Proxy(parts.hostname, port, authorization)


def open_tunnel(sock: socket.socket, proxy: Proxy, host: str, port: int, seconds: float) -> None:
    """Have the proxy at the other end of `sock` connect to a server: what is sent then goes there.

    Raises ConnectionError if the proxy refuses, OSError.
    """
    host = host if host.isascii() else host.encode("idna").decode("ascii")
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    request = f"CONNECT {name} HTTP/1.1\r\nhost: {name}\r\n"
    if proxy.authorization:
        request += f"proxy-authorization: {proxy.authorization}\r\n"
    sock.sendall(f"{request}\r\n".encode("ascii"))
    head, deadline = b"", time.monotonic() + seconds
    while b"\r\n\r\n" not in head:
        piece = sock.recv(_HEAD_BYTES)
        head += piece
        if not piece or len(head) > _HEAD_BYTES:
            raise ConnectionError(f"the proxy {proxy.host}:{proxy.port} ended its response too early")
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out: the proxy {proxy.host}:{proxy.port}")
    line = head.partition(b"\r\n")[0].decode("latin-1")
    if line.split(" ")[1:2] != ["200"]:
        hint = "; put USER:PASSWORD@ before its host in HTTPS_PROXY" if " 407 " in f"{line} " else ""
        raise ConnectionError(f"the proxy {proxy.host}:{proxy.port} connects to no {name}: {line}{hint}")
