"""Idle connections: most of the descriptors are for what is under way."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from fusecache.remote.http.connection_pool import ConnectionPool, Peer


@contextmanager
def limit_of_open_files(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def kept_of(count: int, most_idle: int, open_files: int) -> int:
    """Return how many of `count` connections, that ended their requests at once, a pool keeps."""
    with limit_of_open_files(open_files):
        pool = ConnectionPool(Peer("localhost", 1, None, 1.0, 1.0), most_idle)
    for connection in [pool.take() for _ in range(count)]:
        connection.is_clean = True
        pool.give_back(connection)
    return len(pool._idle)


def test_a_pool_keeps_as_many_as_it_may() -> None:
    assert kept_of(80, 64, open_files=1024) == 64


def test_idle_connections_keep_an_eighth_of_the_descriptors_at_most() -> None:
    assert kept_of(40, 64, open_files=48) == 6
