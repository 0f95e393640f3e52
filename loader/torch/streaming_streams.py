"""The streams of StreamingDataset, by its argument names: where they lie, and their share of an epoch."""

import os
from collections.abc import Mapping
from typing import Any

from loader.base.paths import mounted_path
from loader.errors import ArgumentError, UnknownArgumentError
from loader.mds import stream

_IGNORED = {
    "download_retry", "download_timeout", "keep_zip", "predownload", "cache_limit", "stream_name", "stream_config",
}  # fmt: skip


class StreamingStream:
    """A stream with StreamingDataset's arguments and attributes: local, remote, split, proportion, repeat, choose.

    remote: a directory, or a URL that a mount of this node shows, such as `s3://bucket/data`; the stream is read there,
    and `local` may be missing. A dataset fills in proportion, repeat and choose when it is made. source: what is read,
    with the weight that was asked for.
    Raises ArgumentError without local and remote, and if the stream would have to be downloaded.
    """

    def __init__(
        self,
        *,
        local: str | None = None,
        remote: str | None = None,
        split: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        validate_hash: str | None = None,
        **ignored: Any,
    ) -> None:
        check_ignored(ignored)
        self.local, self.remote, self.split = _directory(local, remote), remote, split or ""
        self.proportion, self.repeat, self.choose = proportion, repeat, choose
        self.validate_hash = validate_hash
        self.source = stream.Stream(
            self.local, split, proportion, repeat, choose, check_hashes=validate_hash is not None
        )


def _directory(local: str | None, remote: str | None) -> str:
    """Return the directory that a stream is read in."""
    if remote is None or remote == local:
        if not local:
            raise ArgumentError("a stream needs local, a directory with the dataset, or remote")
        return str(local)
    if "://" not in str(remote):
        return os.fspath(remote)
    path = mounted_path(remote)
    if path is None:
        raise ArgumentError(
            f"remote {remote!r}: the loader downloads nothing, and no mount of this node shows it. Mount it with "
            f"`fusecache mount {remote} DIRECTORY`, or give its directory as local"
        )
    return path


def only_stream(options: Mapping[str, Any], **place: str | None) -> StreamingStream:
    """Return the stream of a dataset that has local, remote and split itself; stream_config may have more arguments.

    Raises ArgumentError for a stream_name: StreamingDataset would look up a class of that name in its registry.
    """
    name = options.get("stream_name", "stream")
    if name != "stream":
        raise ArgumentError(
            f"stream_name {name!r}: the loader has no registry of stream classes: pass streams=[...] made by your class"
        )
    return StreamingStream(**{**(options.get("stream_config") or {}), **place})


def check_ignored(ignored: Mapping[str, Any]) -> None:
    """Raise UnknownArgumentError for arguments that StreamingDataset does not have either."""
    unknown = sorted(set(ignored) - _IGNORED)
    if unknown:
        raise UnknownArgumentError(f"unknown arguments: {', '.join(unknown)}")
