"""Programs that speak S3 read through `fusecache serve` as from the bucket."""

import os
import shutil
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
}
_BEGIN = "import sys\nurl, place, secret = sys.argv[1:4]\ndata = open(sys.argv[4], 'rb').read()\n"


@pytest.mark.parametrize("name", ["pyarrow", "obstore", "s3fs"])
def test_library(name: str, url: str, bucket: Bucket, tmp_path: Path) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    (tmp_path / "data").write_bytes(DATA)
    place = f"{bucket.service.bucket}/{bucket.prefix}data"
    run_python(_BEGIN + _PROGRAMS[name], url, place, SECRET, tmp_path / "data", env=environment(url))


def test_rclone(url: str, bucket: Bucket, tmp_path: Path) -> None:
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("rclone is not installed")
    flags = ("--config", "/dev/null", "--s3-provider", "Other", "--s3-env-auth", "--s3-endpoint", url)
    source = f":s3:{bucket.service.bucket}/{bucket.prefix}data"
    run(program, "copy", source, tmp_path / "there", *flags, "--s3-list-version", "2", env=environment(url))
    assert (tmp_path / "there" / "large").read_bytes() == DATA
    assert len(list((tmp_path / "there").iterdir())) == 6


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
