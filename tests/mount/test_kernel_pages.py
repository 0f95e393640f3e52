"""The kernel reads what was fetched of a model ahead of the program, by a process that nothing depends on."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy
import pytest
from safetensors import safe_open
from safetensors.numpy import save

from fusecache.engine.prefetch import page_reader
from tests.mount.test_model_loads import FAR_APART, MIB, control_of, equal, model, shuffled
from tests.support.mounts import NEEDS_OWN_SESSION, Mount, is_running, mounted_at, run, wait_until
from tests.support.s3_buckets import Bucket

MakeMount = Callable[..., Mount]
KEPT = pytest.mark.parametrize(
    "flag", [pytest.param("--keep-mounted", marks=NEEDS_OWN_SESSION), "--no-keep-mounted"]
)
# Loads a model as a server does, and waits until its input is closed.
PROGRAM = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], framework="numpy") as file:
    for name in sys.argv[2:]:
        file.get_tensor(name)
    print("loaded", flush=True)
    sys.stdin.read()
"""


def in_kernel(path: Path) -> int:
    """Return how many bytes of a file the kernel has."""
    done = run("fincore", "--bytes", "--noheadings", "--output", "RES", path)
    return int(done.stdout or 0)


def wait_for_pages(path: Path, nbytes: int, mount: Mount) -> None:
    """Wait until the kernel has so many bytes of a file. The failure says how far it came."""
    try:
        wait_until(lambda: in_kernel(path) >= nbytes, f"{nbytes} bytes in the kernel")
    except AssertionError as exc:
        memory, running = Path("/proc/meminfo").read_text(), mount.helpers(page_reader)
        exc.add_note(
            f"{in_kernel(path)} are there; page readers: {running}\n{mount.status()['cache']}\n{memory}"
        )
        raise


@contextmanager
def loading(path: Path, *names: str) -> Iterator["subprocess.Popen[str]"]:
    """Have a program load some tensors of a model, and hold it open."""
    words = [sys.executable, "-c", PROGRAM, str(path), *names]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            yield program
        finally:
            program.kill()


@pytest.mark.whole_machine  # the kernel may drop pages when other programs need memory
@pytest.mark.parametrize("flag", ["--read-only", "--cache-size=4GiB"])
def test_a_program_finds_in_the_kernel_what_it_has_not_read_yet(
    mount: MakeMount, bucket: Bucket, flag: str
) -> None:
    tensors = model()
    data = save(tensors)
    bucket.put("model.safetensors", data)
    one = mount(flag)
    path = one.path / "model.safetensors"
    with safe_open(path, framework="numpy") as file:
        for name in FAR_APART:
            file.get_tensor(name)
        wait_for_pages(path, len(data), one)
        before = one.read_by_daemon()
        for name in shuffled(tensors):
            assert numpy.array_equal(file.get_tensor(name), tensors[name])
        assert one.read_by_daemon() == before
    wait_until(lambda: not one.helpers(page_reader), "the end of the page reader")


def test_a_page_reader_has_no_keys_and_takes_nothing_with_it_when_killed(
    mount: MakeMount, bucket: Bucket
) -> None:
    tensors = model()
    bucket.put("model.safetensors", save(tensors))
    one, control = mount(), control_of(bucket)
    path = one.path / "model.safetensors"
    control.set(total_bandwidth=40e6)
    try:
        with loading(path, *FAR_APART):
            (reader,) = wait_until(lambda: one.helpers(page_reader), "a page reader")
            assert "AWS" not in Path(f"/proc/{reader}/environ").read_text()
            os.kill(reader, signal.SIGKILL)
            wait_until(lambda: not is_running(reader), "its end")
            assert equal(path, tensors, shuffled(tensors))
            assert one.helpers(page_reader) == []
    finally:
        control.set(total_bandwidth=None)
    one.unmount()


@KEPT
def test_a_daemon_that_is_killed_during_this_leaves_no_process_behind(
    mount: MakeMount, bucket: Bucket, flag: str
) -> None:
    tensors = model()
    bucket.put("model.safetensors", save(tensors))
    one, control = mount(flag), control_of(bucket)
    path = one.path / "model.safetensors"
    control.set(total_bandwidth=60e6)
    try:
        with loading(path, *shuffled(tensors)) as program:
            (reader,) = wait_until(lambda: one.helpers(page_reader), "a page reader")
            wait_until(lambda: in_kernel(path) > 30 * MIB, "pages")
            os.kill(one.pid, signal.SIGKILL)
            if flag == "--keep-mounted":
                before = one.pid
                one.pid = wait_until(
                    lambda: None if is_running(before) else one.status()["pid"], "the next daemon", seconds=60
                )
                assert program.stdout is not None
                assert program.stdout.readline() == "loaded\n"
            wait_until(lambda: not is_running(reader), "the end of the page reader")
        assert program.wait(10) is not None
    finally:
        control.set(total_bandwidth=None)
    if flag == "--keep-mounted":
        one.unmount()
    else:
        run("fusermount3", "-u", one.path)
        one.pid = 0
    assert not mounted_at(one.path)


def test_a_mount_can_be_taken_away_once_the_program_has_closed_the_model(
    mount: MakeMount, bucket: Bucket
) -> None:
    tensors = model()
    bucket.put("model.safetensors", save(tensors))
    one, control = mount(), control_of(bucket)
    control.set(total_bandwidth=60e6)
    try:
        with loading(one.path / "model.safetensors", *FAR_APART):
            wait_until(lambda: one.helpers(page_reader), "a page reader")
        began = time.monotonic()
        one.unmount()
        assert time.monotonic() - began < 5
    finally:
        control.set(total_bandwidth=None)
