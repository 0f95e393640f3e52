"""Fetches that no other node delivers: the bucket gets as many retries as without nodes."""

from pathlib import Path
from typing import Any

import trio

from fusecache.engine.cache.block_cache import BlockCache, CacheOptions
from fusecache.engine.cache.fetcher import ACCESS_DENIED_RETRIES
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.errors import AccessDenied, Unavailable
from fusecache.model.objects import MIB, ObjectId
from tests.support.block_caches import bucket_of_one, read_all
from tests.support.inline_offload import InlineOffload


class DeadNodes:
    """Other nodes, none of which delivers."""

    def owner(self, object_id: ObjectId, group: int) -> str | None:
        """Return a node."""
        return "node"

    def is_own(self, object_id: ObjectId, group: int) -> bool:
        """All groups are of other nodes."""
        return False

    def on_bucket_body(self, nbytes: int, seconds: float) -> None:
        """Nothing is compared."""

    def get_into(self, *asked: Any) -> None:
        """Fail."""
        raise Unavailable("no answer")


async def test_new_token_has_its_time_after_nodes_that_failed(tmp_path: Path) -> None:
    bucket, object_id, data = bucket_of_one(MIB)
    denials, send = [AccessDenied("not yet")] * ACCESS_DENIED_RETRIES, bucket.watched.get_into

    class Denying:
        """A bucket whose servers learn of the token one after the other."""

        def get_into(self, *asked: Any) -> None:
            """Refuse the first requests."""
            if denials:
                raise denials.pop()
            send(*asked)

    supervisor = Supervisor()
    options = CacheOptions(tmp_path, 1 << 30, buffer_bytes=64 * MIB, free_space_floor_bytes=0)
    cache = BlockCache(Denying(), InlineOffload(), options, supervisor, peers=DeadNodes())  # type: ignore[arg-type]  # any store
    async with trio.open_nursery() as nursery:
        await nursery.start(cache.run)
        assert await read_all(cache, object_id, MIB) == data
        nursery.cancel_scope.cancel()
    assert not denials
