"""One server process and one client for all tests of this folder; every test finds the server as new."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.s3server import ServerProcess, boto_client

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@pytest.fixture(scope="session")
def process() -> Iterator[ServerProcess]:
    with ServerProcess() as server:
        yield server


@pytest.fixture(scope="session")
def session_client(process: ServerProcess) -> Iterator["S3Client"]:
    client = boto_client(process)
    yield client
    client.close()


@pytest.fixture
def server(process: ServerProcess) -> Iterator[ServerProcess]:
    """The server, empty, with every rule but the spacing of writes, which would slow all tests down."""
    process.control.reset()
    process.control.set_rules(write_interval_seconds=0)
    yield process
    process.control.close()


@pytest.fixture
def client(server: ServerProcess, session_client: "S3Client") -> Iterator["S3Client"]:
    yield session_client
    session_client.close()  # its connections; the next request opens new ones
