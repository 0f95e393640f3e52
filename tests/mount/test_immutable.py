"""`--immutable DIRECTORY/`: no program makes a name below it, so none changes the data set by accident."""

import errno
from collections.abc import Callable

from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket

Mounting = Callable[..., Mount]


def refusal(call: Callable[[], object]) -> int | None:
    """Return the errno with which a call fails; None if it succeeds."""
    try:
        call()
    except OSError as exc:
        return exc.errno
    return None


def test_no_name_is_made_below_an_immutable_directory(mount: Mounting, bucket: Bucket, expect_log):
    """Names beside it and files of a pattern without "/" are made; what is there may be replaced and removed."""
    for name in ("data/0.mds", "data/1.mds", "other"):
        bucket.put(name, b"as before")
    expect_log("data/new: not created, as data/ is immutable; write elsewhere")
    one: Mount = mount("--immutable", "data/", "--immutable", "*.mds")
    data = one.path / "data"
    assert refusal(lambda: (data / "new").write_bytes(b"x")) == errno.EROFS
    assert refusal(lambda: (data / "folder").mkdir()) == errno.EROFS
    assert refusal(lambda: (data / "link").symlink_to("0.mds")) == errno.EROFS
    assert refusal(lambda: (one.path / "other").rename(data / "moved")) == errno.EROFS
    assert refusal(lambda: (data / "0.mds").rename(data / "2.mds")) == errno.EROFS
    (one.path / "datasheet").write_bytes(b"new")
    (one.path / "made.mds").write_bytes(b"new")
    (data / "0.mds").write_bytes(b"replaced")
    (data / "1.mds").unlink()
    one.sync()
    assert bucket.names() == ["data/0.mds", "datasheet", "made.mds", "other"]
    assert bucket.get("data/0.mds") == b"replaced"
