"""What /proc says about a writing process."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fusecache.engine.runtime.procfs import available_memory, is_being_killed, thread_group
from fusecache.model.objects import MIB


def test_a_thread_belongs_to_its_process_and_nobody_to_none() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(thread_group(threading.get_native_id())))
    thread.start()
    thread.join()
    assert found == [os.getpid()]
    assert thread_group(os.getpid()) == os.getpid()
    assert thread_group(os.getpid()) == os.getpid()  # remembered
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert thread_group(child.pid) == 0


def test_only_who_is_ended_by_a_signal_was_killed() -> None:
    assert not is_being_killed(os.getpid())
    child = subprocess.Popen(["sleep", "60"])
    assert not is_being_killed(child.pid)
    child.send_signal(signal.SIGKILL)
    try:
        deadline = time.monotonic() + 10
        while not is_being_killed(child.pid):  # a zombie keeps its flags until it is waited for
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.wait()
    assert not is_being_killed(child.pid)


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 100 * MIB),
        ("0::/job\n", {"job/memory.max": "max", "job/memory.current": "5"}, 100 * MIB),
        # The page cache of a group counts as available, active pages too. The group with the least decides.
        (
            "0::/job/step\n",
            {
                "job/memory.max": str(90 * MIB),
                "job/memory.current": str(80 * MIB),
                "job/memory.stat": f"anon 5\ninactive_file {12 * MIB}\nactive_file {8 * MIB}\n",
                "job/step/memory.max": "max",
            },
            30 * MIB,
        ),
    ],
)
def test_the_memory_that_is_left_is_that_of_the_fullest_control_group(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    written = {"proc/meminfo": f"MemFree: 5 kB\nMemAvailable: {100 * 1024} kB\n", "proc/self/cgroup": groups}
    for name, text in {**written, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert available_memory(tmp_path) == expected


def test_without_files_of_the_kernel_no_memory_is_known_to_be_left(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == 0


def test_a_system_that_does_not_tell_its_free_memory_has_none_left(tmp_path: Path) -> None:
    """As some containers' own /proc."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1000 kB\n")
    assert available_memory(tmp_path) == 0
