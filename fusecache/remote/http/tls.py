"""TLS by Python's `ssl` in memory, over a socket that is read in large pieces.

`SSLSocket` asks the kernel twice for each record of 16 KiB. Here one call receives up to RECEIVE_BYTES, and `ssl`
decrypts from memory: a sixth less CPU (benchmarks/http_clients.py).

Invariants:
1. No byte of a request is sent before the peer's certificate is found valid for the host.
2. A `TlsSocket` belongs to one thread at a time. Only `shutdown` of its socket may come from another thread.
"""

import socket
import ssl

# Eight records for each call of the kernel; the copy stays in the processor's cache.
RECEIVE_BYTES = 128 * 1024
# A record's largest content (RFC 8446, 5.1).
RECORD_BYTES = 16 * 1024


def tls_context(*, cafile: str | None, capath: str | None) -> ssl.SSLContext:
    """Return a context that trusts the CAs of a file, or of a directory made by `openssl rehash`. Raises SSLError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cafile, capath)
    except ssl.SSLError as exc:
        raise ssl.SSLError(f"{cafile or capath}: no CA certificates ({exc})") from exc
    return context


class TlsSocket:
    """A TLS connection over a socket, which the caller still owns: to shut down, to poll, and to close after this."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        """Do the handshake over a connected socket and check that the peer is `host`. The socket's timeouts apply.

        Raises SSLError, SSLCertVerificationError, TimeoutError, ConnectionError.
        """
        self._socket = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._piece = memoryview(bytearray(RECEIVE_BYTES))
        try:
            self._shake_hands()
        except ssl.SSLCertVerificationError:
            raise
        except BlockingIOError:
            raise TimeoutError("timed out: the TLS handshake") from None
        except ssl.SSLError as exc:
            raise ssl.SSLError(f"the TLS handshake failed: {exc}") from exc

    def recv_into(self, buffer: memoryview) -> int:
        """Receive until the buffer is full or the socket's timeout ends; return the byte count, 0 at the end.

        Raises BlockingIOError if nothing came in that time, SSLError, OSError.
        """
        filled = 0
        try:
            while filled < len(buffer):
                count = self.recv_some_into(buffer[filled:])
                if not count:
                    break
                filled += count
        except BlockingIOError:
            if not filled:
                raise
        return filled

    def recv_some_into(self, buffer: memoryview) -> int:
        """Receive the bytes that are available, else the next ones; return 0 at the end. Raises like `recv_into`."""
        while True:
            try:
                return self._tls.read(len(buffer), buffer)  # type: ignore[return-value]  # a count, with a buffer
            except ssl.SSLWantReadError:
                self._receive()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0  # without close_notify too: the length of a body shows whether it is complete

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all bytes. Raises TimeoutError, SSLError, ConnectionError."""
        self._tls.write(data)
        try:
            self._flush()
        except BlockingIOError:
            raise TimeoutError("timed out: sending") from None

    def has_pending(self) -> bool:
        """Return whether received bytes are still unread, decrypted or not."""
        return bool(self._tls.pending() or self._incoming.pending)

    # ---- private

    def _shake_hands(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                self._receive()
            else:
                return self._flush()

    def _receive(self) -> None:
        count = self._socket.recv_into(self._piece)
        if count:
            self._incoming.write(self._piece[:count])
        else:
            self._incoming.write_eof()

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._socket.sendall(self._outgoing.read())
