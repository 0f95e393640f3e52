"""TLS of reads by OpenSSL: whom it trusts, what it says of those it does not, and that it ends in time."""

import socket
import ssl
import struct
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fusecache.model.errors import ObjectMissing, Unavailable
from fusecache.model.objects import MIB, Extent, ObjectId
from fusecache.remote.http import connection_pool, tls
from fusecache.remote.http.tls import TlsContext, library
from fusecache.remote.store import FileSlice
from tests.contract.conftest import ONCE, s3_store
from tests.s3server import Fault, FaultAction, S3Server
from tests.s3server.certificate import make_certificate

DATA = bytes(range(256)) * 4096 * 3  # 3 MiB


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, ssl.SSLContext]:
    return make_certificate(tmp_path)


def trusting(certificate: Path) -> TlsContext:
    openssl = library()
    assert openssl is not None, "the tests' machine has OpenSSL as a shared library"
    return TlsContext(openssl, cafile=str(certificate), capath=None)


def set_patience(client: socket.socket, seconds: int) -> None:
    """Have the kernel bound each call, as `Connection` does."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


@contextmanager
def accepted(context: ssl.SSLContext | None) -> Iterator[socket.socket]:
    """Yield a client's socket whose peer shakes hands by `context`; None: it is silent."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = listener.accept()
            with closing(connection):
                if context is None:
                    done.wait(20)
                    return
                try:
                    with context.wrap_socket(connection, server_side=True) as secure:
                        secure.recv(1)
                except OSError:
                    return

        done = threading.Event()
        pool.submit(serve)
        with socket.create_connection(listener.getsockname()) as client:
            set_patience(client, 1 if context is None else 10)
            try:
                yield client
            finally:
                done.set()


def test_large_and_small_reads_of_many_threads_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(tls=True) as server:
        object_id = ObjectId("a", server.control.put("a", DATA))
        monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca_path))
        store = s3_store(server, ONCE)

        def read(start: int) -> bool:
            stop = len(DATA) if start % 2 else min(start + 1000, len(DATA))
            buffer = bytearray(stop - start)
            store.get_into(object_id, Extent(start, stop), memoryview(buffer), lambda count: None)
            return buffer == DATA[start:stop]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(0, len(DATA), 24_571)))
        assert len({entry.connection for entry in server.control.log("GetObject")}) < 20


def test_an_answer_that_is_whole_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Connections stay open: what follows an answer is silence, for as long as one is patient."""
    monkeypatch.setattr(connection_pool, "MAX_RECEIVE_WAIT_SECONDS", 30.0)
    path = tmp_path / "body"
    path.write_bytes(DATA[:5000])
    with S3Server(tls=True) as server:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca_path))
        store = s3_store(server, replace(ONCE, read_timeout_seconds=60.0))
        began = time.monotonic()
        for size in (0, 1, 5000):
            key = f"{size} bytes"
            etag = store.put(key, FileSlice(str(path), 0, size), metadata={})
            buffer = bytearray(size)
            if size:
                whole = Extent(0, size)
                store.get_into(ObjectId(key, etag), whole, memoryview(buffer), lambda count: None)
            assert buffer == DATA[:size]
            store.delete(key)
            with pytest.raises(ObjectMissing):
                store.get_into(
                    ObjectId(key, etag), Extent(0, 1), memoryview(bytearray(1)), lambda count: None
                )
        assert time.monotonic() - began < 20


def test_what_is_here_is_received_and_nothing_is_waited_for(certificate: tuple[Path, ssl.SSLContext]) -> None:
    path, context = certificate
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, ThreadPoolExecutor(1) as pool, socket.create_connection(listener.getsockname()) as client:
        accepting = pool.submit(lambda: context.wrap_socket(listener.accept()[0], server_side=True))
        set_patience(client, 10)
        with closing(trusting(path).connect(client, "localhost")) as secure, accepting.result() as peer:
            view = memoryview(bytearray(9000))
            peer.sendall(b"abc")
            assert secure.recv_some_into(view) == 3
            peer.sendall(b"12345")
            assert secure.recv_into(view[:2]) == 2  # what it received beyond lies there
            assert secure.recv_some_into(view[2:]) == 3
            assert view[:5] == b"12345"
            set_patience(client, 1)
            with pytest.raises(BlockingIOError):
                secure.recv_some_into(view)
            set_patience(client, 10)
            peer.sendall(DATA[:9000])
            assert secure.recv_into(view) == 9000
            assert view == DATA[:9000]
            peer.shutdown(socket.SHUT_WR)
            assert secure.recv_some_into(view) == 0


def test_reads_go_on_where_the_library_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(tls=True) as server:
        object_id = ObjectId("a", server.control.put("a", DATA))
        monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca_path))
        monkeypatch.setattr(tls, "library", lambda: None)
        store = s3_store(server, ONCE)
        for _ in range(2):
            buffer = bytearray(len(DATA))
            store.get_into(object_id, Extent(0, len(DATA)), memoryview(buffer), lambda count: None)
            assert buffer == DATA


def test_a_body_that_is_cut_is_no_body(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server(tls=True) as server:
        object_id = ObjectId("a", server.control.put("a", DATA))
        monkeypatch.setenv("AWS_CA_BUNDLE", str(server.ca_path))
        store = s3_store(server, ONCE)
        buffer = bytearray(len(DATA))
        store.get_into(object_id, Extent(0, 1), memoryview(buffer)[:1], lambda count: None)
        server.control.faults(Fault(FaultAction.SHORT_BODY, operation="GetObject", after_bytes=MIB))
        reports: list[int] = []
        with pytest.raises(Unavailable):
            store.get_into(object_id, Extent(0, len(DATA)), memoryview(buffer), reports.append)
        assert reports
        assert reports[-1] <= MIB
        assert buffer[: reports[-1]] == DATA[: reports[-1]]


def test_a_certificate_for_another_host_is_refused(certificate: tuple[Path, ssl.SSLContext]) -> None:
    path, context = certificate
    for host in ("bucket.example.org", "127.0.0.2", "::1"):
        with accepted(context) as client, pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
            trusting(path).connect(client, host)
    for host in ("localhost", "127.0.0.1"):
        with accepted(context) as client:
            trusting(path).connect(client, host).close()


def test_a_certificate_of_an_unknown_authority_is_refused(
    certificate: tuple[Path, ssl.SSLContext], tmp_path: Path
) -> None:
    _, context = certificate
    other, _ = make_certificate(tmp_path / "other")
    with accepted(context) as client, pytest.raises(ssl.SSLCertVerificationError, match="self-signed"):
        trusting(other).connect(client, "localhost")


def test_a_peer_that_never_shakes_hands_is_given_up(certificate: tuple[Path, ssl.SSLContext]) -> None:
    with accepted(None) as client, pytest.raises(TimeoutError):
        trusting(certificate[0]).connect(client, "localhost")


def test_a_peer_that_speaks_no_tls_is_named(certificate: tuple[Path, ssl.SSLContext]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, socket.create_connection(listener.getsockname()) as client:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(ssl.SSLError, match="handshake failed"):
                trusting(certificate[0]).connect(client, "localhost")


def test_an_old_protocol_is_refused(certificate: tuple[Path, ssl.SSLContext]) -> None:
    path, context = certificate
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    with accepted(context) as client, pytest.raises(OSError, match="handshake failed"):
        trusting(path).connect(client, "localhost")


def test_a_file_without_certificates_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").touch()
    with pytest.raises(ssl.SSLError, match=r"empty\.pem"):
        trusting(tmp_path / "empty.pem")
