"""The server of the page and of /metrics: who gets an answer."""

import base64
import contextlib
import http.client
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from fusecache.config.option_groups import MonitoringOptions
from fusecache.daemon.http_server import MOST_CONNECTIONS, http_served
from fusecache.model.errors import ConfigError, MountError
from fusecache.page.history import RateHistory

TOKEN = "correct horse battery"


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def token_file(folder: Path, token: str = TOKEN, mode: int = 0o600) -> Path:
    path = folder / "token"
    path.write_text(f"{token}\n")
    path.chmod(mode)
    return path


def ask(port: int, path: str = "/missing", method: str = "GET", **headers: str) -> tuple[int, str]:
    """Return status and text of an answer. The path is one that needs no status of a mount."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def answers(
    port: int, *asked: Callable[[], tuple[int, str]], token: Path | None = None, address: str = "127.0.0.1"
) -> list[tuple[int, str]]:
    options = MonitoringOptions(http_address=f"{address}:{port}", http_token_file=token)
    with http_served(options, dict, RateHistory()):
        return [await trio.to_thread.run_sync(each) for each in asked]


async def test_connections_for_which_the_system_has_no_thread_do_not_use_up_the_port(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def connect() -> None:
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert client.recv(1) == b""  # the server has closed it

    with http_served(MonitoringOptions(http_address=f"127.0.0.1:{port}"), dict, RateHistory()):
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for _ in range(MOST_CONNECTIONS + 1):
                connect()  # in this thread: there is no other
        assert (await trio.to_thread.run_sync(ask, port))[0] == 404


async def test_a_token_is_asked_for_and_accepted_as_password_or_bearer(tmp_path: Path, port: int) -> None:
    def basic(password: str) -> str:
        return f"Basic {base64.b64encode(f'anyone:{password}'.encode()).decode()}"

    given = [
        "",
        "Bearer wrong",
        f"Bearer {TOKEN}",
        basic("wrong"),
        basic(TOKEN),
        "Basic ???",
        f"Token {TOKEN}x",
    ]
    asked = [lambda each=each: ask(port, Authorization=each) for each in given]
    found = await answers(port, *asked, token=token_file(tmp_path), address="0.0.0.0")
    assert [status for status, _ in found] == [401, 401, 404, 401, 404, 401, 401]
    assert "http_token_file" in found[0][1]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 404),
        ("127.0.0.1:9999", 404),
        ("localhost:80", 404),
        ("[::1]:80", 404),
        ("evil.example", 403),
        ("evil.example:9469", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1:9469", 403),
        ("[::1", 403),
    ],
)
async def test_without_a_token_only_requests_to_loopback_are_answered(
    port: int, host: str, status: int
) -> None:
    """Another site whose name leads to 127.0.0.1 reads nothing."""
    ((found, _),) = await answers(port, lambda: ask(port, Host=host))
    assert found == status


async def test_the_page_is_for_looking_only(port: int) -> None:
    found = await answers(port, lambda: ask(port, "/", "POST"), lambda: ask(port, "/missing", "HEAD"))
    assert found == [(405, "this page only shows\n"), (404, "")]


@pytest.mark.parametrize(
    ("token", "mode", "words"),
    [
        ("short", 0o600, "fewer than 16 characters"),
        ("schlüssel mit umlaut", 0o600, "others than ASCII"),
        (TOKEN, 0o644, "chmod 600"),
    ],
)
async def test_a_token_that_protects_nothing_is_refused(
    tmp_path: Path, port: int, token: str, mode: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await answers(port, token=token_file(tmp_path, token, mode))


async def test_every_answer_is_kept_from_caches_and_from_guesses_of_its_type(
    tmp_path: Path, port: int
) -> None:
    def headers() -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
            connection.request("GET", "/")
            answer = connection.getresponse()
            return (
                answer.status,
                f"{answer.headers['Cache-Control']}, {answer.headers['X-Content-Type-Options']}",
            )

    assert await answers(port, headers, token=token_file(tmp_path)) == [(401, "no-store, nosniff")]


def test_a_connection_without_a_free_descriptor_does_not_keep_the_processor_busy(port: int) -> None:
    program = f"""
import os, resource, socket, time, trio
from fusecache.config.option_groups import MonitoringOptions
from fusecache.daemon.http_server import http_served
from fusecache.page.history import RateHistory

async def main():
    with http_served(MonitoringOptions(http_address="127.0.0.1:{port}"), dict, RateHistory()):
        client = socket.socket()
        free = os.dup(client.fileno())
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
        os.close(free)
        client.connect(("127.0.0.1", {port}))
        began = time.process_time()
        await trio.sleep(1)
        print(time.process_time() - began, flush=True)
        os._exit(0)
trio.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout, done.stderr
    assert float(done.stdout) < 0.4


async def test_a_missing_token_file_is_refused(tmp_path: Path, port: int) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        await answers(port, token=tmp_path / "none")


async def test_without_the_extra_metrics_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr("fusecache.daemon.http_server.find_spec", lambda _: None)
    ((status, text),) = await answers(port, lambda: ask(port, "/metrics"))
    assert status == 501
    assert "pip" in text


async def test_while_the_loop_hangs_few_threads_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(
        "fusecache.daemon.http_server.LONGEST_SECONDS", 0.1
    )  # of a connection, not of its thread

    def ask_often() -> None:
        """Connect again and again, as a browser does that gives up on each answer."""
        for _ in range(2 * MOST_CONNECTIONS):
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
                client.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    found.append(client.recv(12))

    found: list[bytes] = []
    before = threading.active_count()
    with http_served(MonitoringOptions(http_address=f"127.0.0.1:{port}"), dict, RateHistory()):
        asking = threading.Thread(target=ask_often)
        asking.start()
        asking.join()  # this is the loop's thread: it answers nothing
        # Those, the server itself, and one or two that are about to end.
        assert threading.active_count() <= before + MOST_CONNECTIONS + 3
        assert b"HTTP/1.0 503" in found


async def test_a_daemon_that_goes_on_with_a_mount_does_without_a_page_if_its_port_is_in_use(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Programs wait for it: an error would have them wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        options = MonitoringOptions(http_address=f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(MountError, match="cannot be used"), http_served(options, dict, RateHistory()):
            raise AssertionError("a new mount says so")
        with http_served(options, dict, RateHistory(), is_resumed=True):
            pass
    assert "no web page and metrics until the next start: 127.0.0.1" in caplog.text
