"""The hand behind the server: log, foreign writes, outages, restarts; in-process and across processes."""

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from botocore.exceptions import ConnectionClosedError, EndpointConnectionError, ReadTimeoutError

from tests.s3server import Fault, FaultAction, S3Server, ServerProcess, boto_client, synthetic_bytes
from tests.s3server.control import Control
from tests.s3server.process import ROOT, RemoteControl
from tests.unit.s3server.raw import RawClient
from tests.unit.s3server.refusals import refusal

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "bucket"


@pytest.fixture(params=["in-process", "process"])
def either(request: pytest.FixtureRequest, process: ServerProcess) -> Iterator[S3Server | ServerProcess]:
    """The server in this process, then in its own."""
    if request.param == "process":
        process.control.reset()
        yield process
        process.control.close()
    else:
        with S3Server() as server:
            yield server


def test_both_controls_have_the_same_calls() -> None:
    public = {name for name in vars(Control) if not name.startswith("_")}
    assert public <= vars(RemoteControl).keys()


def test_foreign_writes_have_raw_power(either: S3Server | ServerProcess) -> None:
    control = either.control
    for key in ("a//b", "../x", "dir/", "e\u0301", "x" * 2000, "dir/"):
        control.put(key, key.encode(), {"by": "another"})
    objects = control.objects()
    assert list(objects) == sorted({"a//b", "../x", "dir/", "e\u0301", "x" * 2000})
    assert objects["../x"].metadata == {"by": "another"}
    assert control.read("a//b", 1, 2) == b"//"
    control.delete("a//b")
    for call in (control.delete, control.read):
        with pytest.raises(KeyError):
            call("a//b")


def test_the_log_tells_what_was_asked_and_done(either: S3Server | ServerProcess) -> None:
    client = boto_client(either)
    try:
        client.put_object(Bucket=BUCKET, Key="k", Body=b"0123456789", Metadata={"a": "b"})
        client.get_object(Bucket=BUCKET, Key="k", Range="bytes=2-5")["Body"].read()
        client.list_objects_v2(Bucket=BUCKET, Prefix="p")
    finally:
        client.close()
    put, get, listing = either.control.wait_requests(3)
    assert (put.operation, put.method, put.key, put.status) == ("PutObject", "PUT", "k", 200)
    assert (put.bytes_in, put.took_effect, put.headers["x-amz-meta-a"]) == (10, True, "b")
    assert (get.range, get.status, get.bytes_out, get.took_effect) == ("bytes=2-5", 206, 4, None)
    assert (listing.operation, listing.query["prefix"]) == ("ListObjectsV2", "p")
    assert put.number < get.number < listing.number
    assert put.time <= get.time <= listing.time
    assert either.control.counts() == {"PutObject": 1, "GetObject": 1, "ListObjectsV2": 1}
    either.control.clear_log()
    assert (either.control.log(), either.control.counts()) == ([], {})


def test_waiting_for_requests_that_never_come_is_a_timeout(either: S3Server | ServerProcess) -> None:
    with pytest.raises(TimeoutError):
        either.control.wait_requests(1, timeout=0.01)


def test_wrong_settings_are_refused(either: S3Server | ServerProcess) -> None:
    with pytest.raises(ValueError, match="bandwidth"):
        either.control.set(bandwidth=0)
    with pytest.raises(TypeError):
        either.control.set(speed=1)  # type: ignore[call-arg]  # that is the point


def test_refused_connections_come_back_on_the_same_port(either: S3Server | ServerProcess) -> None:
    either.control.put("k", b"x")
    url = either.endpoint_url
    client = boto_client(either)
    try:
        client.head_object(Bucket=BUCKET, Key="k")
        either.control.pause("refuse")
        with pytest.raises((EndpointConnectionError, ConnectionClosedError)):
            client.head_object(Bucket=BUCKET, Key="k")
        with pytest.raises(EndpointConnectionError):
            client.head_object(Bucket=BUCKET, Key="k")
        assert either.control.read("k") == b"x"
        either.control.resume()
        assert client.head_object(Bucket=BUCKET, Key="k")["ContentLength"] == 1
    finally:
        client.close()
    assert either.endpoint_url == url


def test_nobody_gets_the_port_of_a_server_that_cannot_be_reached(either: S3Server | ServerProcess) -> None:
    """Servers of other tests start meanwhile, and connections are made: the kernel chooses their ports."""
    either.control.pause("refuse")
    try:
        assert_port_is_held(either.port)
    finally:
        either.control.resume()


def test_nobody_gets_the_port_of_a_server_that_is_restarted() -> None:
    with ServerProcess() as server:
        port = server.port
        server.kill()
        assert_port_is_held(port)
        server.start()
        assert server.port == port
        server.control.put("k", b"x")


def assert_port_is_held(port: int) -> None:
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))


def test_what_a_blackhole_swallowed_never_takes_effect(either: S3Server | ServerProcess) -> None:
    hasty, client = boto_client(either, read_timeout=2), boto_client(either)
    try:
        with RawClient(either) as patient:
            assert patient.ask("GET", "/bucket/k", {}).status == 404
            either.control.clear_log()
            either.control.pause("blackhole")
            with pytest.raises(ReadTimeoutError):
                hasty.put_object(Bucket=BUCKET, Key="k", Body=b"x")
            patient.sock.sendall(patient.head("PUT", "/bucket/k", {"Content-Length": "1"}) + b"x")
            either.control.resume()
            with pytest.raises((EOFError, ConnectionResetError)):
                patient.answer()
        assert (either.control.objects(), either.control.log()) == ({}, [])
        client.put_object(Bucket=BUCKET, Key="k", Body=b"x")
    finally:
        hasty.close()
        client.close()


