"""`fusecache serve`: a mount's objects over S3's protocol, to one well-known client and to hostile ones."""

import http.client
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import trio
import trio.testing
from botocore.exceptions import ClientError, IncompleteReadError, ResponseStreamingError
from botocore.exceptions import ConnectionError as BotoConnectionError
from urllib3.exceptions import ProtocolError

from fusecache.mount.control_client import Mount as Mounted
from fusecache.mount.launch import resolve_in_mount
from fusecache.remote.protocol.signing import Signer, SigningKeys
from fusecache.serve.errors import S3Error
from fusecache.serve.objects import DaemonObjects, Found
from fusecache.serve.server import ObjectServer
from fusecache.serve.signature import SignatureCheck
from tests.mount.serving import SECRET, client_of, key_file, served
from tests.s3server.certificate import make_certificate
from tests.support.block_caches import some_bytes
from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

pytestmark = pytest.mark.s3server_only
MIB = 1 << 20
DATA = some_bytes(20 * MIB + 4321)


@pytest.fixture
def one(mount: Callable[..., Mount], bucket: Bucket) -> Mount:
    """A mount with some objects."""
    bucket.put("data/large", DATA)
    bucket.put("data/empty")
    bucket.put("data/ä b+c%/x", b"odd")
    bucket.put("other", b"1")
    return mount()


@pytest.fixture
def url(one: Mount, free_port: Callable[[], int], tmp_path: Path) -> Iterator[str]:
    """Where it is served, with a key."""
    with served(one, f"127.0.0.1:{free_port()}", "--key-file", key_file(tmp_path)) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator["S3Client"]:
    """A client with the right key."""
    made = client_of(url)
    yield made
    made.close()


def refusal(client: "S3Client", **asked: str) -> tuple[int, str]:
    """Return status and code with which a GET fails."""
    with pytest.raises(ClientError) as caught:
        client.get_object(**asked)  # type: ignore[arg-type]
    answer = caught.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


def test_objects_are_those_of_the_bucket(client: "S3Client", bucket: Bucket) -> None:
    name, key = bucket.service.bucket, bucket.prefix
    large = client.get_object(Bucket=name, Key=f"{key}data/large")
    assert large["Body"].read() == DATA
    theirs = bucket.client.head_object(Bucket=name, Key=f"{key}data/large")
    assert (large["ETag"], large["LastModified"]) == (theirs["ETag"], theirs["LastModified"])
    assert client.get_object(Bucket=name, Key=f"{key}data/empty")["Body"].read() == b""
    assert client.get_object(Bucket=name, Key=f"{key}data/ä b+c%/x")["Body"].read() == b"odd"
    head = client.head_object(Bucket=name, Key=f"{key}data/large")
    assert (head["ContentLength"], head["ETag"]) == (len(DATA), theirs["ETag"])


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=65535-65536", 65535, 65537),
        ("bytes=8388600-8388700", 8388600, 8388701),
        ("bytes=1000-", 1000, None),
        ("bytes=-100", -100, None),
        ("bytes=20000000-999999999", 20000000, None),
    ],
)
def test_ranges(client: "S3Client", bucket: Bucket, asked: str, start: int, stop: int | None) -> None:
    place = {"Bucket": bucket.service.bucket, "Key": f"{bucket.prefix}data/large"}
    answer = client.get_object(**place, Range=asked)  # type: ignore[arg-type]
    assert answer["Body"].read() == DATA[start:stop]
    first = start if start >= 0 else len(DATA) + start
    last = (len(DATA) if stop is None else stop) - 1
    assert answer["ContentRange"] == f"bytes {first}-{last}/{len(DATA)}"


