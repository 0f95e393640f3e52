"""What must hold in the bucket: commit markers at any moment, and every acknowledged close at the end."""

import hashlib
import json
import posixpath
from pathlib import Path

from tests.chaos.contents import bytes_of, is_expected
from tests.chaos.load import Ledger, Report
from tests.chaos.programs import RUNS
from tests.s3server import ServerProcess
from tests.s3server.control import ObjectView


class Markers:
    """Looks whether each index in the bucket has its files, and whether each `latest` names a complete checkpoint."""

    def __init__(self, server: ServerProcess, ledger: Ledger, directory: Path, report: Report) -> None:
        self._server, self._ledger, self._directory, self._report = server, ledger, directory, report
        self._read: dict[tuple[str, str], bytes] = {}
        self._seen: set[tuple[str, str, str]] = set()
        self.looks = 0

    def look(self) -> None:
        """Take one look at the whole bucket."""
        objects = self._server.control.objects()
        self.looks += 1
        for key, view in objects.items():
            if key.endswith("/.metadata"):
                self._look_at_index(key, view, objects)
            elif key.endswith("/latest"):
                step = (self._content(key, view) or b"").decode(errors="replace")
                index = f"{posixpath.dirname(key)}/{step}/.metadata"
                if step and index not in objects:
                    self._find(key, view, f"{key} names {step}, whose index is not in the bucket")

    def _look_at_index(self, key: str, view: ObjectView, objects: dict[str, ObjectView]) -> None:
        data = self._content(key, view)
        if data is None:
            return
        try:
            files = json.loads(data)
        except ValueError:
            self._find(key, view, f"{key} is not whole")
            return
        for path, content in files.items():
            size = sum(piece[1] for piece in content)
            if path not in objects:
                self._find(key, view, f"{key} is in the bucket, and {path} is not")
            elif objects[path].size != size:
                self._find(
                    key, view, f"{key} is in the bucket, and {path} has {objects[path].size} B, not {size}"
                )

    def _content(self, key: str, view: ObjectView) -> bytes | None:
        """Return what an object held at the look; None if it has changed since."""
        place = (key, view.etag)
        if place not in self._read:
            try:
                data = self._server.control.read(key)
            except KeyError:
                return None
            if hashlib.md5(data, usedforsecurity=False).hexdigest() != view.etag:
                return None
            self._read[place] = data
        return self._read[place]

    def _find(self, key: str, view: ObjectView, text: str) -> None:
        if (key, view.etag, text) not in self._seen:
            self._seen.add((key, view.etag, text))
            top = "/".join(key.split("/")[:2]) + "/"
            requests = [
                (
                    entry.time,
                    f"{entry.time:.3f} bucket {entry.operation} {entry.key} {entry.status} {entry.took_effect}",
                )
                for entry in self._server.control.log()
                if entry.key.startswith(top) and entry.took_effect is not None
            ]
            lines = [line for _, line in sorted([*requests, *self._ledger.history(top)])]
            evidence = self._directory / f"order-{len(self._seen)}"
            evidence.write_text("\n".join([text, *lines]) + "\n")
            self._report("order", f"{text}; calls and requests: {evidence}")


def compare(server: ServerProcess, ledger: Ledger) -> dict[str, str]:
    """Return what differs between the promises and the bucket: path -> what is wrong."""
    promised = ledger.snapshot()
    objects = {
        key: view
        for key, view in server.control.objects().items()
        if not key.endswith("/") and key.startswith(f"{RUNS}/")
    }
    wrong = {
        f"{key}": "wrong bytes: nothing of that name was written" for key in objects.keys() - promised.keys()
    }
    for path, (allowed, is_partial) in promised.items():
        data = server.control.read(path) if path in objects else None
        if is_expected(data, allowed):
            continue
        sizes = [None if content is None else len(bytes_of(content)) for content in allowed]
        last = allowed[-1]
        if is_partial and data is not None and last is not None and bytes_of(last).startswith(data):
            continue
        if data is None:
            wrong[path] = f"lost: not in the bucket; {sizes} B are allowed"
        elif sizes == [None]:
            wrong[path] = "unhealed: removed here, and still in the bucket"
        else:
            wrong[path] = f"wrong bytes: {len(data)} B in the bucket; {sizes} B are allowed"
    return wrong
