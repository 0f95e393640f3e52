"""A bucket that is gone (404 NoSuchBucket): cached names are served, saves go on, and everything resumes."""

from pathlib import Path

import pytest
import trio

from fusecache.engine.runtime.metadata_client import DENIED_SECONDS
from fusecache.model.errors import BucketMissing, NotFound
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, listed, running_node

GONE = BucketMissing("LIST s3://bucket/: NoSuchBucket (404)")


async def test_cached_names_outlive_a_missing_bucket(bucket: Bucket, cache: Path) -> None:
    bucket.memory.put_bytes("run/step-1", b"old")
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        await listed(user, "run")
        await trio.sleep(5)
        store.script(Fault(GONE, "*", times=None))
        began = trio.current_time()
        await user.fs.resolve("run/step-1")
        await listed(user, "run")
        await user.write("run/step-2", b"model")
        with pytest.raises(NotFound):
            await user.fs.resolve("run/latest")
        assert trio.current_time() - began < 2
        await trio.sleep(300)
        await user.fs.resolve("run/step-1")
        assert user.fs.statistics()["unanswered_seconds"] > 250
        store.heal()
        assert await user.drained() == "durable"
    assert bucket.shows() == {"run/step-1": b"old", "run/step-2": b"model"}


async def test_unknown_names_of_a_missing_bucket_fail_soon(bucket: Bucket, cache: Path) -> None:
    """A single wrong answer is retried; once the bucket has been missing for long, calls fail at once."""
    store = FaultyStore(bucket)
    bucket.memory.put_bytes("known/file", b"1")
    async with running_node(store, cache) as user:
        store.script(Fault(GONE, "list_page", times=1))
        await user.fs.resolve("known/file")
        await trio.sleep(5)
        store.script(Fault(GONE, "*", times=None))
        began = trio.current_time()
        with pytest.raises(BucketMissing):
            await user.fs.resolve("never/seen")
        assert trio.current_time() - began <= DENIED_SECONDS + 1
        await trio.sleep(2 * DENIED_SECONDS)
        began = trio.current_time()
        with pytest.raises(BucketMissing):
            await user.fs.resolve("never/asked")
        assert trio.current_time() - began <= 1