def test_range_beyond_the_end_and_unknown_keys(client: "S3Client", bucket: Bucket) -> None:
    name, key = bucket.service.bucket, bucket.prefix
    assert refusal(client, Bucket=name, Key=f"{key}data/large", Range="bytes=999999999-") == (
        416,
        "InvalidRange",
    )
    assert refusal(client, Bucket=name, Key=f"{key}data/empty", Range="bytes=-0")[0] == 416
    # They exist, and are no paths below the mount. Those of a sibling of equal length have the ends of such paths.
    sibling = f"{key[:-2]}{'y' if key[-2] == 'x' else 'x'}/"
    outside = (
        f"{sibling}other",
        f"{sibling}data",
        f"elsewhere/{key}x",
        f"{key.rstrip('/')}-more/x",
        f"{key}data//large",
        f"{key}../x",
        f"{key}data/",
    )
    for each in outside:
        bucket.client.put_object(Bucket=name, Key=each, Body=b"secret")
    for wrong in (f"{key}none", f"{key}data", *outside):
        assert refusal(client, Bucket=name, Key=wrong) == (404, "NoSuchKey")
    assert refusal(client, Bucket="another-bucket", Key="x") == (404, "NoSuchBucket")


def test_another_node_gets_no_object_outside_of_the_mount(one: Mount, bucket: Bucket) -> None:
    """It names the version itself, so the daemon looks up no name."""
    key = f"outside/{bucket.prefix}x"
    etag = bucket.client.put_object(Bucket=bucket.service.bucket, Key=key, Body=b"secret")["ETag"].strip('"')
    mounted, _ = resolve_in_mount(str(one.path))
    ask = partial(DaemonObjects(mounted).piece, key, 0, 6, Found(etag, 6, 0.0), for_peer=True)
    with pytest.raises(S3Error) as caught:
        trio.run(ask)
    assert caught.value.status == 404


def test_another_node_that_is_wrong_about_a_size_spoils_nothing(one: Mount, bucket: Bucket) -> None:
    etag = bucket.put("fresh", DATA)
    mounted, _ = resolve_in_mount(str(one.path))
    found = Found(etag, 65536, 0.0)
    ask = partial(DaemonObjects(mounted).piece, f"{bucket.prefix}fresh", 0, 65536, found, for_peer=True)
    with pytest.raises(S3Error) as caught:
        trio.run(ask)
    assert caught.value.status == 412
    assert (one.path / "fresh").read_bytes() == DATA


def test_preconditions(client: "S3Client", bucket: Bucket) -> None:
    name, key = bucket.service.bucket, f"{bucket.prefix}data/large"
    etag = client.head_object(Bucket=name, Key=key)["ETag"]
    matched = client.get_object(Bucket=name, Key=key, IfMatch=etag)
    assert matched["Body"].read() == DATA
    assert matched["LastModified"] == bucket.client.head_object(Bucket=name, Key=key)["LastModified"]
    assert refusal(client, Bucket=name, Key=key, IfMatch='"another"') == (412, "PreconditionFailed")
    assert refusal(client, Bucket=name, Key=key, IfNoneMatch=etag)[0] == 304


def test_new_version_replaces_the_old_one(client: "S3Client", bucket: Bucket) -> None:
    name, key = bucket.service.bucket, f"{bucket.prefix}other"
    assert client.get_object(Bucket=name, Key=key)["Body"].read() == b"1"
    etag = bucket.put("other", b"22")
    answer = client.get_object(Bucket=name, Key=key)
    while answer["ETag"] != f'"{etag}"':  # for a second, a name may show its old version
        answer = client.get_object(Bucket=name, Key=key)
    assert answer["Body"].read() == b"22"


def test_what_a_listing_shows_can_be_read(client: "S3Client", bucket: Bucket) -> None:
    name, prefix = bucket.service.bucket, bucket.prefix
    for odd in ("odd//x", "odd/../y", "odd/./z", "marker/", "n" * 256, f"{'d' * 256}/in"):
        bucket.put(odd, b"no path")
    bucket.put("both", b"a file")
    bucket.put("both/in", b"in a directory")
    listed = [row["Key"] for row in client.list_objects_v2(Bucket=name, Prefix=prefix)["Contents"]]
    names = ["both", "both/in", "data/empty", "data/large", "data/ä b+c%/x", "other"]
    assert listed == [prefix + each for each in names]
    for key in listed:
        assert client.head_object(Bucket=name, Key=key)["ContentLength"] >= 0
    assert client.get_object(Bucket=name, Key=f"{prefix}both")["Body"].read() == b"a file"
    page = client.list_objects_v2(Bucket=name, Prefix=f"{prefix}odd/", Delimiter="/")
    assert page["KeyCount"] == 0


