"""Mode, time and owner that other clients stored with objects, where the mount is to show them."""

from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.namespace.nodes import Node, attributes_of
from fusecache.engine.namespace.tree import Ownership
from fusecache.engine.runtime.metadata_client import MetadataClient
from fusecache.model.errors import AccessDenied, Refused, RemoteError
from fusecache.model.objects import ObjectInfo
from fusecache.model.records import PosixAttributes
from tests.engine.namespace.test_listing import FarOffload, read_all
from tests.support.node import Bucket, User, running_node

SCRIPT = {"mode": "100755", "mtime": "1700000000.123456789", "uid": "1000", "gid": "1001"}
TOLD = PosixAttributes(0o755, 0, 0, 1_700_000_000_123_456_789)
COUNT = 40


def heads(bucket: Bucket) -> int:
    """Return how many HEADs were made."""
    return bucket.statistics().heads


async def shown(user: User, directory: str) -> dict[str, PosixAttributes]:
    """Return what `ls -l` shows of each name."""
    entries = await read_all(user, await user.fs.resolve(directory))
    return {
        entry.name: attributes_of(entry)
        if isinstance(entry, Node)
        else PosixAttributes(entry.mode, entry.uid, entry.gid, entry.mtime_ns)
        for entry in entries
    }


@pytest.fixture
def scripts(bucket: Bucket) -> list[str]:
    """Put files that another client made into a directory; return their names."""
    names = [f"{index:03}" for index in range(COUNT)]
    for name in names:
        bucket.memory.put_bytes(f"bin/{name}", b"#!", metadata=SCRIPT)
    return names


async def test_a_listing_shows_mode_and_time_for_a_head_a_version(
    bucket: Bucket, cache: Path, scripts: list[str]
) -> None:
    async with running_node(bucket, cache, posix_metadata=True) as user:
        assert await shown(user, "bin") == dict.fromkeys(scripts, TOLD)
        assert heads(bucket) == COUNT
        bucket.memory.put_bytes("bin/007", b"#!/bin/sh", metadata={**SCRIPT, "mode": "100700"})
        await trio.sleep(5)
        assert (await shown(user, "bin"))["007"].mode == 0o700
        assert heads(bucket) == COUNT + 1  # of those that stayed it is known


async def test_without_the_option_no_file_of_any_bytes_is_asked_for(
    bucket: Bucket, cache: Path, scripts: list[str]
) -> None:
    async with running_node(bucket, cache) as user:
        assert {facts.mode for facts in (await shown(user, "bin")).values()} == {0o644}
        assert (await user.fs.resolve("bin/007")).mode == 0o644
    assert heads(bucket) == 0


async def test_a_name_in_an_unlisted_directory_shows_it_and_is_asked_for_once(
    bucket: Bucket, cache: Path, scripts: list[str]
) -> None:
    async with running_node(bucket, cache, posix_metadata=True) as user:
        for _ in range(3):
            assert attributes_of(await user.fs.resolve("bin/007")) == TOLD
            await trio.sleep(5)
        assert heads(bucket) == 1


async def test_the_owner_is_shown_where_the_mount_may_tell_it(
    bucket: Bucket, cache: Path, scripts: list[str]
) -> None:
    ownership = Ownership(0, 0, 0o022, is_told=True)
    async with running_node(bucket, cache, posix_metadata=True, ownership=ownership) as user:
        facts = await user.fs.resolve("bin/007")
        assert (facts.uid, facts.gid) == (1000, 1001)


async def test_the_same_bytes_stored_anew_with_another_mode_show_it(
    bucket: Bucket, cache: Path, scripts: list[str]
) -> None:
    async with running_node(bucket, cache, posix_metadata=True) as user:
        node = await user.fs.resolve("bin/007")
        bucket.memory.put_bytes("bin/007", b"#!", metadata={"mode": "100600", "mtime": "5"})
        await trio.sleep(5)
        again = await user.fs.resolve("bin/007")
        assert (again.mode, again.mtime_ns) == (0o600, 5 * 10**9)
        # The kernel keeps the times of an inode that it knows.
        assert again.number != node.number
        bucket.memory.put_bytes("bin/007", b"#!", metadata={"color": "blue"})
        await trio.sleep(5)
        assert (await user.fs.resolve("bin/007")).mode == 0o644


async def test_what_was_changed_here_stays(bucket: Bucket, cache: Path, scripts: list[str]) -> None:
    mine = PosixAttributes(0o500, 3, 4, 5)
    async with running_node(bucket, cache, posix_metadata=True) as user:
        await shown(user, "bin")
        user.fs.file_io.set_attributes(await user.fs.resolve("bin/007"), mine)
        assert (await shown(user, "bin"))["007"] == mine  # by the rows from before
        await user.write("bin/own", b"own")
        user.fs.file_io.set_attributes(await user.fs.resolve("bin/own"), mine)
        await user.drained()
        await trio.sleep(5)
        names = await shown(user, "bin")
        assert (names["007"], names["own"], names["008"]) == (mine, mine, TOLD)
    async with running_node(bucket, cache, posix_metadata=True) as user:
        names = await shown(user, "bin")
        assert (names["007"], names["own"], names["008"]) == (mine, mine, TOLD)


