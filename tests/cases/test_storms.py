"""A bucket that refuses everything for ten minutes, on a virtual clock."""

from pathlib import Path
from typing import Any

import pytest
import trio

from fusecache.engine.namespace.nodes import DirectoryHandle, in_use
from fusecache.model.errors import FusecacheError, RemoteError, Throttled, Unavailable
from fusecache.model.objects import MIB
from fusecache.policy.writeback import multipart
from tests.support.node import PUBLISHING, Bucket, User, running_node

STORM_SECONDS = 600.0
METHODS = (
    {"list_page", "head", "get_into", "put", "copy", "delete"}
    | {f"{verb}_multipart" for verb in ("create", "complete", "abort")}
    | {"upload_part"}
)


class Storm:
    """A bucket that answers every request with an error until a moment. refused: how many, by second."""

    def __init__(self, bucket: Bucket, error: type[RemoteError]) -> None:
        self._bucket = bucket
        self._error = error
        self.until = float("-inf")
        self.refused: list[float] = []

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._bucket, name)
        if name not in METHODS:
            return call

        def passed(*args: Any, **options: Any) -> Any:
            now = trio.current_time()
            if now < self.until:
                self.refused.append(now)
                error = self._error("no")
                error.asks_to_slow_down = True
                raise error
            return call(*args, **options)

        return passed


async def names_at_root(user: User) -> set[str]:
    """List the top directory, and read no file."""
    root = await user.fs.resolve("")
    found: set[str] = set()
    with in_use(root):
        handle = DirectoryHandle(root)
        while entries := await user.fs.lookup.reader.next_entries(handle, 100):
            found |= {shown.name for _, shown in entries}
    return found


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SINGLE_PUT_BYTES_MAX", "_PART_BYTES_MIN", "_PART_STEP"):
        monkeypatch.setattr(multipart, name, 4 * MIB)


@pytest.mark.case(27)
@pytest.mark.parametrize("error", [Throttled, Unavailable], ids=["429", "500"])
async def test_ten_minutes_of_refusals_lose_nothing_keep_the_order_and_are_not_answered_by_more_requests(
    tmp_path: Path, error: type[RemoteError]
):
    bucket = Bucket()
    storm = Storm(bucket, error)
    bucket.memory.put_bytes("old", b"old")
    bucket.memory.put_bytes("gone", b"gone")
    async with running_node(storm, tmp_path / "cache") as user:
        assert await names_at_root(user) == {"old", "gone"}
        began = trio.current_time()
        storm.until = began + STORM_SECONDS
        await user.mkdir("step")
        files = {f"step/shard-{index}": b"%d" % index * 1000 for index in range(8)}
        files["step/large"] = b"L" * (10 * MIB)
        for name, data in files.items():
            await user.write(name, data)
        await user.write("step/.metadata", b"index")
        await user.unlink("gone")
        await user.write("latest", b"step")
        with pytest.raises(FusecacheError):
            await user.read("old")  # an error in the end, no made-up bytes
        assert trio.current_time() - began < 120
        await trio.sleep_until(storm.until)
        assert set(bucket.shows()) == {"old", "gone"}
        assert await user.drained(600) == "durable"
        assert await user.read("old") == b"old"
    assert bucket.shows() == {
        "old": b"old",
        "step/": b"",
        **files,
        "step/.metadata": b"index",
        "latest": b"step",
    }
    order = [key for name, key in bucket.requests if name in PUBLISHING]
    assert sorted(order) == sorted({*files, "step/", "step/.metadata", "latest", "gone"})  # each once
    assert order.index("step/.metadata") > max(order.index(name) for name in files)
    assert order.index("latest") > order.index("step/.metadata")
    assert order.index("gone") > max(order.index(name) for name in files)
    # Without a back-off, eleven files would be asked for some thousand times.
    assert len(storm.refused) < 400
    last_minutes = [when for when in storm.refused if when > storm.until - 300]
    assert len(last_minutes) < 150
    assert bucket.memory.uploads() == ()