def test_wrong_token_is_the_clients_error(client: "S3Client", bucket: Bucket) -> None:
    """Clients try again after a 503."""
    with pytest.raises(ClientError) as caught:
        client.list_objects_v2(
            Bucket=bucket.service.bucket, Prefix=bucket.prefix, ContinuationToken="no token"
        )
    answer = caught.value.response
    assert (answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]) == (400, "InvalidArgument")


def test_listings_are_those_of_the_bucket(client: "S3Client", bucket: Bucket) -> None:
    name, prefix = bucket.service.bucket, bucket.prefix
    for asked in (
        {"Prefix": prefix},
        {"Prefix": prefix, "Delimiter": "/"},
        {"Prefix": f"{prefix}data/", "Delimiter": "/", "MaxKeys": 1},
    ):
        mine, theirs = (
            [
                (row["Key"], row["ETag"], row["Size"]) if "Key" in row else row["Prefix"]
                for page in each.get_paginator("list_objects_v2").paginate(Bucket=name, **asked)  # type: ignore[arg-type]
                for row in [*page.get("Contents", ()), *page.get("CommonPrefixes", ())]
            ]
            for each in (client, bucket.client)
        )
        assert mine == theirs
        assert mine
    top = client.list_objects_v2(Bucket=name, Delimiter="/")
    assert [each["Prefix"] for each in top["CommonPrefixes"]] == [prefix.partition("/")[0] + "/"]
    assert client.get_bucket_location(Bucket=name)["LocationConstraint"] is None
    client.head_bucket(Bucket=name)


@pytest.mark.parametrize("limit", [1, 2, 1000])
@pytest.mark.parametrize("delimiter", ["", "/"])
def test_first_version_of_listings_has_the_same_rows(
    client: "S3Client", bucket: Bucket, limit: int, delimiter: str
) -> None:
    """s3fs-fuse and others ask for it. Its pages go on from a name, which may be a common prefix."""
    name, prefix = bucket.service.bucket, bucket.prefix
    bucket.put("data/")  # a key that ends with the delimiter, and is no common prefix
    bucket.put("data0", b"2")
    for below in ("", "data/", "data/ä b+c%/", "none/"):
        asked = {"Bucket": name, "Prefix": f"{prefix}{below}", "Delimiter": delimiter}
        theirs = client.list_objects_v2(**asked)  # type: ignore[arg-type]
        pages = list(client.get_paginator("list_objects").paginate(**asked, MaxKeys=limit))  # type: ignore[arg-type]
        for kind in ("Contents", "CommonPrefixes"):
            assert [row for page in pages for row in page.get(kind, ())] == theirs.get(kind, [])
        assert all(
            len([*page.get("Contents", ()), *page.get("CommonPrefixes", ())]) <= limit for page in pages
        )
        assert len(pages) >= theirs["KeyCount"] / limit


def test_pages_without_a_row_are_passed_over() -> None:
    """Azure sends such pages. The first version of listings has no name to go on from, after one."""
    pages = {
        None: {"objects": [], "prefixes": [], "token": "1"},
        "1": {"objects": [], "prefixes": [], "token": "2"},
        "2": {"objects": [["x/1", "e", 1, 0.0]], "prefixes": ["x/0/"], "token": "3"},
    }

    class Pages(DaemonObjects):
        async def list_page(self, asked: Mapping[str, Any]) -> dict[str, Any]:
            return pages[asked["token"]]

    async def ask() -> bytes:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        server = ObjectServer(
            "b", Pages(Mounted(Path("/none"), Path("/none"))), SignatureCheck({}, needs_signature=False)
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run, listeners)
            stream = await trio.testing.open_stream_to_socket_listener(listeners[0])
            async with stream:
                await stream.send_all(
                    b"GET /b?prefix=x/ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
                )
                found = b"".join([each async for each in stream])
            nursery.cancel_scope.cancel()
        return found

    found = trio.run(ask)
    assert b"<NextMarker>x/1</NextMarker>" in found
    assert b"<Key>x/1</Key>" in found


def test_objects_come_from_the_cache(client: "S3Client", bucket: Bucket) -> None:
    name, key = bucket.service.bucket, f"{bucket.prefix}data/large"
    for _ in range(2):
        assert client.get_object(Bucket=name, Key=key)["Body"].read() == DATA
    sent = sum(entry.bytes_out for entry in bucket.control.log() if entry.operation == "GetObject")
    assert len(DATA) <= sent < 1.02 * len(DATA)


