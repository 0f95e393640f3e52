"""Which mounts a command on a bucket asks: all that may have the keys."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from fusecache.cli import sources
from fusecache.cli.sources import ask_mounts
from fusecache.model.format_text import printable


@pytest.mark.parametrize(
    ("mounted", "prefix", "is_asked"),
    [
        ("s3://bucket", "run/", True),
        ("s3://bucket/", "", True),
        ("s3://bucket/run", "", True),
        ("s3://bucket/run/", "run", True),
        ("s3://bucket/run", "run/", True),
        ("s3://bucket/run", "run/step-1/", True),
        ("s3://bucket/run/step-1/", "run/", True),
        ("s3://bucket/run-2", "run", True),  # "run" may be the beginning of a name
        ("s3://bucket/run-2", "run/", False),
        ("s3://bucket/run", "run-2/", False),
        ("s3://bucket-2/run", "run/", False),
        (printable("s3://bucket/a\u3000b"), "a\u3000b/", True),
    ],
)
def test_a_mount_that_may_have_the_keys_is_asked(
    monkeypatch: pytest.MonkeyPatch, mounted: str, prefix: str, *, is_asked: bool
) -> None:
    asked: list[str] = []

    def resolve(point: str) -> tuple[str, str]:
        asked.append(point)
        return point, ""

    def entries() -> Iterable[Any]:
        return [SimpleNamespace(source=mounted, device="0:50", point="/data")]

    monkeypatch.setattr(sources, "our_entries", entries)
    monkeypatch.setattr(sources, "resolve_in_mount", resolve)
    monkeypatch.setattr(sources, "command", lambda mount, request: {"result": "ok"})
    assert list(ask_mounts("bucket", prefix, {}, is_needed=True)) == [{"result": "ok"}] * is_asked
    assert asked == ["/data"] * is_asked
