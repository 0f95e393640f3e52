"""`fusecache unmount` waits for the process that ends last with a mount: the keeper, else the daemon."""

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from fusecache.mount.control_client import Mount
from fusecache.mount.launch import _open_last_process


@pytest.mark.parametrize(
    ("status", "is_kept"),
    [
        ({"options": {"keep_mounted": True}}, True),
        ({"options": {"keep_mounted": False}}, False),
        # An older daemon: what was asked for, and what is. The parent of one without a keeper is anything.
        ({"options": {"keep_mounted": True}, "outlives_daemon": True}, True),
        ({"options": {"keep_mounted": True}, "outlives_daemon": False}, False),
    ],
)
def test_the_parent_of_a_daemon_is_its_keeper_only_if_it_has_one(
    tmp_path: Path, *, status: dict[str, Any], is_kept: bool
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, connection.makefile("rb") as asked:
                asked.readline()
                connection.sendall(
                    json.dumps({"done": True, "result": "ok", "status": status}).encode() + b"\n"
                )

        daemon = threading.Thread(target=answer, daemon=True)
        daemon.start()
        pid, handle = _open_last_process(Mount(tmp_path, tmp_path / "socket", os.geteuid()))
        daemon.join()
    assert pid == (os.getppid() if is_kept else os.getpid())
    if handle is not None:
        os.close(handle)
