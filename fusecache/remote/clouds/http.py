"""HTTP for the cloud stores: the connections and bodies of `remote.http`, other signatures, and small requests."""

import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from fusecache.model.errors import ConfigError, Unavailable
from fusecache.model.objects import MIB
from fusecache.remote.clouds.authorization import Sign
from fusecache.remote.endpoints import Transport
from fusecache.remote.http.connection_pool import Connection
from fusecache.remote.http.put import SUCCESS
from fusecache.remote.http.signed_requests import (
    RequestTemplate,
    SignedHttp,
    error_of_body,
    parse_head,
    quoted_key,
    response_of,
)
from fusecache.remote.http.tls import TlsContext, library
from fusecache.remote.protocol.signing import SigningKeys

# Largest response read into memory: a page of 1 000 names of 1 KiB, each character escaped.
_RESPONSE_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Reply:
    """A successful response. headers: names in lower case."""

    headers: Mapping[str, str]
    body: bytes


class CloudHttp(SignedHttp):
    """Requests for the objects of one bucket. Thread-safe."""

    def __init__(
        self,
        url: str,
        base_path: str,
        sign: Sign,
        transport: Transport,
        *,
        common_headers: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """base_path: of the bucket, ending in a slash. common_headers: what every request has, with its date.

        Raises ConfigError if requests would have to go through a proxy, or if there are no CA certificates.
        """
        parts = urlsplit(url)
        host = parts.hostname or ""
        proxy = getproxies().get(parts.scheme)
        if proxy and not proxy_bypass(host):
            raise ConfigError(
                f"{url}: requests of gs:// and az:// go through no proxy ({proxy}); add {host} to NO_PROXY"
            )
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        template = RequestTemplate(
            parts.scheme, host, port, parts.netloc, base_path, region="", user_agent="fusecache"
        )
        super().__init__(template, _trust() if is_tls else None, transport)
        self._sign = sign
        self._common_headers = common_headers

    def request(
        self,
        method: str,
        key: str,
        headers: Mapping[str, str],
        keys: SigningKeys | None = None,
        *,
        query: str = "",
        payload: str = "",
    ) -> bytes:
        """Return a request's head. key: "" is the bucket. keys and payload are not used."""
        path = self.path(key)
        named = {"host": self._template.host_header, **self._common_headers(), **headers}
        query, signed = self._sign(method, path, query, named)
        return self._head(method, path, query, signed)

    def call(
        self,
        what: str,
        method: str,
        key: str = "",
        headers: Mapping[str, str] | None = None,
        *,
        query: str = "",
        body: bytes = b"",
    ) -> Reply:
        """Send a request without a body, or with a small one. Raises the error of the response, and Unavailable."""
        sized = {} if method in ("GET", "HEAD") else {"content-length": str(len(body))}
        request = self.request(method, key, {**(headers or {}), **sized}, query=query) + body
        return self.lend(what, partial(self._ask, what, method, request))

    def path(self, key: str) -> str:
        """Return the path of an object in a URL; of the bucket for ""."""
        base = self._template.base_path
        return base + quoted_key(key) if key else base.removesuffix("/")

    def url(self, key: str) -> str:
        """Return the URL of an object, as a copy names its source."""
        path = self.path(key)
        query, _ = self._sign("GET", path, "", {})
        query = f"?{query}" if query else ""
        return f"{self._template.scheme}://{self._template.host_header}{path}{query}"

    def _ask(self, what: str, method: str, request: bytes, connection: Connection) -> Reply:
        head, rest = connection.exchange(request)
        answer = response_of(connection, head, rest, self.read_timeout, method)
        body = answer.read(_RESPONSE_BYTES)
        if answer.length or not answer.isclosed():
            raise Unavailable(f"{what}: the response is incomplete, or longer than {_RESPONSE_BYTES} bytes")
        connection.is_clean = not answer.will_close
        if answer.status not in SUCCESS:
            raise error_of_body(what, answer, body)
        return Reply(parse_head(head)[1], body)


def _trust() -> TlsContext | ssl.SSLContext:
    """Return the system's trusted CAs, or those of SSL_CERT_FILE and SSL_CERT_DIR."""
    openssl, paths = library(), ssl.get_default_verify_paths()
    if openssl is None:
        return ssl.create_default_context()
    try:
        return TlsContext(openssl, cafile=paths.cafile, capath=paths.capath)
    except ssl.SSLError as exc:
        raise ConfigError(
            f"no CA certificates: {exc}; install ca-certificates, or name a file as SSL_CERT_FILE"
        ) from exc
