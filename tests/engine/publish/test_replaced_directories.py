"""A directory is removed, and another one gets its name: at any moment the bucket has all files of one of the two."""

from pathlib import Path

import pytest
import trio

from fusecache.model.errors import Unavailable
from tests.engine.publish.test_trees import remove
from tests.support.faulty_store import Fault, FaultyStore
from tests.support.node import Bucket, User, running_node

FILES = ("sub/a", "b")


async def save(user: User, folder: str, marker: str) -> set[bytes]:
    """Write a directory, the marker last; return what its files hold."""
    await user.mkdir(folder)
    await user.mkdir(f"{folder}/sub")
    for name in FILES:
        await user.write(f"{folder}/{name}", f"{folder} {name}".encode())
    if marker:
        await user.write(f"{folder}/{marker}", f"{folder} {marker}".encode())
    return {f"{folder} {name}".encode() for name in FILES}


@pytest.mark.parametrize("failures", [1, 2, 4])
@pytest.mark.parametrize("marker", ["", ".metadata", "latest", "sub/latest"])
@pytest.mark.parametrize("slow", FILES)
async def test_while_a_file_of_the_new_one_is_being_uploaded(
    bucket: Bucket, cache: Path, failures: int, marker: str, slow: str
) -> None:
    store = FaultyStore(bucket)
    async with running_node(store, cache) as user:
        old = await save(user, "old", marker)
        await user.rename("old", "checkpoint")
        assert await user.drained() == "durable"
        await trio.sleep(5)
        since = len(bucket.states) - 1
        store.script(Fault(Unavailable("no"), method="put", key=f"next/{slow}", times=failures))
        new = await save(user, "next", marker)
        await trio.sleep(2)
        await remove(user, "checkpoint/sub")
        await remove(user, "checkpoint")
        await user.rename("next", "checkpoint")
        assert await user.drained() == "durable"
        await trio.sleep(5)
    for state in bucket.states[since:]:
        assert old <= set(state.values()) or new <= set(state.values()), state
    names = {*FILES, *filter(None, (marker,))}
    shown = {key: content for key, content in bucket.shows().items() if content}
    assert shown == {f"checkpoint/{name}": f"next {name}".encode() for name in names}
