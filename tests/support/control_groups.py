"""Control groups of the kernel with a limit of memory; only a whole machine, or a privileged container, has them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a control group whose processes get so much memory together. Skips where the machine allows none."""
    name = f"fusecache-test-{os.getpid()}"
    old, new = Path("/sys/fs/cgroup/memory") / name, Path("/sys/fs/cgroup") / name
    group, limit = (old, "memory.limit_in_bytes") if old.parent.is_dir() else (new, "memory.max")
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as exc:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group for memory: {exc}")
    try:
        yield group
    finally:
        group.rmdir()


def memory_used(group: Path) -> int:
    """Return the bytes that a control group's processes use now, without what the kernel can drop at once."""
    name = "memory.usage_in_bytes" if (group / "memory.usage_in_bytes").exists() else "memory.current"
    facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    cached = sum(int(facts[each]) for each in ("active_file", "inactive_file"))
    return int((group / name).read_text()) - cached