def test_a_held_request_ends_with_its_connection_and_never_takes_effect(
    either: S3Server | ServerProcess,
) -> None:
    either.control.faults(Fault(FaultAction.HOLD, operation="PutObject"))
    with RawClient(either) as patient:
        patient.sock.sendall(patient.head("PUT", "/bucket/k", {"Content-Length": "1"}) + b"x")
        either.control.wait_requests(1, "PutObject", finished=False)
        either.control.pause("refuse")
        with pytest.raises((EOFError, ConnectionResetError)):
            patient.answer()
    either.control.resume()
    either.control.clear_faults()
    assert either.control.objects() == {}


def test_dropped_connections_are_replaced(either: S3Server | ServerProcess) -> None:
    either.control.put("k", b"x")
    client = boto_client(either, retries={"mode": "standard", "total_max_attempts": 2})
    try:
        client.head_object(Bucket=BUCKET, Key="k")
        either.control.drop_connections()
        client.head_object(Bucket=BUCKET, Key="k")
    finally:
        client.close()
    first, second = either.control.log("HeadObject")
    assert first.connection != second.connection


def test_a_get_in_progress_survives_the_objects_deletion(server: ServerProcess, client: "S3Client") -> None:
    body = bytes(range(256)) * 65_536  # 16 MiB: more than the sockets' buffers hold
    server.control.put("k", body)
    answer = client.get_object(Bucket=BUCKET, Key="k")
    server.control.delete("k")
    assert answer["Body"].read() == body


@pytest.mark.parametrize("end", [ServerProcess.stop, ServerProcess.kill])
def test_a_restarted_server_has_the_same_objects(tmp_path: Path, end: Any) -> None:
    directory = tmp_path / "store"
    with ServerProcess(directory) as server:
        client = boto_client(server)
        try:
            client.put_object(Bucket=BUCKET, Key="k", Body=b"one", Metadata={"a": "b"})
            server.control.put("k", b"two", {"c": "d"})
            server.control.put("gone", b"x")
            server.control.delete("gone")
            server.control.add_synthetic("s", 10**12, seed=9)
            client.copy_object(Bucket=BUCKET, Key="copy", CopySource={"Bucket": BUCKET, "Key": "k"})
            upload_id = client.create_multipart_upload(Bucket=BUCKET, Key="m", Metadata={"m": "m"})[
                "UploadId"
            ]
            part = client.upload_part(Bucket=BUCKET, Key="m", UploadId=upload_id, PartNumber=1, Body=b"part")
            before, uploads, url = server.control.objects(), server.control.uploads(), server.endpoint_url
            end(server)
            server.start()
            assert (server.control.objects(), server.control.uploads()) == (before, uploads)
            assert server.endpoint_url == url
            assert (server.control.read("k"), server.control.read("copy")) == (b"two", b"two")
            assert server.control.read("s", 10**11, 50) == synthetic_bytes(9, 10**11, 50)
            refused = refusal(client.get_object, Bucket=BUCKET, Key="gone")
            assert refused == (404, "NoSuchKey")
            parts: Any = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
            finish: Any = {"Bucket": BUCKET, "Key": "m", "UploadId": upload_id, "MultipartUpload": parts}
            client.complete_multipart_upload(**finish)
            assert server.control.objects()["m"].metadata == {"m": "m"}
        finally:
            client.close()
    bodies = list((directory / BUCKET / "bodies").iterdir())
    assert len(bodies) == 3  # of k, copy and m: nothing else was left behind


def test_an_upload_finished_by_a_killed_server_is_an_object_and_no_upload(tmp_path: Path) -> None:
    sidecar = tmp_path / BUCKET / "uploads"
    with ServerProcess(tmp_path) as server:
        client = boto_client(server)
        try:
            upload_id = client.create_multipart_upload(Bucket=BUCKET, Key="m")["UploadId"]
            part = client.upload_part(Bucket=BUCKET, Key="m", UploadId=upload_id, PartNumber=1, Body=b"part")
            (saved,) = sidecar.iterdir()
            row = saved.read_text()
            parts: Any = {"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]}
            finish: Any = {"Bucket": BUCKET, "Key": "m", "UploadId": upload_id, "MultipartUpload": parts}
            client.complete_multipart_upload(**finish)
        finally:
            client.close()
        server.kill()
        saved.write_text(row)  # as if killed between the two steps of Complete
        server.start()
        assert server.control.uploads() == []
        assert server.control.read("m") == b"part"


def test_the_server_ends_with_its_parent(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path).start()
    child = server._child
    assert child is not None
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(10) == 0
    server.close()


PARENT = """
import sys
from tests.s3server import ServerProcess
server = ServerProcess(sys.argv[1]).start()
print(server.pid, flush=True)
sys.stdin.read()
"""


def test_a_terminals_ctrl_c_is_the_parents_alone_and_a_killed_parent_ends_the_server(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        ended = os.pidfd_open(pid)
        try:
            assert os.getsid(pid) == pid  # not in the group that a terminal interrupts
            assert os.getsid(parent.pid) == parent.pid
            parent.kill()
            assert select.select([ended], [], [], 10)[0] == [ended]
        finally:
            os.close(ended)
