"""Libraries that load models read them from a mount as from a local disk, and the bucket sends each byte once."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import ROWS
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket

MIB = int(os.environ.get("FUSECACHE_TEST_SERVING_MIB", "48"))
NAMES = (
    "safetensors.torch.load_file",
    "transformers from_pretrained",
    "diffusers from_pretrained",
    "gguf GGUFReader",
    "Run:ai Model Streamer",
    "torch.load(mmap=True)",
    "torch.distributed.checkpoint, 4 ranks",
)


@pytest.mark.parametrize("library", NAMES)
def test_a_library_loads_the_same_tensors_from_a_mount(
    library: str,
    mount: Callable[..., Mount],
    bucket: Bucket,
    tmp_path: Path,
    job: Callable[..., dict[str, Any]],
) -> None:
    local = tmp_path / "model"
    local.mkdir()
    job("tests.serving.jobs", "make", library, local, MIB)
    files = [path for path in sorted(local.rglob("*")) if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    for path in files:
        bucket.put(f"model/{path.relative_to(local)}", path.read_bytes())
    expected = job("tests.serving.jobs", "load", library, local, MIB)
    one, control = mount("--read-only", "--memory", "256MiB"), bucket.service.control
    assert control is not None
    control.clear_log()
    cold, warm = (job("tests.serving.jobs", "load", library, one.path / "model", MIB) for _ in range(2))
    sent = sum(entry.bytes_out for entry in control.log("GetObject"))
    assert cold["digest"] == warm["digest"] == expected["digest"]
    assert size * 0.98 <= sent <= 1.02 * size
    seconds = (f"{each['seconds']:.1f}" for each in (expected, cold, warm))
    ROWS.append((library, expected["version"], round(size / 1e6), *seconds))