def test_writes_are_refused_with_the_way_out(client: "S3Client", bucket: Bucket) -> None:
    name = bucket.service.bucket
    with pytest.raises(ClientError, match="use the mount") as put:
        client.put_object(Bucket=name, Key="x", Body=b"1" * MIB)
    with pytest.raises(ClientError, match="use the mount"):
        client.delete_object(Bucket=name, Key=f"{bucket.prefix}other")
    assert put.value.response["ResponseMetadata"]["HTTPStatusCode"] == 501
    assert bucket.get("other") == b"1"


def test_file_that_waits_for_upload_is_no_object_yet(
    mount: Callable[..., Mount], bucket: Bucket, free_port: Callable[[], int]
) -> None:
    one = mount("--settle-seconds", "1h")
    (one.path / "new").write_text("local")
    with served(one, str(free_port()), "--no-keys") as url:
        client = client_of(url)
        assert refusal(client, Bucket=bucket.service.bucket, Key=f"{bucket.prefix}new")[0] == 503
        client.close()
    (one.path / "new").unlink()


# ---- keys


def test_wrong_keys_are_refused(url: str, bucket: Bucket) -> None:
    place = {"Bucket": bucket.service.bucket, "Key": f"{bucket.prefix}other"}
    for secret, access_key, code, words in (
        (
            "another-secret-of-the-tests",
            "fusecache",
            "SignatureDoesNotMatch",
            "not the one in this node's --key-file",
        ),
        ("x", "another", "InvalidAccessKeyId", "the access key is fusecache here, not another"),
        ("x", "fusecache-peer", "InvalidAccessKeyId", "with --peers-key-file"),
    ):
        client = client_of(url, secret, access_key)
        with pytest.raises(ClientError, match=words) as caught:
            client.get_object(**place)  # type: ignore[arg-type]
        assert caught.value.response["Error"]["Code"] == code
        client.close()
    assert _asked(url, f"/{place['Bucket']}/{place['Key']}") == 403


def test_request_without_the_header_of_its_body_says_so(url: str, bucket: Bucket) -> None:
    """As curl 7.88 signs."""
    place, path = urlsplit(url), f"/{bucket.service.bucket}/{bucket.prefix}other"
    signer, keys = Signer("us-east-1"), SigningKeys("fusecache", SECRET)
    headers = signer.headers(path, {"host": place.netloc}, keys, time.time())
    del headers["x-amz-content-sha256"]
    with closing(http.client.HTTPConnection(place.netloc, timeout=10)) as connection:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        assert answer.status == 400
        assert b"-H 'x-amz-content-sha256: UNSIGNED-PAYLOAD'" in answer.read()


def test_presigned_urls_are_refused_as_such(url: str, client: "S3Client", bucket: Bucket) -> None:
    place = {"Bucket": bucket.service.bucket, "Key": f"{bucket.prefix}other"}
    signed = urlsplit(client.generate_presigned_url("get_object", place))
    with closing(http.client.HTTPConnection(signed.hostname or "", signed.port, timeout=20)) as connection:
        connection.request("GET", f"{signed.path}?{signed.query}")
        answer = connection.getresponse()
        assert answer.status == 501
        assert b"presigned URLs are not supported" in answer.read()


def test_clock_that_is_20_minutes_off_is_named(url: str, bucket: Bucket) -> None:
    place = f"/{bucket.service.bucket}/{bucket.prefix}other"
    signer, keys = Signer("us-east-1"), SigningKeys("fusecache", SECRET)
    for minutes, words in ((-20, b"RequestTimeTooSkewed"), (20, b"set both clocks"), (10, b"1")):
        host = urlsplit(url).netloc
        headers = signer.headers(place, {"host": host}, keys, time.time() + 60 * minutes)
        with closing(http.client.HTTPConnection(host, timeout=20)) as connection:
            connection.request("GET", place, headers=headers)
            answer = connection.getresponse()
            assert words in answer.read()
            assert answer.status == (200 if minutes == 10 else 403)


