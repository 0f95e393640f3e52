"""Commands whose daemon dies, or is replaced, before it has answered: the next daemon of the mount answers them."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fusecache.model.errors import MountError
from fusecache.mount import launch
from fusecache.mount.control_client import Mount as Found
from fusecache.mount.control_client import find_mount, request_stream
from fusecache.mount.runtime_folder import listen_at
from loader.base.mount_endpoint import MountEndpoint
from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import (
    FUSECACHE,
    NEEDS_OWN_SESSION,
    Mount,
    is_running,
    mounted_at,
    pattern,
    refusal,
    run,
)
from tests.support.s3_buckets import Bucket

MakeMount = Callable[..., Mount]

pytestmark = [NEEDS_OWN_SESSION, pytest.mark.s3server_only]
WAYS = pytest.mark.parametrize("way", ["kill", "upgrade"])


@contextmanager
def command(*words: str | Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a command of fusecache; it is gone afterwards."""
    with subprocess.Popen(
        [str(FUSECACHE), *map(str, words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str]:
    output = process.communicate(timeout=60)[0]
    return process.returncode, output


def hold_upload(bucket: Bucket) -> None:
    """Have the next upload wait for the test's end: a daemon never ends with it."""
    bucket.control.clear_log()
    bucket.control.faults(Fault(FaultAction.HOLD, operation="PutObject", key=f"{bucket.prefix}*", times=1))


def await_upload(process: "subprocess.Popen[str]", bucket: Bucket) -> None:
    """Return when the upload is held, and a command has heard that it waits for it."""
    bucket.control.wait_requests(1, operation="PutObject", finished=False)
    assert process.stdout is not None
    assert "uploading: 1 change" in process.stdout.readline()


def end_daemon(one: Mount, way: str) -> None:
    """Have the daemon die, or be replaced."""
    if way == "kill":
        os.kill(one.pid, signal.SIGKILL)
    else:
        run(FUSECACHE, "upgrade", one.path)


# ---- commands that wait


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (["sync"], "kill"),
        (["sync", "--timeout", "60s"], "upgrade"),
        (["unmount"], "kill"),
        (["unmount"], "upgrade"),
    ],
)
def test_a_command_that_waits_for_uploads_waits_for_those_of_the_next_daemon(
    mount: MakeMount, bucket: Bucket, words: list[str], way: str
) -> None:
    one = mount("--keep-mounted")
    hold_upload(bucket)
    (one.path / "file").write_bytes(b"1")
    with command(*words, one.path) as waiting:
        await_upload(waiting, bucket)
        end_daemon(one, way)
        status, output = ended(waiting)
    assert status == 0, output
    assert bucket.get("file") == b"1"
    assert mounted_at(one.path) == (words[0] == "sync")
    if words[0] == "sync":
        one.pid = one.status()["pid"]


def test_a_warm_up_that_is_waited_for_goes_on_in_the_next_daemon(mount: MakeMount, bucket: Bucket) -> None:
    bucket.put("shard", pattern(100_000))
    one = mount("--keep-mounted")
    bucket.control.clear_log()
    bucket.control.faults(
        Fault(FaultAction.HOLD, operation="GetObject", key=f"{bucket.prefix}shard", times=1)
    )
    with command("warm", "--wait", one.path) as waiting:
        bucket.control.wait_requests(1, operation="GetObject", finished=False)
        os.kill(one.pid, signal.SIGKILL)
        status, output = ended(waiting)
    one.pid = one.status()["pid"]
    assert (status, "all cached" in output) == (0, True), output


@WAYS
def test_the_loader_waits_for_the_uploads_of_the_next_daemon(
    mount: MakeMount, bucket: Bucket, way: str
) -> None:
    one = mount("--keep-mounted")
    hold_upload(bucket)
    (one.path / "checkpoint").write_bytes(b"1")
    failures: list[str] = []
    endpoint = MountEndpoint(one.path)
    waiting = threading.Thread(target=lambda: failures.append(endpoint.wait_durable("checkpoint")))
    waiting.start()
    bucket.control.wait_requests(1, operation="PutObject", finished=False)
    end_daemon(one, way)
    waiting.join(60)
    one.pid = one.status()["pid"]
    assert failures == [""]
    assert bucket.get("checkpoint") == b"1"


