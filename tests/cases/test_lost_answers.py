"""Answers that never come: the engine on a virtual clock, its requests on real sockets to the test server."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from fusecache.model.objects import MIB
from fusecache.policy.writeback import multipart
from fusecache.remote.endpoints import Credentials, Endpoint, Transport
from fusecache.remote.s3.store import S3Store
from tests.s3server import Fault, FaultAction, LogEntry, S3Server
from tests.support.node import User, running_node

# A client that waits little for an answer, though longer than a busy machine stands still, and asks once: the
# patience is the engine's.
TRANSPORT = Transport(attempts=1, connect_timeout_seconds=10, read_timeout_seconds=2.5)
SILENCE = 5.0
PART = 5 * MIB  # the least that R2 takes
DATA = b"".join(bytes([number]) * PART for number in (1, 2, 3))[:-5]
MOVED = {"d/multipart": DATA, "d/small": b"small", "d/empty": b""}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "SINGLE_PUT_BYTES_MAX", PART)
    monkeypatch.setattr(multipart, "_PART_BYTES_MIN", PART)
    monkeypatch.setattr(multipart, "_PART_STEP", PART)


@pytest.fixture
def near() -> Iterator[S3Server]:
    """A server in this process, with all of R2's rules but the pause between writes: virtual seconds are no pause."""
    with S3Server() as server:
        server.control.set_rules(write_interval_seconds=0)
        yield server
        assert server.control.offences() == []


@asynccontextmanager
async def node_of(server: S3Server, cache: Path) -> AsyncIterator[User]:
    """Run a node on the server's bucket."""
    endpoint = Endpoint(server.endpoint_url, "auto", is_r2=True)
    keys = Credentials(server.access_key, server.secret_key)
    with closing(S3Store(server.bucket, endpoint, credentials=keys, transport=TRANSPORT)) as store:
        async with running_node(store, cache) as user:
            yield user


async def assert_published_whole(server: S3Server, cache: Path) -> None:
    """Write a file of three parts on a node; see it published, once."""
    async with node_of(server, cache) as user:
        await user.write("file", DATA)
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
        assert await user.read("file") == DATA
    assert list(server.control.objects()) == ["file"]
    assert server.control.read("file") == DATA
    assert server.control.uploads() == []
    completed = [entry for entry in server.control.log("CompleteMultipartUpload") if entry.took_effect]
    assert len(completed) == 1


def facts(entry: LogEntry) -> tuple[str, int, bool | None]:
    # The server notices a moment later that nobody waits for the answer which it does not give.
    return entry.fault, entry.status or 0, entry.took_effect


@pytest.mark.case(24)
async def test_a_part_whose_answer_is_lost_and_whose_second_attempt_destroys_it_is_sent_a_third_time(
    near: S3Server, tmp_path: Path
):
    near.control.faults(
        Fault(FaultAction.SILENT_AFTER, operation="UploadPart", part=2, times=1, seconds=SILENCE),
        Fault(FaultAction.ANSWER_MIDWAY, operation="UploadPart", part=2, times=1, status=500),
    )
    await assert_published_whole(near, tmp_path)
    attempts = [entry for entry in near.control.log("UploadPart") if entry.query["partNumber"] == "2"]
    assert [facts(entry) for entry in attempts[:2]] == [
        ("silent-after", 0, True),
        ("answer-midway", 500, False),
    ]
    assert facts(attempts[-1]) == ("", 200, True)  # the third, unless the machine stood still meanwhile


@pytest.mark.case(25)
@pytest.mark.parametrize("lost", [FaultAction.SILENT_AFTER, FaultAction.DROP_AFTER, FaultAction.ANSWER_AFTER])
async def test_a_complete_whose_answer_is_lost_after_it_took_effect_is_success(
    near: S3Server, tmp_path: Path, lost: FaultAction
):
    near.control.faults(Fault(lost, operation="CompleteMultipartUpload", times=1, seconds=SILENCE))
    await assert_published_whole(near, tmp_path)
    first = near.control.log("CompleteMultipartUpload")[0]
    assert (first.fault, first.took_effect) == (lost.value, True)


@pytest.mark.case(25)
async def test_a_file_replaced_while_the_answer_to_its_complete_is_lost_comes_in_its_turn(
    near: S3Server, tmp_path: Path
):
    near.control.faults(
        Fault(FaultAction.SILENT_AFTER, operation="CompleteMultipartUpload", times=1, seconds=SILENCE)
    )
    async with node_of(near, tmp_path) as user:
        await user.write("file", DATA)
        await user.write("other", b"1")
        await user.write("file", DATA[::-1])
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
    assert near.control.read("file") == DATA[::-1]
    assert sorted(near.control.objects()) == ["file", "other"]
    assert near.control.uploads() == []


@pytest.mark.parametrize("lost", [FaultAction.SILENT_AFTER, FaultAction.DROP_AFTER, FaultAction.ANSWER_AFTER])
@pytest.mark.parametrize("operation", ["CopyObject", "DeleteObject"])
async def test_a_directory_moves_once_although_answers_are_lost_after_they_took_effect(
    near: S3Server, tmp_path: Path, operation: str, lost: FaultAction
) -> None:
    async with node_of(near, tmp_path) as user:
        await user.mkdir("d")
        for path, data in MOVED.items():
            await user.write(path, data)
        await user.symlink("small", "d/link")
        assert await user.drained() == "durable"
        near.control.faults(Fault(lost, operation=operation, times=4, seconds=SILENCE))
        await user.rename("d", "e")
        assert await user.drained() == "durable"
        assert user.fs.publisher.rejections.conflicts == {}
        assert await user.read("e/multipart") == DATA
        assert (await user.tree("e"))["e/link"] == b"-> small"
    assert sorted(near.control.objects()) == ["e/", "e/empty", "e/link", "e/multipart", "e/small"]
    assert near.control.read("e/small") == b"small"
