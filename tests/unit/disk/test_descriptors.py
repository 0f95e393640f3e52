"""Descriptors of staging files: bounded, never taken from a call that uses them."""

import os
import resource
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from fusecache.disk.staging import DescriptorPool, StagingDirectory, StagingFile
from fusecache.model.errors import TooManyFiles


def count() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_idle_files_give_up_their_descriptors(tmp_path: Path) -> None:
    pool = DescriptorPool(4)
    before = count()
    files = [StagingFile(tmp_path / str(number), create=True, pool=pool) for number in range(50)]
    for number, file in enumerate(files):
        file.write(0, b"%d" % number)
    assert count() - before <= 5
    assert [file.read(0, 10) for file in files] == [b"%d" % number for number in range(50)]
    pool.close_all()
    assert count() == before


def test_a_file_in_use_keeps_its_descriptor(tmp_path: Path) -> None:
    pool = DescriptorPool(1)
    first = StagingFile(tmp_path / "first", create=True, pool=pool)
    with first._descriptor() as descriptor:
        second = StagingFile(tmp_path / "second", create=True, pool=pool)
        assert os.fstat(descriptor).st_ino == (tmp_path / "first").stat().st_ino
        assert not first.close_if_idle()
    assert first.close_if_idle()
    second.close()


def test_threads_share_few_descriptors(tmp_path: Path) -> None:
    pool = DescriptorPool(2)
    files = [StagingFile(tmp_path / str(number), create=True, pool=pool) for number in range(16)]

    def work(number: int) -> None:
        for round_ in range(200):
            file = files[(number + round_) % 16]
            file.write(number * 8, b"%08d" % number)
            assert file.read(number * 8, 8) == b"%08d" % number

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [file.size() for file in files] == [64] * 16
    pool.close_all()


def test_a_used_up_limit_is_a_temporary_error(tmp_path: Path) -> None:
    staging = StagingDirectory(tmp_path)
    file = staging.create(1)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count() - 1, limit[1]))
    taken = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        staging.create(2).close()  # the descriptor of the first one is given up
        taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(TooManyFiles, match="no file descriptor"):
            file.read(0, 1)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert file.read(0, 1) == b""
    staging.close()
