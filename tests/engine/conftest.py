"""Files of a few MiB are large here: cut into parts as files above 64 MiB are, without their weight."""

import pytest

from fusecache.model.nouns import MIB
from fusecache.policy import parts


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 4 MiB are parts of 4 MiB."""
    monkeypatch.setattr(parts, "SINGLE_PUT_BYTES_MAX", 4 * MIB)
    monkeypatch.setattr(parts, "_PART_BYTES_MIN", 4 * MIB)
    monkeypatch.setattr(parts, "_PART_STEP", 4 * MIB)
