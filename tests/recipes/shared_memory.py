"""MosaicML's StreamingDataset keeps blocks in /dev/shm, and a killed one leaves them there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def no_shared_memory_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove what the test's killed trainers left. Of each dataset one block names its directories."""
    yield
    for named in MEMORY.glob("*_locals"):
        if str(tmp_path_factory.getbasetemp()).encode() in named.read_bytes():
            for block in MEMORY.glob(named.name.removesuffix("locals") + "*"):
                block.unlink(missing_ok=True)
