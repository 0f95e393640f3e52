"""Which mount a path leads into, by tables as the kernel writes them."""

from pathlib import Path

import pytest

from fusecache.mount.mount_table import root_of

# Mount 3 lies below mount 2; mount 5 was hidden by mount 6, and mount 8 is mounted over mount 7.
TABLE = """\
1 0 254:0 / / rw - ext4 /dev/vda rw
2 1 0:50 / /data rw - fuse.fusecache s3://bucket/ rw
3 2 0:51 / /data/run rw - fuse.fusecache s3://bucket/run/ rw
4 1 0:52 / /database rw - fuse.fusecache s3://other/ rw
5 1 0:53 / /hidden/inner rw - fuse.fusecache s3://bucket/ rw
6 1 0:54 / /hidden rw - fuse.fusecache s3://bucket/ rw
7 1 0:55 / /twice rw - fuse.fusecache s3://bucket/ rw
8 7 0:56 / /twice rw - fuse.fusecache s3://bucket/ rw
9 8 0:57 / /twice/top rw - fuse.fusecache s3://bucket/ rw
10 7 0:58 / /twice/under rw - fuse.fusecache s3://bucket/ rw
"""


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/data", "/data"),
        ("/data/runs/x", "/data"),
        ("/data/run", "/data/run"),
        ("/data/run/step-1/model.pt", "/data/run"),
        ("/database/x", "/database"),
        ("/hidden/inner/x", "/hidden"),
        ("/twice/top/x", "/twice/top"),
        ("/twice/under/x", "/twice"),
        ("/elsewhere", None),
    ],
)
def test_a_path_leads_into_the_innermost_mount_that_is_not_hidden(
    tmp_path: Path, path: str, root: str | None
) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(TABLE)
    assert root_of(path, table) == root
