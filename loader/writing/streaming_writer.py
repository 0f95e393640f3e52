"""MDSWriter with the arguments of MosaicML's, for code that was written for it."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loader.base.paths import is_url, mounted_path, mounts_below
from loader.errors import ArgumentError, NotEmptyError
from loader.mds.encodings import Buffer
from loader.writing.shard_packer import DEFAULT_SIZE_LIMIT
from loader.writing.writer import MDSWriter, write_index, write_pieces

# About uploading, which the mount does.
_IGNORED = {"progress_bar", "max_workers", "retry"}


class StreamingMDSWriter(MDSWriter):
    """Writes a dataset, with the arguments of the MDSWriter of MosaicML streaming 0.13.

    out: a directory; or a URL such as `s3://bucket/data` that a mount of this node shows; or both, as (local, remote).
    The files are written to `remote`, if there is one, else to `local`. keep_local: write them to `local` as well.
    exist_ok: remove all that is in `local` first. progress_bar, max_workers and retry do nothing: the mount uploads.

    Raises NotEmptyError (a FileExistsError, as there) if `local` has files. Different from there: if an exception
    leaves the block, no index.json is written, and a dataset in `remote` is never overwritten (NotEmptyError).
    Raises ArgumentError for a URL that no mount shows, for exist_ok on a whole mount, and for unknown arguments.
    """

    def __init__(
        self,
        *,
        columns: Mapping[str, str],
        out: str | Path | tuple[str, str],
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | str | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        exist_ok: bool = False,
        **ignored: Any,
    ) -> None:
        unknown = sorted(set(ignored) - _IGNORED)
        if unknown:
            raise ArgumentError(f"unknown arguments: {', '.join(unknown)}")
        self.local, self.remote = _places(out)
        self.keep_local = keep_local
        if self.local is not None:
            _make_empty(Path(self.local), exist_ok=exist_ok)
        target = self.local if self.remote is None else _directory(self.remote)
        self._copy = os.path.realpath(self.local) if self.local and self.remote and keep_local else None
        # MosaicML's writer takes 0 for no limit.
        super().__init__(
            str(target), columns, compression=compression, hashes=hashes, size_limit=size_limit or None
        )
        if self._copy is not None:
            os.makedirs(self._copy, exist_ok=True)

    def close(self) -> None:
        """Write the last shard, then the index. The dataset exists once this returns."""
        was_closed = self._closed
        super().close()
        if self._copy is not None and not was_closed:
            write_index(self._copy, self._shards)

    def _save(self, name: str, data: Sequence[Buffer]) -> None:
        super()._save(name, data)
        if self._copy is not None:
            write_pieces(f"{self._copy}/{name}", data)


def _places(out: object) -> tuple[str | None, str | None]:
    """Return (local, remote), either of them None."""
    if isinstance(out, (tuple, list)):
        if len(out) != 2 or not all(isinstance(each, (str, os.PathLike)) for each in out):
            raise ArgumentError(f"out is a directory, or a pair (local, remote), not {out!r}")
        return os.path.expanduser(out[0]), os.fspath(out[1])
    if not isinstance(out, (str, os.PathLike)):
        raise ArgumentError(f"out is a directory, or a pair (local, remote), not {out!r}")
    return (None, os.fspath(out)) if is_url(out) else (os.path.expanduser(out), None)


def _directory(remote: str) -> str:
    """Return the directory that the files of `remote` lie in."""
    if not is_url(remote):
        return remote
    found = mounted_path(remote)
    if found is None:
        raise ArgumentError(
            f"{remote}: the loader uploads nothing, and no mount of this node shows it. Mount it with "
            f"`fusecache mount {remote} DIRECTORY`, or write to a directory"
        )
    return found


def _make_empty(local: Path, *, exist_ok: bool) -> None:
    if not local.is_dir() or not any(local.iterdir()):
        return
    if not exist_ok:
        raise NotEmptyError(
            f"{local} is not empty: choose another directory, or remove what is in it with exist_ok=True"
        )
    for point in mounts_below(local):
        raise ArgumentError(
            f"exist_ok=True would remove all that is in the mount {point}: choose a folder without a mount in it"
        )
    for path in local.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
