"""A stage of a pipeline that a test starts in processes of its own."""

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path


def after_first_hint(root: str, urls: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Yield all, but behind the first one only once the daemon of a mount fetches for hints.

    A worker on a busy machine could have read everything before.
    """
    statistics = Path(root, ".fusecache/stats.json")
    for number, url in enumerate(urls):
        while number and not json.loads(statistics.read_text())["cache"]["bytes_by_cause"]["hint"]:
            time.sleep(0.05)
        yield url
