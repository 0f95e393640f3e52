"""Programs that die while they save, at every call that writes: by SIGKILL, by SIGTERM, for lack of memory."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import ExpectedLog, Place
from tests.support.control_groups import memory_group
from tests.support.mounts import run, wait_until

pytest.importorskip("torch")
pytest.importorskip("safetensors.torch")

MEMORY_BYTES = 48 << 20
# Stands before the C library: counts the calls on files below a folder, and ends the process before the nth.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static int trace = -1, how;
static long at, seen;

void watch(const char *path, const char *trace_path)
{
    strncpy(folder, path, sizeof folder - 1);
    trace = open(trace_path, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
}

void end_at(long number, int signal_or_0)
{
    at = number;
    how = signal_or_0;
    seen = 0;
}

static void meet(const char *call, int descriptor)
{
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (!folder[0] || size < 0)
        return;
    path[size] = 0;
    if (strncmp(path, folder, strlen(folder)))
        return;
    if (!at)
        dprintf(trace, "%s %s\n", call, path);
    if (++seen != at)
        return;
    if (how)
        kill(getpid(), how);
    for (;;)
        if (!how)
            memset(malloc(1 << 20), 1, 1 << 20);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) { meet("write", fd); return REAL(write)(fd, data, size); }
ssize_t writev(int fd, const struct iovec *data, int count)
{
    meet("writev", fd);
    return REAL(writev)(fd, data, count);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset)
{
    meet("pwrite", fd);
    return REAL(pwrite64)(fd, data, size, offset);
}
int ftruncate64(int fd, off64_t size) { meet("ftruncate", fd); return REAL(ftruncate64)(fd, size); }
int fsync(int fd) { meet("fsync", fd); return REAL(fsync)(fd); }
int close(int fd) { meet("close", fd); return REAL(close)(fd); }
int fclose(FILE *file) { meet("close", fileno(file)); return REAL(fclose)(file); }
"""
# Imports once; each save is a child's, which dies at the call it is told to.
SAVER = """
import ctypes, json, os, sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
shim = ctypes.CDLL(os.environ["LD_PRELOAD"])

def save(kind, path, value):
    state = {f"weights{index}": torch.full((30_000,), value + index) for index in range(3)}
    if kind == "torch":
        torch.save(state, path)
    elif kind == "safetensors":
        save_file(state, path)
    else:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, overwrite=True), no_dist=True)

for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if order["group"]:
                with open(order["group"] + "/cgroup.procs", "w") as file:
                    file.write(str(os.getpid()))
            shim.watch(os.fsencode(order["folder"]), os.fsencode(order["trace"]))
            shim.end_at(order["at"], order["how"])
            save(order["kind"], order["path"], order["value"])
            status = 0
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Saver:
    """A process that saves on demand: `save` returns how that ended, an exit status or a signal below zero."""

    def __init__(self, process: "subprocess.Popen[str]", trace: Path) -> None:
        self._process = process
        self._trace = trace

    def save(self, kind: str, path: Path, value: float, **more: Any) -> int:
        order: dict[str, Any] = {"kind": kind, "path": str(path), "folder": str(path.parent), "value": value}
        order |= {"trace": str(self._trace), "at": 0, "how": 0, "group": "", **more}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def calls(self, kind: str, folder: Path) -> list[tuple[str, str]]:
        """Save whole, twice; return (call, name of the file) of every call of the second that writes, in order.

        On the mount: buffers of programs are as large as the blocks that a file system recommends.
        """
        for _ in range(2):
            self._trace.write_bytes(b"")
            assert self.save(kind, folder / kind, 1.0) == 0
        rows = [line.split(" ", 1) for line in self._trace.read_text().splitlines()]
        return [(call, Path(path).name) for call, path in rows]


@pytest.fixture(scope="module")
def saver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saver]:
    """A process that saves on demand."""
    directory = tmp_path_factory.mktemp("saver")
    (directory / "shim.c").write_text(SHIM)
    run("gcc", "-shared", "-fPIC", "-O1", "-o", directory / "shim.so", directory / "shim.c", "-ldl")
    environment = {**os.environ, "LD_PRELOAD": str(directory / "shim.so"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", SAVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        yield Saver(process, directory / "trace")
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def little_memory() -> Iterator[str]:
    """Make a control group in which the kernel kills a process that takes more than MEMORY_BYTES.

    Skips where the machine allows no control group: nothing else makes the kernel kill for want of memory.
    """
    with memory_group(MEMORY_BYTES) as group:
        yield str(group)


def content(place: Place) -> dict[str, bytes]:
    return {name: place.bucket.get(name) for name in place.bucket.names()}


@pytest.mark.case(51)
@pytest.mark.parametrize(
    "how", ["SIGKILL", "SIGTERM", pytest.param("memory", marks=pytest.mark.whole_machine)]
)
@pytest.mark.parametrize("kind", ["torch", "safetensors", "dcp"])
def test_a_save_that_dies_at_any_of_its_writes_changes_nothing_in_the_bucket(
    request: pytest.FixtureRequest, place: Place, saver: Saver, expect_log: ExpectedLog, kind: str, how: str
):
    group = request.getfixturevalue("little_memory") if how == "memory" else ""
    expect_log("quarantined unfinished file")
    path = place.path / kind
    calls = saver.calls(kind, place.path)
    assert {"write", "close"} <= {call for call, _ in calls}, calls
    place.sync()
    before = content(place)
    place.bucket.control.clear_log()
    # A file of a distributed checkpoint may change once it is closed. So: up to the close of the first.
    closes = 1 + next(index for index, (call, _) in enumerate(calls) if call == "close")
    # In the group, the process asks for more memory than it may have instead of sending itself a signal.
    end = 0 if group else getattr(signal, how)
    ends = [saver.save(kind, path, 2.0, at=at, how=end, group=group) for at in range(1, closes + 1)]
    assert set(ends) == {-signal.SIGTERM if how == "SIGTERM" else -signal.SIGKILL}
    wait_until(lambda: _leftovers(path) == [], "unfinished files to go")
    (place.path / "after").write_bytes(b"1")
    place.sync()
    assert content(place) == {**before, "after": b"1"}
    assert place.bucket.published() == [("PutObject", "after")]
    shown = {name: (place.path / name).read_bytes() for name in before if not name.endswith("/")}
    assert shown == {name: data for name, data in before.items() if not name.endswith("/")}
    # And it can be saved again.
    assert saver.save(kind, path, 3.0) == 0
    place.sync()
    assert content(place).keys() == {**before, "after": b"1"}.keys()
    assert content(place) != {**before, "after": b"1"}
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _leftovers(path: Path) -> list[Path]:
    """Return files with temporary names beside a path and below it."""
    return [each for each in path.parent.rglob("*") if ".tmp" in each.name]
