"""`fusecache serve` as a process, for tests."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
from botocore.config import Config

from tests.support.mounts import FUSECACHE, Mount

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

SECRET = "a-secret-of-the-tests-that-is-long"


def key_file(folder: Path, text: str = SECRET) -> Path:
    """Write a key's file."""
    path = folder / "key"
    path.write_text(f"{text}\n")
    path.chmod(0o600)
    return path


@contextmanager
def served(mount: Mount, address: str, *flags: str | Path) -> Iterator[str]:
    """Serve a mount; yield the URL. At the end the process has ended without an error."""
    words = [str(word) for word in (FUSECACHE, "serve", mount.path, "--listen", address, *flags)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert " is at http" in said, said
        try:
            yield said.split()[-1]
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            words_at_end = process.stderr.read()
    assert process.returncode == 0
    assert "Traceback" not in words_at_end


def client_of(
    url: str, secret: str = SECRET, access_key: str = "fusecache", verify: str | None = None
) -> "S3Client":
    """Return a client of boto3 that asks once."""
    return boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id=access_key,
        aws_secret_access_key=secret,
        verify=verify,
        config=Config(retries={"total_max_attempts": 1}),
    )
