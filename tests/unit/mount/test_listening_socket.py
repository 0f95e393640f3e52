"""A socket that can be seen accepts connections: what waits for it to appear may connect at once."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from fusecache.mount.runtime_folder import listen_at


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def connect_when_there(path: Path) -> None:
    while True:
        with suppress(FileNotFoundError):
            connect(path)
            return


def test_what_waits_for_a_socket_may_connect_at_once(tmp_path: Path) -> None:
    for number in range(300):
        path = tmp_path / str(number)
        with ThreadPoolExecutor(1) as client:
            connected = client.submit(connect_when_there, path)
            with listen_at(path, mode=0o600):
                connected.result(timeout=60)


def test_it_takes_the_place_of_a_socket_that_refuses(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with pytest.raises(ConnectionRefusedError):
        connect(path)
    with listen_at(path, mode=0o640):
        connect(path)
    assert path.lstat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_the_path_may_be_longer_than_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 200)
    folder.mkdir()
    with listen_at(folder / "socket", mode=0o600):
        assert (folder / "socket").is_socket()


def test_what_a_killed_start_left_is_no_hindrance(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with listen_at(path, mode=0o600):
        (left,) = tmp_path.iterdir()
    for _ in range(2):
        left.rename(tmp_path / "socket.new")
        with listen_at(path, mode=0o600):
            connect(path)


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        listen_at(tmp_path / "gone" / "socket", mode=0o600)
