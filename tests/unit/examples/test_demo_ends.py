"""However the demo ends early, it ends in one clear line, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.demo.__main__ import ROOT, open_bucket
from examples.demo.bucket import credentials
from examples.demo.processes import StepError
from tests.s3server import ServerProcess


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess() as process:
        yield process


@pytest.mark.parametrize(
    ("url", "secret", "told"),
    [
        ("s3://nope/x", None, "there is no such bucket"),
        ("nope", None, "there is no such bucket"),
        ("bad bucket", None, "bad bucket"),
        ("s3://", None, "[Ii]nvalid"),
        ("s3://bucket/x", "wrong", "the secret key is not that of the access key"),
    ],
)
def test_a_bucket_that_cannot_be_used_is_one_line(
    server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    secret: str | None,
    told: str,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
    with (
        credentials(server.access_key, secret or server.secret_key, "auto"),
        pytest.raises(StepError, match=told) as caught,
        open_bucket(url, tmp_path),
    ):
        pass
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("endpoint", "told"), [("http://127.0.0.1:9", "cannot be reached"), ("not a url", "Invalid endpoint")]
)
def test_an_endpoint_that_cannot_be_reached_is_one_line_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, told: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with (
        credentials("key", "secret", "auto"),
        pytest.raises(StepError, match=rf"{re.escape(endpoint)}: {told}") as caught,
        open_bucket("s3://bucket/x", tmp_path),
    ):
        pass
    assert str(caught.value).count("\n") == 0


def read(path: Path) -> bytes:
    """Return what a file holds; nothing if its process has just ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.fuse
def test_ctrl_c_ends_in_one_line_and_leaves_nothing_behind() -> None:
    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    with demo:
        assert demo.stdout is not None
        said = [demo.stdout.readline(), demo.stdout.readline()]  # its server runs, a mount is under way
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
        said += demo.stdout.readlines()
        assert demo.wait(60) == 130
    assert said[-1].rstrip().endswith("interrupted; nothing is left behind")
    assert "Traceback" not in "".join(said)
    mountpoint = Path(said[1].partition(" the mount at ")[2].strip())
    scratch = mountpoint.parents[1]
    assert scratch.parent == ROOT / "scratch"
    assert not scratch.exists()
    assert str(scratch) not in Path("/proc/self/mountinfo").read_text()
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(scratch).encode() in read(path)]
