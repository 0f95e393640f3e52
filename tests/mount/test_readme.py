"""README's commands and programs do what it says, in its order, on a mount of the test server.

They run as they stand, but for names: the bucket, keys, endpoint and folders. Stand-ins: `make` and `sudo`, the user's
`train.py`, and transformers; `tests/trainers` runs that block with the real one. `make test-readme` does it all in bare
machines, without the first two.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounts import FUSECACHE, mounted_at, run
from tests.support.readme import TRAIN, TRANSFORMERS, readme_block, readme_blocks, with_bucket
from tests.support.s3_buckets import Bucket


@pytest.fixture
def machine(bucket: Bucket, tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a new user's shell, whose working directory is tmp_path; unmounts what is left."""
    stubs = tmp_path / "bin"
    stubs.mkdir()
    programs = {
        "sudo": 'exec "$@"',
        "make": f'echo "$@" >>{tmp_path}/made',
        "python": f'exec {sys.executable} "$@"',
    }
    for name, program in programs.items():
        (stubs / name).write_text(f"#!/bin/sh\n{program}\n")
        (stubs / name).chmod(0o755)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    kept = {
        name: value
        for name, value in bucket.service.environment().items()
        if not name.startswith(("AWS_ACCESS", "AWS_SECRET", "AWS_ENDPOINT", "S3_ENDPOINT", "R2_"))
    }
    cache = {"FUSECACHE_CACHE_DIR": str(tmp_path / "cache"), "FUSECACHE_CACHE_SIZE": "1GiB"}
    path = f"{stubs}:{FUSECACHE.parent}:{os.environ['PATH']}"
    yield {**kept, **cache, "PATH": path, "HOME": str(tmp_path)}
    if mounted_at(tmp_path / "data"):
        run(FUSECACHE, "unmount", tmp_path / "data")


def named(code: str, bucket: Bucket, folder: Path) -> str:
    """Return a block with the names of this machine."""
    service = bucket.service
    code = with_bucket(
        code,
        endpoint_url=service.endpoint_url,
        access_key=service.access_key,
        secret_key=service.secret_key,
        source=bucket.source,
    )
    return re.sub(r"(?<![\w.])/(data|nvme)\b", rf"{folder}/\1", code)


def test_every_block_of_the_readme_works(machine: dict[str, str], bucket: Bucket, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = "\n".join(named(code, bucket, tmp_path) for code in readme_blocks())
    shell = run("bash", "-euo", "pipefail", "-c", script, env=machine, cwd=tmp_path, seconds=120)
    assert (tmp_path / "made").read_text() == "install\n"
    assert "fusecache: error" not in shell.stderr
    assert "\nOK" in shell.stdout
    assert bucket.get("hello") == b"hello\n"
    assert mounted_at(tmp_path / "data")

    resume = named(readme_block("python", "Trainer"), bucket, tmp_path)
    for expected in ("None", f"{tmp_path}/data/checkpoints/checkpoint-500"):
        program = f"model = dataset = None\n{resume}\nprint(checkpoint)"
        assert run(sys.executable, "-c", program, env=machine, cwd=tmp_path).stdout == f"{expected}\n"
    read = named(readme_block("python", "MDSDataset"), bucket, tmp_path)
    run(sys.executable, "-c", read, env=machine, cwd=tmp_path, seconds=120)
    assert (tmp_path / "data" / "step-1000.pt").stat().st_size > 0


def test_every_block_is_of_the_shell_or_of_python() -> None:
    assert (len(readme_blocks()), len(readme_blocks("python"))) == (2, 2)
