"""TLS through OpenSSL itself, called with ctypes: many records per call, without the GIL.

Python's `ssl` returns after each record of 16 KiB and takes the GIL again: 65 536 times per GiB. Here one call fills
the whole buffer without the GIL. OpenSSL checks the certificate and the host name as it does for `ssl`. If its library
is not found, `trust` falls back to `ssl`.

Invariants:
1. No byte of a request is sent before the peer's certificate is found valid for the host.
2. A `TlsSocket` belongs to one thread at a time. Only `shutdown` of its socket may come from another thread.
"""

import ctypes
import functools
import ipaddress
import os
import socket
import ssl
from contextlib import suppress

from fusecache.model.errors import ConfigError

# Names and values from OpenSSL's headers ssl.h, bio.h and x509_vfy.h; unchanged since 1.1.0.
_SSL_VERIFY_PEER = 1
_SSL_CTRL_SET_READ_AHEAD = 41
_SSL_CTRL_SET_TLSEXT_HOSTNAME = 55
_SSL_CTRL_SET_MIN_PROTO_VERSION = 123
_TLS1_2_VERSION = 0x0303
_X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS = 4
_X509_V_OK = 0
_BIO_C_SET_SSL = 109
_BIO_FLAGS_SHOULD_RETRY = 8
_SSL_ERROR_WANT = (2, 3)
# Accept a peer that closes without TLS's close_notify: the length of a body shows whether it is complete.
_SSL_OP_IGNORE_UNEXPECTED_EOF = 1 << 7
_FAILED = int(ssl.SSL_ERROR_SSL)
_OLDEST_VERSION = 0x10101000  # 1.1.1: TLS 1.3, and reads that handle renegotiation themselves
# Bytes per receive call of the kernel: eight records, instead of one record in two calls.
_READ_BUFFER_BYTES = 128 * 1024

_POINTER, _INT, _LONG, _TEXT, _SIZE = (
    ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_char_p, ctypes.c_size_t,
)  # fmt: skip
# Functions that may wait for the network: called without the GIL.
_WAITING = {
    "SSL_connect": (_INT, _POINTER),
    "SSL_read": (_INT, _POINTER, _POINTER, _INT),
    "SSL_write": (_INT, _POINTER, _TEXT, _INT),
    "BIO_read": (_INT, _POINTER, _POINTER, _INT),
}
_QUICK = {
    "BIO_ctrl": (_LONG, _POINTER, _INT, _LONG, _POINTER),
    "BIO_ctrl_pending": (_SIZE, _POINTER),
    "BIO_f_buffer": (_POINTER,),
    "BIO_f_ssl": (_POINTER,),
    "BIO_free_all": (None, _POINTER),
    "BIO_new": (_POINTER, _POINTER),
    "BIO_push": (_POINTER, _POINTER, _POINTER),
    "BIO_test_flags": (_INT, _POINTER, _INT),
    "ERR_clear_error": (None,),
    "ERR_error_string_n": (None, ctypes.c_ulong, _POINTER, _SIZE),
    "ERR_peek_error": (ctypes.c_ulong,),
    "OpenSSL_version_num": (ctypes.c_ulong,),
    "SSL_CTX_ctrl": (_LONG, _POINTER, _INT, _LONG, _POINTER),
    "SSL_CTX_free": (None, _POINTER),
    "SSL_CTX_load_verify_locations": (_INT, _POINTER, _TEXT, _TEXT),
    "SSL_CTX_new": (_POINTER, _POINTER),
    "SSL_CTX_set_default_read_buffer_len": (None, _POINTER, _SIZE),
    "SSL_CTX_set_options": (ctypes.c_uint64, _POINTER, ctypes.c_uint64),
    "SSL_CTX_set_verify": (None, _POINTER, _INT, _POINTER),
    "SSL_ctrl": (_LONG, _POINTER, _INT, _LONG, _TEXT),
    "SSL_free": (None, _POINTER),
    "SSL_get0_param": (_POINTER, _POINTER),
    "SSL_get_error": (_INT, _POINTER, _INT),
    "SSL_get_verify_result": (_LONG, _POINTER),
    "SSL_has_pending": (_INT, _POINTER),
    "SSL_new": (_POINTER, _POINTER),
    "SSL_set1_host": (_INT, _POINTER, _TEXT),
    "SSL_set_fd": (_INT, _POINTER, _INT),
    "SSL_set_hostflags": (None, _POINTER, ctypes.c_uint),
    "TLS_client_method": (_POINTER,),
    "X509_VERIFY_PARAM_set1_ip_asc": (_INT, _POINTER, _TEXT),
    "X509_verify_cert_error_string": (_TEXT, _LONG),
}