async def test_what_was_changed_before_a_sync_is_on_the_disk(
    bucket: Bucket, cache: Path, scripts: list[str]
) -> None:
    """Nothing waits for an upload, so the sync itself has nothing to wait for."""
    mine = PosixAttributes(0o500, 3, 4, 5)
    async with running_node(bucket, cache) as user:
        node = await user.fs.resolve("bin/007")
        user.fs.file_io.set_attributes(node, mine)
        assert node.object is not None
        assert user.fs._storage.journal_rows.attributes("bin/007", node.object.etag) is None
        assert (await user.fs.wait_durable("", None)).result == "durable"
        assert user.fs._storage.journal_rows.attributes("bin/007", node.object.etag) == mine


async def test_another_node_sees_what_this_one_published(bucket: Bucket, cache: Path, tmp_path: Path) -> None:
    mine = PosixAttributes(0o550, 0, 0, 1_763_764_212_123_456_789)
    async with running_node(bucket, cache) as user:
        for name, size in (("small", 10), ("large", 65 << 20)):
            await user.write(name, bytes(size))
            user.fs.file_io.set_attributes(await user.fs.resolve(name), mine)
        await user.drained()
    async with running_node(bucket, tmp_path / "other", posix_metadata=True) as other:
        assert await shown(other, "") == {"small": mine, "large": mine}


async def test_a_renamed_directory_keeps_what_was_told_of_its_files(
    bucket: Bucket, cache: Path, tmp_path: Path, scripts: list[str]
) -> None:
    async with running_node(bucket, cache, posix_metadata=True) as user:
        await shown(user, "bin")
        await user.rename("bin", "tools")
        assert await shown(user, "tools") == dict.fromkeys(scripts, TOLD)
        await user.drained()
        await trio.sleep(5)
        assert await shown(user, "tools") == dict.fromkeys(scripts, TOLD)
    async with running_node(bucket, tmp_path / "other", posix_metadata=True) as other:
        assert await shown(other, "tools") == dict.fromkeys(scripts, TOLD)


@pytest.mark.parametrize("refusal", [Refused("400: it needs a key of its own"), AccessDenied("403")])
async def test_an_object_that_may_not_be_looked_at_shows_as_without_metadata_and_hides_no_other(
    bucket: Bucket, cache: Path, scripts: list[str], refusal: RemoteError, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    # Without jitter each read makes the same number of attempts before it gives up; else four or five.
    monkeypatch.setattr("fusecache.engine.runtime.metadata_client.random.random", lambda: 0.5)

    class Refusing:
        """HEAD of one object is refused."""

        def __getattr__(self, name: str) -> Any:
            return getattr(bucket, name)

        def head(self, key: str) -> ObjectInfo:
            if key == "bin/007":
                asked.append(key)
                raise refusal
            found: ObjectInfo = bucket.head(key)
            return found

    async with running_node(Refusing(), cache, posix_metadata=True) as user:
        facts = await shown(user, "bin")
        assert (facts["007"].mode, facts["008"]) == (0o644, TOLD)
        before = len(asked)
        await trio.sleep(5)
        assert (await shown(user, "bin"))["007"].mode == 0o644
        await user.rename("bin", "tools")
        assert len(asked) <= 2 * before  # the listing remembers it


async def test_a_page_of_many_heads_is_no_silence_of_the_bucket(
    bucket: Bucket, cache: Path, scripts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    struggles: list[float] = []
    note_struggle = MetadataClient._on_unresponsive

    def noted(requests: MetadataClient, seconds: float = 0.0) -> None:
        struggles.append(seconds)
        note_struggle(requests, seconds)

    monkeypatch.setattr(MetadataClient, "_on_unresponsive", noted)
    async with running_node(bucket, cache, posix_metadata=True, offload=FarOffload(8.0)) as user:
        assert len(await shown(user, "bin")) == COUNT  # a LIST, and two rounds of HEADs
        assert heads(bucket) == COUNT
    assert struggles == []


@pytest.mark.parametrize("size", [0, 1])
async def test_metadata_that_no_file_can_have_hides_nothing(bucket: Bucket, cache: Path, size: int) -> None:
    bucket.memory.put_bytes("odd", bytes(size), metadata={"mode": "7" * 30, "mtime": "1e300", "uid": "-1"})
    async with running_node(bucket, cache, posix_metadata=True) as user:
        assert (await shown(user, ""))["odd"].mode == 0o644
        assert (await user.fs.resolve("odd")).size == size