def test_a_mount_whose_daemon_dies_during_the_unmount_has_ended_when_the_command_has(
    mount: MakeMount, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next mount finds the cache directory in use."""
    one = mount("--keep-mounted")
    (one.path / "file").write_bytes(b"1")
    found, _ = find_mount(one.path, os.environ)
    launch.drain(found, timeout_seconds=None, on_progress=lambda _: None)
    keeper, detach = one.keeper(), launch._detach

    def detach_as_it_dies(mountpoint: Path, *, lazy: bool) -> None:
        os.kill(one.pid, signal.SIGKILL)
        detach(mountpoint, lazy=lazy)

    monkeypatch.setattr(launch, "_detach", detach_as_it_dies)
    assert launch.detach_and_wait(found, forced=False)
    assert not is_running(keeper)
    assert not mounted_at(one.path)
    assert bucket.get("file") == b"1"


# ---- how long they wait


def test_a_command_waits_for_the_next_daemon_until_its_time_is_over(mount: MakeMount, bucket: Bucket) -> None:
    one = mount("--keep-mounted")
    hold_upload(bucket)
    (one.path / "file").write_bytes(b"1")
    keeper, began = one.keeper(), time.monotonic()
    with command("sync", "--timeout", "4s", one.path) as waiting:
        await_upload(waiting, bucket)
        os.kill(keeper, signal.SIGSTOP)  # it starts no other daemon
        try:
            os.kill(one.pid, signal.SIGKILL)
            status, output = ended(waiting)
        finally:
            os.kill(keeper, signal.SIGCONT)
    assert status == 2
    assert "no other daemon has taken over" in output
    assert 4 <= time.monotonic() - began < 20
    one.pid = one.status()["pid"]


def test_a_command_ends_at_once_when_its_mount_has_no_keeper(mount: MakeMount, bucket: Bucket) -> None:
    one = mount("--no-keep-mounted")
    hold_upload(bucket)
    (one.path / "file").write_bytes(b"1")
    with command("sync", one.path) as waiting:
        await_upload(waiting, bucket)
        began = time.monotonic()
        os.kill(one.pid, signal.SIGKILL)
        status, output = ended(waiting)
    assert (status, "the daemon closed the connection" in output) == (2, True), output
    assert time.monotonic() - began < 10


# ---- which requests are sent again


@contextmanager
def dying_daemons(path: Path, count: int) -> Iterator[list[dict[str, Any]]]:
    """Play daemons at a socket: as many as said end when they have a request, and one answers. Yield the requests."""
    requests: list[dict[str, Any]] = []
    listeners = [listen_at(path, mode=0o600)]

    def serve() -> None:
        for left in reversed(range(count + 1)):
            try:
                connection, _ = listeners[-1].accept()
            except OSError:  # it is shut down
                return
            with connection, connection.makefile("rwb") as lines:
                requests.append(json.loads(lines.readline()))
                if left:
                    listeners.append(listen_at(path, mode=0o600))
                else:
                    lines.write(b'{"done": true, "result": "ok"}\n')

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield requests
    finally:
        for each in listeners:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in listeners:
            each.close()


def test_a_request_goes_to_the_next_daemon_with_what_is_left_of_its_time(
    place: Place, tmp_path: Path
) -> None:
    with dying_daemons(tmp_path / "socket", 2) as requests:
        found = Found(place.first_mount.path, tmp_path / "socket", is_named=True)
        answer = request_stream(found, {"command": "sync", "path": "", "timeout_seconds": 30.0})
        seconds = [each["timeout_seconds"] for each in requests]
    assert answer["result"] == "ok"
    assert 30 == seconds[0] > seconds[1] > seconds[2] > 0
    assert [each["command"] for each in requests] == ["sync"] * 3


@pytest.mark.parametrize("name", ["delete", "bring-back"])
def test_what_a_daemon_may_have_restored_or_deleted_is_not_asked_for_twice(
    place: Place, tmp_path: Path, name: str
) -> None:
    with dying_daemons(tmp_path / "socket", 1) as requests:
        found = Found(place.first_mount.path, tmp_path / "socket", is_named=True)
        with pytest.raises(MountError, match="It may have carried it out: see `fusecache recover"):
            request_stream(found, {"command": name, "id": 1})
        assert [each["command"] for each in requests] == [name]


def test_a_daemon_that_closes_a_connection_and_stays_is_asked_once(place: Place, tmp_path: Path) -> None:
    """Else a request that it cannot answer would go on for ever."""
    found, requests = Found(place.first_mount.path, tmp_path / "socket", is_named=True), []
    with listen_at(tmp_path / "socket", mode=0o600) as listener:

        def serve() -> None:
            with suppress(OSError):  # it is shut down
                while True:
                    connection, _ = listener.accept()
                    with connection, connection.makefile("rb") as lines:
                        requests.append(lines.readline())

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(MountError, match="the daemon closed the connection before the end of status"):
            request_stream(found, {"command": "status"})
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert len(requests) == 1


def test_a_socket_that_this_process_cannot_see_is_an_error_at_once(place: Place, tmp_path: Path) -> None:
    """As in a container, which has the mount alone."""
    found, began = Found(place.first_mount.path, tmp_path / "nowhere", is_named=True), time.monotonic()
    with pytest.raises(MountError, match=r"cannot reach the daemon at .*nowhere: No such file"):
        request_stream(found, {"command": "status"})
    assert time.monotonic() - began < 5


def test_the_loader_does_not_wait_for_a_daemon_of_no_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))  # and nobody listens
    monkeypatch.setenv("FUSECACHE_SOCKET", str(path))
    assert refusal(lambda: MountEndpoint(tmp_path).wait_durable("")) is not None
