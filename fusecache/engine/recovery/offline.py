"""Lists, and deletes from, a cache directory that no daemon uses: content that the bucket does not have.

All calls block; no bucket is needed. Listing changes nothing: it only predicts what `journal_replay.py` will decide at
the next mount.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fusecache.disk.staging import StagingDirectory
from fusecache.disk.state_directory import StateDirectory
from fusecache.engine.recovery.quarantine import conflict_row, listing_of, operation_row, quarantine_row
from fusecache.index.journal import DropFile, DropOperation, Journal, PutAbort, PutFile
from fusecache.model.errors import NotFound, NotPermitted
from fusecache.model.records import OWED, FileRecord, FileState

_KIND_AND_MESSAGE = {
    FileState.OPEN: ("orphan", "was not closed before the daemon ended"),
    FileState.FAILED: ("orphan", ""),
    FileState.ORPHAN: ("", ""),
    FileState.REJECTED: ("refused", ""),
    FileState.LOCAL: ("local-only", "is never uploaded, because its path matches `local_only`"),
    **dict.fromkeys(OWED, ("waiting", "was closed: the next read-write mount uploads it")),
}


class OfflineCache:
    """One cache directory, locked while the `with` block runs."""

    def __init__(self, directory: Path) -> None:
        """Raises StateError if the directory is in use, unreadable or no cache directory, and LocalDiskError."""
        self._state = StateDirectory(directory, None)
        try:
            self._journal = Journal(directory / "journal")
        except BaseException:
            self._state.__exit__(None, None, None)
            raise
        self._staging = StagingDirectory(directory)
        self._prefix = self._state.identity.partition(" ")[2].partition("://")[2].partition("/")[2]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._journal.close()
        self._state.__exit__(kind, value, traceback)

    def listing(self) -> dict[str, Any]:
        """Return what `Quarantine.listing` does, and the files that wait for their upload."""
        local_paths = {**self._staging.staged(), **self._staging.quarantined()}
        rows = []
        records = self._journal.files()
        for record in records:
            if record.state in _KIND_AND_MESSAGE:
                rows.append(self._row(record, local_paths))
        known = {record.generation for record in records}
        for number in local_paths.keys() - known:
            rows.append(_unknown_row(number, local_paths[number]))
        rows += [operation_row(each, self._path) for each in self._journal.operations() if each.error]
        for conflict in self._journal.conflicts():
            rows.append(conflict_row(conflict, self._path(conflict.key), self._path(conflict.kept_as)))
        return listing_of(rows)

    def delete(self, number: int) -> int:
        """Remove a file for good; return the bytes freed. Raises NotFound, NotPermitted."""
        row = next((row for row in self.listing()["entries"] if row["id"] == number), None)
        if row is None:
            raise NotFound(f"{number}: no such entry to delete")
        if row["kind"] in {"waiting", "conflict", "local-only"}:
            raise NotPermitted(f"{number}: {row['path']} can only be removed on the mount: mount it first")
        if "change" in row:
            self._journal.apply([DropOperation(number)])
            return 0
        record = next((each for each in self._journal.files() if each.generation == number), None)
        if record is not None:
            dropped = FileRecord(
                number, FileState.DROPPED, record.key, 0, 0, "", record.boot_id, record.attributes
            )
            # The next mount aborts its multipart upload.
            aborts = [PutAbort(record.key, record.upload_id)] if record.upload_id else []
            self._journal.apply([*aborts, PutFile(dropped)])
        self._staging.delete_quarantined(number)
        self._staging.delete(number)
        self._journal.apply([DropFile(number)])
        return int(row["bytes"])

    def _row(self, record: FileRecord, local_paths: Mapping[int, Path]) -> dict[str, Any]:
        kind, message = _KIND_AND_MESSAGE[record.state]
        local_path = local_paths.get(record.generation)
        row = quarantine_row(record, self._path(record.key), local_path)
        stat = None if local_path is None else local_path.stat()
        if stat is not None and record.state in {FileState.OPEN, FileState.FAILED}:
            row |= {"bytes": stat.st_size, "time": stat.st_mtime}
        return {**row, "kind": kind or row["kind"], "message": row["message"] or message}

    def _path(self, key: str) -> str:
        return key.removeprefix(self._prefix)


def _unknown_row(number: int, local_path: Path) -> dict[str, Any]:
    stat = local_path.stat()
    return {
        "id": number,
        "kind": "orphan",
        "path": "",
        "bytes": stat.st_size,
        "time": stat.st_mtime,
        "reason": "unknown",
        "message": "an unfinished file without a journal row",
        "local_path": str(local_path),
    }
