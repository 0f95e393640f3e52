"""A row that the journal can never take, by a bug or a hostile name: its call fails, and all others go on."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.index import journal
from fusecache.model.errors import InternalError
from fusecache.model.objects import MIB
from tests.support.mistakes import Mistake
from tests.support.node import Bucket, User, running_node

CALLS: dict[str, Callable[[User], Awaitable[None]]] = {
    "close": lambda user: user.write("hostile", b"1"),
    "close of a large file": lambda user: user.write("hostile", b"1" * 9 * MIB),
    "mkdir": lambda user: user.mkdir("hostile"),
    "symlink": lambda user: user.symlink("target", "hostile"),
    "unlink": lambda user: user.unlink("theirs-hostile"),
    "rename": lambda user: user.rename("theirs", "hostile"),
}


@pytest.fixture
def faulty_rows(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that makes rows with a hostile name unwritable. The bucket has two files."""
    real = journal.to_row

    def faulty(record: Any) -> dict[str, Any]:
        if "hostile" in record.key or "hostile" in getattr(record, "target", ""):
            raise Mistake("cannot be encoded")
        return real(record)

    for key in ("theirs", "theirs-hostile"):
        bucket.memory.put_bytes(key, b"0")
    return lambda: monkeypatch.setattr(journal, "to_row", faulty)


@pytest.mark.parametrize("name", CALLS)
async def test_unwritable_row_fails_only_its_call(
    bucket: Bucket, cache: Path, faulty_rows: Callable[[], None], name: str
) -> None:
    """What was acknowledged before and after it outlives the daemon."""
    supervisor = Supervisor()
    async with running_node(bucket, cache, supervisor=supervisor) as user:
        bucket.takes_nothing = True
        await user.write("acknowledged", b"1")
        faulty_rows()
        with pytest.raises(InternalError, match=r"journal .*: unexpected error in the daemon: Mistake"):
            await CALLS[name](user)
        await user.write("later", b"2")
        await user.rename("later", "moved")
        user.fs.journal.check_writable()
        assert supervisor.statistics()["journal"]["failures"] > 0
    bucket.come_back()
    async with running_node(bucket, cache) as user:
        assert await user.drained() == "durable"
        shown = bucket.shows()
        assert (shown["acknowledged"], shown["moved"]) == (b"1", b"2")


@pytest.mark.parametrize("name", CALLS)
async def test_neighbours_of_unwritable_rows_are_published(
    bucket: Bucket, cache: Path, faulty_rows: Callable[[], None], name: str
) -> None:
    faulty_rows()
    async with running_node(bucket, cache) as user:
        with pytest.raises(InternalError):
            await CALLS[name](user)
        for number in range(20):
            await user.write(f"file-{number}", MIB * b"1")
        result = await user.drained()
        assert result == ("error" if "close" in name else "durable")  # its file is rejected, and kept
        shown = bucket.shows()
        assert all(f"file-{number}" in shown for number in range(20))
        assert user.fs.cache.statistics().staging_bytes < 12 * MIB