class _Library:
    """The functions of libssl and libcrypto, by their names."""

    def __init__(self, name: str) -> None:
        # Opening libssl is enough: the dynamic loader also searches its dependency libcrypto.
        waiting, quick = ctypes.CDLL(name), ctypes.PyDLL(name)
        for functions, library in ((_WAITING, waiting), (_QUICK, quick)):
            for function, (result, *arguments) in functions.items():
                call = getattr(library, function)
                call.restype, call.argtypes = result, arguments
                setattr(self, function, call)

    def __getattr__(self, name: str) -> "ctypes._NamedFuncPointer":
        raise AttributeError(name)


@functools.cache
def library() -> _Library | None:
    """Return OpenSSL, if the version that `ssl` was built with exists as a shared library."""
    major = ssl.OPENSSL_VERSION_INFO[0]
    for name in (f"libssl.so.{major}", "libssl.so.1.1") if major == 1 else (f"libssl.so.{major}",):
        with suppress(OSError, AttributeError):
            found = _Library(name)
            if found.OpenSSL_version_num() >= _OLDEST_VERSION:
                return found
    return None


def trust(path: str | None) -> "TlsContext | ssl.SSLContext":
    """Trust the CAs in a file or directory; None: those of SSL_CERT_FILE and SSL_CERT_DIR, or the system's.

    Raises ConfigError if there are none.
    """
    openssl, paths = library(), ssl.get_default_verify_paths()
    cafile: str | None = path or paths.cafile
    capath: str | None = None if path else paths.capath
    if path is not None and os.path.isdir(path):
        cafile, capath = None, path
    try:
        if openssl is not None:
            return TlsContext(openssl, cafile=cafile, capath=capath)
        return ssl.create_default_context(cafile=cafile, capath=capath)
    except OSError as exc:  # also SSLError
        raise ConfigError(
            f"no CA certificates: {exc}; install ca-certificates, or name a file as AWS_CA_BUNDLE (S3) or SSL_CERT_FILE"
        ) from exc


class TlsContext:
    """The trusted CAs: from a file, or from a directory made by `openssl rehash`. Raises SSLError from __init__."""

    def __init__(self, openssl: _Library, *, cafile: str | None, capath: str | None) -> None:
        self._openssl = openssl
        self.trusted = (cafile, capath)
        openssl.ERR_clear_error()
        self._context = openssl.SSL_CTX_new(openssl.TLS_client_method())
        if not self._context:
            raise _error(_reason(openssl))
        openssl.SSL_CTX_ctrl(self._context, _SSL_CTRL_SET_MIN_PROTO_VERSION, _TLS1_2_VERSION, None)
        openssl.SSL_CTX_set_options(self._context, _SSL_OP_IGNORE_UNEXPECTED_EOF)
        openssl.SSL_CTX_set_verify(self._context, _SSL_VERIFY_PEER, None)
        openssl.SSL_CTX_ctrl(self._context, _SSL_CTRL_SET_READ_AHEAD, 1, None)
        openssl.SSL_CTX_set_default_read_buffer_len(self._context, _READ_BUFFER_BYTES)
        places = [None if place is None else place.encode() for place in (cafile, capath)]
        if openssl.SSL_CTX_load_verify_locations(self._context, *places) != 1:
            raise _error(f"{cafile or capath}: no CA certificates ({_reason(openssl)})")

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._openssl.SSL_CTX_free(self._context)

    def connect(self, sock: socket.socket, host: str) -> "TlsSocket":
        """Do the TLS handshake over a connected socket and check that the peer is `host`. The socket's timeouts apply.

        Raises SSLError, SSLCertVerificationError, TimeoutError, ConnectionError.
        """
        return TlsSocket(self._openssl, self._context, sock, host)


