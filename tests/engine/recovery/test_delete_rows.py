"""A delete that was pending at the last end: its row says whether it was sent, if the version that ran last says so."""

from pathlib import Path

import pytest
import trio

from tests.support.node import Bucket, photograph, running_node


@pytest.mark.parametrize("ran_since", ["this version", "an earlier version"])
async def test_new_content_replaces_what_the_bucket_has_whichever_version_sent_a_delete(
    bucket: Bucket, tmp_path: Path, ran_since: str
) -> None:
    async with running_node(bucket, tmp_path / "1") as user:
        await user.write("a", b"old")
        assert await user.drained() == "durable"
        bucket.takes_nothing = True
        await user.unlink("a")
        await trio.sleep(0.1)
        photograph(tmp_path / "1", tmp_path / "2")
        bucket.is_cut_off = True
    bucket.come_back()
    if ran_since == "an earlier version":  # it started, sent the DELETE, and was killed: it wrote no row
        (tmp_path / "2" / "empty").touch()
        bucket.memory.delete("a")
    for start in "23":
        async with running_node(bucket, tmp_path / start) as user:
            if start == "2":
                bucket.takes_nothing = True
                await trio.sleep(0.1)
                photograph(tmp_path / "2", tmp_path / "3")
                bucket.is_cut_off = True
                continue
            bucket.come_back()
            await user.write("a", b"new")
            assert await user.drained() == "durable"
            assert user.fs.publisher.rejections.conflicts == {}
    assert bucket.shows() == {"a": b"new"}
    if ran_since == "this version":
        assert ("delete", "a") not in bucket.requests  # the new content supersedes it, as it was not sent
