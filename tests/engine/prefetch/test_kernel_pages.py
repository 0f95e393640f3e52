"""The orders to a page reader: which parts it reads, and how much memory it may fill."""

import errno
import json
import os
import socket
from pathlib import Path

import pytest

from fusecache.engine.prefetch import kernel_pages, page_reader
from fusecache.engine.prefetch.kernel_pages import PageReader
from fusecache.model.objects import MIB, Extent
from tests.support.node import Bucket, running_node


async def test_a_reader_fills_half_of_the_memory_and_asks_for_it_in_steps(
    bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def memory() -> int:
        asked.append(1)
        return 400 * MIB

    monkeypatch.setattr(kernel_pages, "available_memory", memory)
    bucket.memory.put_bytes("model", b"weights")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        async with running_node(bucket, cache) as user:
            node = await user.fs.resolve("model")
            reader = PageReader(ours, user.fs.tree, "/mnt")
            orders = 0
            while reader.has_memory(8 * MIB):
                theirs.send(b"\n")
                start = orders * 8 * MIB
                assert await reader.read(
                    node, [Extent(start, start + MIB), Extent(start + MIB, start + 8 * MIB)]
                )
                words = json.loads(theirs.recv(4096))
                assert words == [
                    "/mnt/model",
                    node.number,
                    [[start, start + MIB], [start + MIB, start + 8 * MIB]],
                ]
                orders += 1
            assert orders == 25
            assert len(asked) == 5  # four steps, and the one that was refused
            assert not reader.has_memory(8 * MIB)


def test_all_parts_of_an_order_are_read_and_those_of_another_file_are_not(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(data := os.urandom(3 * MIB + 5))
    inode, parts = path.stat().st_ino, [[2 * MIB, 3 * MIB + 5], [0, MIB // 2], [MIB, MIB + 7]]
    for number, expected in ((inode, b"".join(data[start:stop] for start, stop in parts)), (inode + 1, b"")):
        with open(tmp_path / "sink", "wb") as sink:
            page_reader.read(str(path), number, parts, sink.fileno())
            assert Path(sink.name).read_bytes() == expected


def test_parts_behind_one_that_cannot_be_read_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model"
    path.write_bytes(data := os.urandom(3 * MIB))
    sendfile = os.sendfile

    def broken(sink: int, source: int, start: int, nbytes: int) -> int:
        if start == MIB:
            raise OSError(errno.EIO, "the bucket does not answer")
        return sendfile(sink, source, start, nbytes)

    monkeypatch.setattr(os, "sendfile", broken)
    with open(tmp_path / "sink", "wb") as sink:
        parts = [[MIB, 2 * MIB], [2 * MIB, 3 * MIB]]
        page_reader.read(str(path), path.stat().st_ino, parts, sink.fileno())
    assert Path(sink.name).read_bytes() == data[2 * MIB :]
