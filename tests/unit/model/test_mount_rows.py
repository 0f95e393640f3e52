"""The rows of a mount table as the kernel writes it."""

import os

from fusecache.model.mount_rows import MountRow, mount_rows


def test_a_row_has_all_words() -> None:
    line = b"23 22 0:39 /part /data rw,nosuid shared:7 - fuse.fusecache s3://bucket/ rw,user_id=7\n"
    assert mount_rows(line) == [
        MountRow("23", "22", "0:39", "/part", "/data", "fuse.fusecache", "s3://bucket/", "rw,user_id=7")
    ]


def test_octal_escapes_are_bytes_of_a_path() -> None:
    (row,) = mount_rows(rb"1 0 0:1 / /a\040b\134\303\274 rw - ext4 /dev/a\040b rw" + b"\n")
    assert (row.point, row.source) == ("/a b\\ü", "/dev/a b")


def test_a_path_that_is_not_utf8_is_as_python_has_it() -> None:
    (row,) = mount_rows(b"1 0 0:1 / /\xff rw - ext4 /dev/a rw\n")
    assert row.point == os.fsdecode(b"/\xff")


def test_only_a_line_feed_ends_a_row() -> None:
    rows = mount_rows(
        "1 0 0:1 / /a\rb\x85\u2028 rw - ext4 /dev/a rw\n2 1 0:2 / /c rw - proc proc rw\n".encode()
    )
    assert [row.point for row in rows] == ["/a\rb\x85\u2028", "/c"]
