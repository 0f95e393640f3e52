"""The port for Prometheus."""

import socket
import threading
import urllib.request

import pytest
import trio

from fusecache.daemon.metrics_port import ADDRESS, MOST_CONNECTIONS, metrics_served


async def test_connections_for_which_the_system_has_no_thread_do_not_use_up_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server((ADDRESS, 0)) as free:
        port = free.getsockname()[1]

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def connect() -> None:
        with socket.create_connection((ADDRESS, port)) as client:
            assert client.recv(1) == b""  # the server has closed it

    def ask() -> int:
        # The one page that needs no status.
        with urllib.request.urlopen(f"http://{ADDRESS}:{port}/favicon.ico", timeout=10) as answer:
            return int(answer.status)

    with metrics_served(port, dict):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for _ in range(MOST_CONNECTIONS + 1):
                connect()  # in this thread: there is no other
        assert await trio.to_thread.run_sync(ask) == 200
