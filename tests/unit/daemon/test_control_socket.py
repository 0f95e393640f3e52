"""A daemon whose descriptors are used up still takes a command."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import trio
import trio.testing

from fusecache.daemon.control_socket import ReservingListener


@contextmanager
def no_descriptors_left() -> Iterator[ExitStack]:
    """Take all descriptors of this process, of which it gets fewer for that; yields what keeps them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = max(map(int, os.listdir("/proc/self/fd"))) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with ExitStack() as taken:
            take_all(taken)
            yield taken
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def take_all(taken: ExitStack) -> None:
    with suppress(OSError):
        while True:
            taken.callback(os.close, os.open(os.devnull, os.O_RDONLY))


async def test_the_descriptor_that_is_held_back_is_there_when_someone_connects(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "socket")
    accepted: list[trio.SocketStream] = []
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen()
        listener = ReservingListener(trio.socket.from_stdlib_socket(server.dup()))

        async def accept() -> None:
            accepted.append(await listener.accept())

        with no_descriptors_left() as taken:
            with trio.fail_after(5):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(accept)
                    await trio.testing.wait_all_tasks_blocked()
                    # Threads that wait for one get each that is given back.
                    take_all(taken)
                    client.connect(path)
            await accepted[0].aclose()
        await listener.aclose()