class TlsSocket:
    """A TLS connection over a socket, which the caller still owns: to shut down, to poll, and to close after this."""

    def __init__(self, openssl: _Library, context: int, sock: socket.socket, host: str) -> None:
        self._openssl = openssl
        self._chain: int | None = None
        openssl.ERR_clear_error()
        self._ssl: int | None = openssl.SSL_new(context)
        try:
            if not self._ssl or openssl.SSL_set_fd(self._ssl, sock.fileno()) != 1:
                raise _error(_reason(openssl))
            self._expect(host)
            self._shake_hands(host)
            self._chain = self._readers_chain()
        except BaseException:
            self.close()
            raise

    def recv_into(self, buffer: memoryview) -> int:
        """Receive until the buffer is full or the socket's timeout ends; return the byte count, 0 at the end.

        Raises BlockingIOError if nothing came in that time, SSLError, OSError.
        """
        openssl = self._openssl
        openssl.ERR_clear_error()
        target = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        count: int = openssl.BIO_read(self._chain, target, len(buffer))
        if count > 0:
            return count
        return self._nothing(is_late=bool(openssl.BIO_test_flags(self._chain, _BIO_FLAGS_SHOULD_RETRY)))

    def recv_some_into(self, buffer: memoryview) -> int:
        """Receive the bytes that are available, else the next ones; return 0 at the end. Raises like `recv_into`."""
        openssl = self._openssl
        if waiting := openssl.BIO_ctrl_pending(self._chain):
            return self.recv_into(buffer[:waiting])
        openssl.ERR_clear_error()
        target = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        count: int = openssl.SSL_read(self._ssl, target, len(buffer))
        if count > 0:
            return count
        return self._nothing(is_late=openssl.SSL_get_error(self._ssl, count) in _SSL_ERROR_WANT)

    def sendall(self, data: bytes | memoryview) -> None:
        """Send all bytes. A memoryview, which must be writable, is sent without a copy.

        Raises TimeoutError, SSLError, ConnectionError.
        """
        self._openssl.ERR_clear_error()
        if isinstance(data, memoryview):
            data = (ctypes.c_char * len(data)).from_buffer(data)  # type: ignore[assignment]
        count: int = self._openssl.SSL_write(self._ssl, data, len(data))
        if count <= 0:
            raise self._failure(count, "sending")

    def has_pending(self) -> bool:
        """Return whether received bytes are still unread, decrypted or not."""
        return bool(self._openssl.SSL_has_pending(self._ssl) or self._openssl.BIO_ctrl_pending(self._chain))

    def close(self) -> None:
        """Free the connection without close_notify. A second call does nothing."""
        chain, self._chain = self._chain, None
        if chain is not None:
            self._openssl.BIO_free_all(chain)
        freed, self._ssl = self._ssl, None
        if freed is not None:
            self._openssl.SSL_free(freed)

    def __del__(self) -> None:
        self.close()

    # ---- private

    def _expect(self, host: str) -> None:
        """Make OpenSSL check that the certificate is for `host`."""
        openssl, name = self._openssl, host.encode("idna" if not host.isascii() else "ascii")
        openssl.SSL_set_hostflags(self._ssl, _X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            is_set = openssl.SSL_set1_host(self._ssl, name)
            is_set &= openssl.SSL_ctrl(self._ssl, _SSL_CTRL_SET_TLSEXT_HOSTNAME, 0, name)
        else:
            is_set = openssl.X509_VERIFY_PARAM_set1_ip_asc(openssl.SSL_get0_param(self._ssl), name)
        if is_set != 1:
            raise _error(f"{host}: not a valid host name for a certificate check")

    def _shake_hands(self, host: str) -> None:
        result: int = self._openssl.SSL_connect(self._ssl)
        verified: int = self._openssl.SSL_get_verify_result(self._ssl)
        if verified != _X509_V_OK:
            why = self._openssl.X509_verify_cert_error_string(verified).decode()
            raise ssl.SSLCertVerificationError(_FAILED, f"certificate verify failed for {host}: {why}")
        if result != 1:
            raise self._failure(result, "the TLS handshake")

    def _readers_chain(self) -> int:
        """Return a BIO that reads until the buffer is full: BIO_f_buffer does this, BIO_f_ssl below it does not."""
        openssl = self._openssl
        below = openssl.BIO_new(openssl.BIO_f_ssl())
        above = openssl.BIO_new(openssl.BIO_f_buffer())
        if not below or not above:
            raise MemoryError("OpenSSL: out of memory for a connection")
        openssl.BIO_ctrl(below, _BIO_C_SET_SSL, 0, self._ssl)
        chain: int = openssl.BIO_push(above, below)
        return chain

    def _nothing(self, *, is_late: bool) -> int:
        """Raise the reason why nothing was received; return 0 if the connection has ended."""
        if is_late:
            raise BlockingIOError("nothing came in time")
        if self._openssl.ERR_peek_error():
            raise _error(_reason(self._openssl))
        return 0

    def _failure(self, result: int, what: str) -> OSError:
        if self._openssl.SSL_get_error(self._ssl, result) in _SSL_ERROR_WANT:
            return TimeoutError(f"timed out: {what}")
        if self._openssl.ERR_peek_error():
            return _error(f"{what} failed: {_reason(self._openssl)}")
        return ConnectionError(f"{what} failed: the connection ended")


def _error(text: str) -> ssl.SSLError:
    return ssl.SSLError(_FAILED, text)


def _reason(openssl: _Library) -> str:
    text = ctypes.create_string_buffer(256)
    openssl.ERR_error_string_n(openssl.ERR_peek_error(), text, len(text))
    return text.value.decode("utf-8", "replace")