def test_no_keys_only_on_loopback_and_only_if_said(one: Mount, free_port: Callable[[], int]) -> None:
    for flags, words in (
        (["--listen", f"0.0.0.0:{free_port()}", "--no-keys"], "could read all objects"),
        (["--listen", f"127.0.0.1:{free_port()}"], "--key-file"),
        (
            ["--listen", f"127.0.0.1:{free_port()}", "--no-keys", "--key-file", "any"],
            "leave one of the two out",
        ),
    ):
        done = run(FUSECACHE, "serve", one.path, *flags, check=False)
        assert done.returncode == 1
        assert words in done.stderr


def test_objects_with_a_customers_key_leave_the_node_by_tls_only(
    mount: Callable[..., Mount], free_port: Callable[[], int], tmp_path: Path
) -> None:
    secret = tmp_path / "customer"
    secret.write_bytes(b"k" * 32)
    secret.chmod(0o600)
    one, port = mount("--sse", f"customer:{secret}"), free_port()
    key, (certificate, _) = key_file(tmp_path), make_certificate(tmp_path)
    tls = ("--certificate", certificate, "--certificate-key", tmp_path / "key.pem")
    for flags in ((f"0.0.0.0:{port}", "--key-file", key), (f"127.0.0.1:{port}", "--peers-key-file", key)):
        done = run(FUSECACHE, "serve", one.path, "--listen", *flags, check=False)
        assert done.returncode == 1
        assert "sse = customer:" in done.stderr
    with (
        served(one, f"127.0.0.1:{port}", "--key-file", key),
        served(one, f"0.0.0.0:{free_port()}", "--key-file", key, *tls),
    ):
        pass


def test_nodes_are_not_served_by_tls(one: Mount, free_port: Callable[[], int], tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path)
    flags = ("--certificate", certificate, "--peers-key-file", key_file(tmp_path))
    done = run(FUSECACHE, "serve", one.path, "--listen", f"127.0.0.1:{free_port()}", *flags, check=False)
    assert done.returncode == 1
    assert "nodes ask each other without TLS" in done.stderr


def test_without_keys_a_name_that_leads_here_is_refused(
    one: Mount, bucket: Bucket, free_port: Callable[[], int]
) -> None:
    """A page of another site, whose name leads to 127.0.0.1, could read all objects in this user's browser."""
    path = f"/{bucket.service.bucket}/{bucket.prefix}other"
    with served(one, str(free_port()), "--no-keys") as url:
        port = urlsplit(url).port
        for host, status in (("localhost", 200), ("another.example", 403), ("127.0.0.1.example", 403)):
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
                connection.request("GET", path, headers={"Host": f"{host}:{port}"})
                answer = connection.getresponse()
                assert (answer.status, b"--key-file" in answer.read()) == (status, status == 403)


def test_key_file_of_others_or_too_short_is_refused(
    one: Mount, free_port: Callable[[], int], tmp_path: Path
) -> None:
    path = key_file(tmp_path)
    path.chmod(0o644)
    done = run(FUSECACHE, "serve", one.path, "--listen", str(free_port()), "--key-file", path, check=False)
    assert "chmod 600" in done.stderr
    path = key_file(tmp_path, "short")
    done = run(FUSECACHE, "serve", one.path, "--listen", str(free_port()), "--key-file", path, check=False)
    assert "16 characters" in done.stderr


