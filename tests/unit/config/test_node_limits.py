"""Memory and processors of a node: the least that its control groups allow, and the defaults that follow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fusecache.config.node_limits import (
    default_memory,
    default_movers,
    memory_bytes,
    request_memory,
    usable_processors,
)
from fusecache.config.options import load_mounts, load_options
from fusecache.model.objects import GIB, MIB
from tests.support import ROOT
from tests.support.control_groups import memory_group

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
LIMIT = 96 * MIB


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, MACHINE),
        ("0::/job\n", {"job/memory.max": "max\n"}, MACHINE),
        ("0::/job\n", {"job/memory.max": f"{LIMIT}\n"}, LIMIT),
        # Slurm and systemd: the limit is that of a group above.
        ("0::/job/step/task\n", {"job/memory.max": f"{LIMIT}", "job/step/task/memory.max": "max"}, LIMIT),
        # A container that sees its host's path, but its own group.
        ("0::/host/path\n", {"memory.max": f"{LIMIT}"}, LIMIT),
        ("5:memory:/docker/1\n0::/\n", {"memory/docker/1/memory.limit_in_bytes": f"{LIMIT}"}, LIMIT),
        ("5:cpu,memory:/a/b\n", {"memory/memory.limit_in_bytes": f"{LIMIT}"}, LIMIT),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, MACHINE),
    ],
)
def test_the_least_limit_of_all_groups_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    make_groups(tmp_path, groups, limits)
    assert memory_bytes(tmp_path) == expected


def make_groups(root: Path, groups: str, limits: dict[str, str]) -> None:
    """Write the files of control groups. groups: of this process; limits: texts by path."""
    files = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in limits.items()}}
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, errors="surrogateescape")


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == MACHINE


@pytest.mark.parametrize(
    ("node", "default"),
    [(64 * GIB, 256 * MIB), (2 * GIB, 256 * MIB), (GIB, 128 * MIB), (100 * MIB, 32 * MIB)],
)
def test_the_default_is_an_eighth_within_bounds(
    monkeypatch: pytest.MonkeyPatch, node: int, default: int
) -> None:
    monkeypatch.setattr("fusecache.config.node_limits.memory_bytes", lambda: node)
    assert default_memory() == default


@pytest.mark.whole_machine
def test_a_mount_in_a_small_control_group_takes_less() -> None:
    """In a real group, with whichever version of control groups this machine has."""
    code = (
        "import os, sys; from pathlib import Path; Path(sys.argv[1]).write_text(str(os.getpid())); "
        "from fusecache.config.options import load_options; "
        "print(load_options({'source': 's3://b', 'mountpoint': '/m'}, {}).memory)"
    )
    with memory_group(512 * MIB) as group:
        words = [sys.executable, "-c", code, str(group / "cgroup.procs")]
        shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert int(shown) == 64 * MIB


@pytest.mark.parametrize(
    ("node", "expected"), [(256 * MIB, 16 * MIB), (2 * GIB, 64 * MIB), (64 * GIB, 256 * MIB)]
)
def test_requests_that_wait_have_a_share_of_the_memory(
    monkeypatch: pytest.MonkeyPatch, node: int, expected: int
) -> None:
    monkeypatch.setattr("fusecache.config.node_limits.memory_bytes", lambda: node)
    assert request_memory() == expected


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("", {}, 16),
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, 16),
        ("0::/job/task\n", {"job/cpu.max": "400000 100000\n", "job/task/cpu.max": "max 100000\n"}, 4),
        ("0::/host/path\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a\n", {"a/cpu.max": "100000 0\n"}, 16),
        ("0::/a\udcff\n", {"cpu.max": "\n"}, 16),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 16),
        ("3:cpu,cpuacct:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}, 16),
        (
            "3:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "250000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            2.5,
        ),
    ],
)
def test_a_quota_of_processor_time_counts_as_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, limits: dict[str, str], expected: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    make_groups(tmp_path, groups, limits)
    assert usable_processors(tmp_path) == expected


@pytest.mark.parametrize(
    ("processors", "movers"), [(0.5, 0), (2, 0), (5.9, 0), (6, 1), (9.5, 1), (10, 2), (18, 4), (192, 4)]
)
def test_movers_come_with_the_processors(
    monkeypatch: pytest.MonkeyPatch, processors: float, movers: int
) -> None:
    monkeypatch.setattr("fusecache.config.node_limits.usable_processors", lambda: processors)
    assert default_movers() == movers
    assert load_options({"source": "s3://b", "mountpoint": "/m"}, {}).session.movers == movers
    assert load_options({"source": "s3://b", "mountpoint": "/m", "movers": "0"}, {}).session.movers == 0


def test_several_buckets_share_the_movers_of_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(18))
    mounts = load_mounts(
        {"mountpoint": "/mnt/x"},
        {},
        buckets=["a=s3://a", "b=s3://b"],
        home=tmp_path,
        free_bytes=lambda _: 2**40,
    )
    assert [each.session.movers for each in mounts.values()] == [2, 2]