def _asked(url: str, target: str, **headers: str) -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 0, timeout=20)
    connection.request("GET", target, headers=headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


# ---- many clients, and hostile ones


def slow_connection(url: str) -> http.client.HTTPConnection:
    """Return a connection whose buffers are far smaller than a piece."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    connection.sock = socket.socket()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    connection.sock.settimeout(60)
    connection.sock.connect((parts.hostname, parts.port))
    return connection


def test_garbage_is_answered_and_ends_the_connection(url: str) -> None:
    parts = urlsplit(url)
    for words in (b"\x16\x03\x01 no HTTP\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 100_000):
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20) as connection:
            connection.sendall(words)
            assert connection.recv(1000).startswith(b"HTTP/1.1 400")
            while connection.recv(1000):
                pass


def test_many_connections_leave_the_server_alive(url: str, client: "S3Client", bucket: Bucket) -> None:
    parts = urlsplit(url)
    held = [socket.create_connection((parts.hostname or "", parts.port or 0), timeout=20) for _ in range(600)]
    try:
        held[-1].settimeout(20)
        answer = b""
        while part := held[-1].recv(1000):
            answer += part
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"<Code>SlowDown</Code><Message>512 connections are open here" in answer
    finally:
        for each in held:
            each.close()

    def is_answered() -> bool:
        try:
            answer = client.get_object(Bucket=bucket.service.bucket, Key=f"{bucket.prefix}other")
        except ClientError as exc:
            if exc.response["ResponseMetadata"]["HTTPStatusCode"] != 503:
                raise
            return False  # the server has not seen yet that the others have gone
        return answer["Body"].read() == b"1"

    wait_until(is_answered, "an answer once the others have gone")


def test_client_that_goes_in_the_middle_of_a_body_leaves_nothing_held(
    url: str, client: "S3Client", bucket: Bucket, one: Mount
) -> None:
    place = {"Bucket": bucket.service.bucket, "Key": f"{bucket.prefix}data/large"}
    for _ in range(3):
        body = client.get_object(**place)["Body"]  # type: ignore[arg-type]
        assert body.read(10) == DATA[:10]
        body.close()
    run(FUSECACHE, "evict", one.path / "data")
    assert client.get_object(**place)["Body"].read() == DATA  # type: ignore[arg-type]


def test_long_bodies_to_many_clients_at_once_end_though_the_cache_is_small(
    mount: Callable[..., Mount], bucket: Bucket, free_port: Callable[[], int]
) -> None:
    """No body keeps its piece until it has the next one: all would wait for each other."""
    bucket.put("large", DATA)
    one = mount("--cache-size", "256MiB")  # four pieces of 8 MiB may be held
    with served(one, str(free_port()), "--no-keys") as url, ExitStack() as opened:
        answers = []
        for _ in range(6):
            connection = opened.enter_context(closing(slow_connection(url)))
            connection.request("GET", f"/{bucket.service.bucket}/{bucket.prefix}large")
            answers.append(connection)
        bodies: list[bytes] = []
        threads = [
            threading.Thread(target=lambda each=each: bodies.append(each.getresponse().read()))
            for each in answers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [body == DATA for body in bodies] == [True] * 6


def test_damaged_cache_is_not_served(
    url: str, client: "S3Client", bucket: Bucket, one: Mount, expect_log: Callable[[str], None]
) -> None:
    place = {"Bucket": bucket.service.bucket, "Key": f"{bucket.prefix}data/large"}
    assert (one.path / "data" / "large").read_bytes() == DATA
    run(FUSECACHE, "warm", "--wait", one.path / "data" / "large")
    files = [path for path in (one.cache / "cache" / "files").glob("*/*") if path.stat().st_size > MIB]
    assert len(files) == 1
    with open(files[0], "r+b") as damaged:
        damaged.seek(9 * MIB)
        damaged.write(b"other bytes")
        os.fsync(damaged.fileno())
    expect_log("cached granules are damaged")
    assert client.get_object(**place)["Body"].read() == DATA  # type: ignore[arg-type]


def test_damage_after_a_piece_was_sent_is_not_served(
    client: "S3Client", bucket: Bucket, one: Mount, expect_log: Callable[[str], None]
) -> None:
    """As for readers of the mount: another program may change the cache's files at any time."""
    place = {"Bucket": bucket.service.bucket, "Key": f"{bucket.prefix}data/large"}
    for _ in range(2):
        assert client.get_object(**place)["Body"].read() == DATA  # type: ignore[arg-type]
    (file,) = (path for path in (one.cache / "cache" / "files").glob("*/*") if path.stat().st_size > MIB)
    with open(file, "r+b") as damaged:
        damaged.seek(9 * MIB)
        damaged.write(b"other bytes")
        os.fsync(damaged.fileno())
    expect_log("cached granules are damaged")
    assert client.get_object(**place)["Body"].read() == DATA  # type: ignore[arg-type]


def test_daemon_that_dies_in_the_middle_of_a_body_ends_it_and_the_next_one_serves(
    mount: Callable[..., Mount], bucket: Bucket, free_port: Callable[[], int]
) -> None:
    """What its successor evicts would be sent as zeros."""
    bucket.put("large", DATA)
    one = mount("--keep-mounted")
    place = {"Bucket": bucket.service.bucket, "Key": f"{bucket.prefix}large"}
    with served(one, str(free_port()), "--no-keys") as url:
        client = client_of(url)
        body = client.get_object(**place)["Body"]  # type: ignore[arg-type]
        first = body.read(100)
        os.kill(one.pid, signal.SIGKILL)
        with pytest.raises((IncompleteReadError, ProtocolError, ResponseStreamingError)):
            body.read()
        assert first == DATA[:100]
        body.close()
        assert one.path.joinpath("large").read_bytes() == DATA  # waits for the successor
        one.pid = one.status()["pid"]
        assert client.get_object(**place)["Body"].read() == DATA  # type: ignore[arg-type]
        client.close()


def test_mount_that_has_gone_is_named(one: Mount, client: "S3Client", bucket: Bucket) -> None:
    one.unmount()
    with pytest.raises(
        ClientError, match=rf"{one.path}: its daemon does not answer.*mount it again"
    ) as caught:
        client.get_object(Bucket=bucket.service.bucket, Key=f"{bucket.prefix}other")
    assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 503


def test_mount_that_comes_back_with_another_cache_directory_is_served(
    mount: Callable[..., Mount], bucket: Bucket, free_port: Callable[[], int], tmp_path: Path
) -> None:
    bucket.put("other", b"1")
    first = mount()
    with served(first, f"127.0.0.1:{free_port()}", "--key-file", key_file(tmp_path)) as url:
        client = client_of(url)

        def read() -> bytes:
            answer = client.get_object(Bucket=bucket.service.bucket, Key=f"{bucket.prefix}other")
            return answer["Body"].read()

        assert read() == b"1"
        first.unmount()
        mount(path=first.path, cache=tmp_path / "cache-2")

        def answered() -> bytes | None:
            with suppress(ClientError, BotoConnectionError):
                return read()
            return None

        assert wait_until(answered, "the objects of the next mount") == b"1"
        client.close()


def test_service_that_starts_before_its_mount_waits_for_it(
    mount: Callable[..., Mount], bucket: Bucket, free_port: Callable[[], int], tmp_path: Path
) -> None:
    bucket.put("other", b"1")
    point = tmp_path / "later"
    words = (
        FUSECACHE,
        "serve",
        point,
        "--listen",
        f"127.0.0.1:{free_port()}",
        "--key-file",
        key_file(tmp_path),
    )
    with subprocess.Popen(list(map(str, words)), stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = process.stderr.readline()
            assert re.fullmatch(f"fusecache: waiting: {point} is not in a fusecache mount: .*\n", said)
            mount(path=point)
            said = process.stderr.readline()
            assert " is at http" in said, said
            client = client_of(said.split()[-1])
            found = client.get_object(Bucket=bucket.service.bucket, Key=f"{bucket.prefix}other")[
                "Body"
            ].read()
            client.close()
            assert found == b"1"
        finally:
            process.terminate()
    assert process.returncode == 0


def test_service_that_waits_ends_with_a_signal(free_port: Callable[[], int], tmp_path: Path) -> None:
    words = (FUSECACHE, "serve", tmp_path, "--listen", str(free_port()), "--no-keys")
    with subprocess.Popen(list(map(str, words)), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "waiting" in process.stderr.readline()
        process.terminate()
        assert process.stderr.read() == ""
    assert process.returncode == 0


# ---- TLS


def test_served_by_tls(one: Mount, bucket: Bucket, free_port: Callable[[], int], tmp_path: Path) -> None:
    certificate, _ = make_certificate(tmp_path)
    flags = (
        "--key-file",
        key_file(tmp_path),
        "--certificate",
        certificate,
        "--certificate-key",
        tmp_path / "key.pem",
    )
    with served(one, f"127.0.0.1:{free_port()}", *flags) as url:
        assert url.startswith("https://")
        client = client_of(url, verify=str(certificate))
        answer = client.get_object(Bucket=bucket.service.bucket, Key=f"{bucket.prefix}data/large")
        assert answer["Body"].read() == DATA
        client.close()
