"""Writes MDS datasets: shard after shard, and index.json at the very end.

Every file is written once, sequentially, and closed, so the target can be a mounted bucket or a disk. Without
index.json there is no dataset: a writer that fails leaves shards, never half a dataset. `resume` continues after the
complete shards.

Invariants: 1. index.json appears complete, after all shards are closed. 2. No offset reaches 2**32.
"""

import os
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from fusecache.disk.beneath import open_beneath, replace_text
from loader.base.paths import check_is_local
from loader.errors import EncodingError, MissingValueError, NotEmptyError, ValueTypeError, WriterError
from loader.mds.encodings import Buffer, encoder
from loader.mds.index import INDEX_NAME
from loader.writing.resume_scan import left_over_shards, make_directory, samples_of, whole_shards
from loader.writing.shard_packer import (
    DEFAULT_SIZE_LIMIT,
    OFFSET_LIMIT,
    PackOptions,
    ShardPacker,
    index_text,
    schema_of,
)

_LARGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """What a writer has written: samples in complete shards, their raw bytes, and the bytes of the files."""

    shards: int
    samples: int
    raw_bytes: int
    stored_bytes: int


class MDSWriter:
    """Writes samples into a new dataset directory. Use it in a `with` block.

    columns: name -> encoding. compression, hashes, size_limit (bytes), align: as in PackOptions. A sample larger than
    size_limit gets a shard of its own. resume: keep the complete shards that an earlier writer with the same settings
    left here, and continue after them; `samples` is the number of samples in them. progress: called with a
    ResumePoint after each shard. exist_ok: exists in MosaicML's writer, where True empties the directory; refused.
    If an exception leaves the block, no index.json is written. Raises WriterError for settings that cannot work, if
    `out` contains a dataset or (without resume) shards already, and if the shards to resume have other settings.
    Raises ArgumentError for a URL.
    """

    def __init__(  # noqa: PLR0913 -- one of them is MosaicML's, to refuse it with an explanation
        self,
        out: str | Path,
        columns: Mapping[str, str],
        *,
        compression: str | None = None,
        hashes: Sequence[str] | str | None = None,
        size_limit: int | str | None = DEFAULT_SIZE_LIMIT,
        align: int = 1,
        resume: bool = False,
        progress: Callable[[ResumePoint], None] | None = None,
        exist_ok: bool = False,
    ) -> None:
        check_is_local(out)
        if exist_ok:
            raise WriterError(
                f"exist_ok=True would remove all that is in {out}: remove it yourself, or continue with resume=True"
            )
        schema = schema_of(columns)
        self._packer = ShardPacker(schema, PackOptions(compression, hashes, size_limit, align))
        self._columns = list(
            zip(schema.names, [encoder(name) for name in schema.encodings], schema.sizes, strict=True)
        )
        self._directory = Path(out)
        make_directory(self._directory)
        # Without symlinks: no file is written through one, also if another client puts one here later.
        self.folder = os.path.realpath(out)
        if (self._directory / INDEX_NAME).exists():
            raise NotEmptyError(
                f"{self._directory} holds a dataset already: choose another directory, or remove it"
            )
        self._check_left_over(resume=resume)
        self._shards = whole_shards(self._directory, self._packer) if resume else []
        self._pending: list[Buffer] = []
        self._sizes: list[int] = []
        self._pending_bytes = self._packer.empty_bytes
        self._closed = False
        self._on_shard = progress
        self._progress = ResumePoint(0, 0, 0, 0)
        for shard in self._shards:
            self._count(shard)

    @property
    def samples(self) -> int:
        """The number of samples written so far, including those of a shard that is not full yet."""
        return self._progress.samples + len(self._sizes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        self._closed = True
        self._pending, self._sizes = [], []

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add one sample; writes a shard to the directory whenever one is full.

        Raises EncodingError, naming the column, for a value that does not fit; the sample is then not written. Raises
        WriterError if offsets would exceed 2**32, or the writer is closed.
        """
        self._check_open()
        if not hasattr(sample, "keys"):
            raise ValueTypeError(
                f"a sample maps its columns to values; {reprlib.repr(sample)} ({type(sample).__name__}) does not"
            )
        self._add(*self._encode(sample))

    def write_encoded(self, data: bytes) -> None:
        """Add one sample that is encoded already, as a shard with these columns holds it; else as `write`."""
        self._check_open()
        self._add(data)

    def skip_written(self, samples: Iterator[Mapping[str, Any]]) -> None:
        """Take from the iterator as many samples as the complete shards of an earlier writer have.

        Raises WriterError if the samples of the last shard differ: the new ones would then begin at another place.
        """
        if not self._shards:
            return
        name = self._packer.file_name(len(self._shards) - 1)
        kept = samples_of(self._directory / name, self._packer)
        deque(islice(samples, self.samples - len(kept)), maxlen=0)
        for stored in kept:
            sample = next(samples, None)
            if sample is None or not self._is_stored(sample, stored):
                raise WriterError(
                    f"{self._directory / name} has other samples than the input gives now, so the input changed: "
                    f"restore it, choose another directory, or remove {self._directory} and begin again"
                )

    def _is_stored(self, sample: Mapping[str, Any], stored: bytes) -> bool:
        if "pkl" in self._packer.schema.encodings:  # equal objects have several pickles
            return True
        try:
            return b"".join(self._encode(sample)) == stored
        except EncodingError:
            return False

    def _add(self, *pieces: bytes) -> None:
        limit, size = self._packer.size_limit, sum(map(len, pieces))
        if self._packer.empty_bytes + 4 + size >= OFFSET_LIMIT:
            raise WriterError(f"a sample of {size} bytes does not fit: offsets in a shard have 32 bits")
        if self._sizes and limit is not None and self._pending_bytes + 4 + size > limit:
            self._write_shard()
        if self._pending_bytes + 4 + size >= OFFSET_LIMIT:
            raise WriterError(
                "all samples in one shard pass 4 GiB, but offsets have 32 bits: set a size_limit"
            )
        # A large value is not copied into its sample.
        self._pending += pieces if size > _LARGE_BYTES else [b"".join(pieces)]
        self._sizes.append(size)
        self._pending_bytes += 4 + size

    def close(self) -> None:
        """Write the last shard, then the index. The dataset exists once this returns."""
        if self._closed:
            return
        if self._sizes:
            self._write_shard()
        self._closed = True
        write_index(self.folder, self._shards)

    def finish(self) -> None:
        """Same as `close`, under the name that MosaicML's writer uses."""
        self.close()

    def _check_left_over(self, *, resume: bool) -> None:
        ending = self._packer.file_name(0).removeprefix("shard.00000")
        for name in left_over_shards(self._directory):
            if not resume:
                raise NotEmptyError(
                    f"{self._directory} holds {name}, which an unfinished writer left: continue after its complete "
                    f"shards with resume=True (--resume), choose another directory, or remove it"
                )
            if not name.endswith(ending):
                raise WriterError(
                    f"{self._directory} holds {name}, which has another compression than these settings: resume with "
                    f"the settings that it was written with, choose another directory, or remove it"
                )

    def _check_open(self) -> None:
        if self._closed:
            raise WriterError("this writer is closed")

    def _encode(self, sample: Mapping[str, Any]) -> list[bytes]:
        if len(sample) != len(self._columns):
            unknown = ", ".join(sorted(map(str, set(sample) - set(self._packer.schema.names))))
            if unknown:
                raise EncodingError(f"the sample has values for which there is no column: {unknown}")
        head: list[int] = []
        values: list[bytes] = []
        for name, encode, size in self._columns:
            try:
                value = encode(sample[name])
            except KeyError:
                raise MissingValueError(f"the sample has no value for column {name!r}") from None
            except EncodingError as problem:
                raise type(problem)(f"column {name!r}: {problem}") from problem
            if not size:
                if len(value) >= OFFSET_LIMIT:
                    raise EncodingError(f"column {name!r}: {len(value)} bytes are too many for a sample")
                head.append(len(value))
            elif size != len(value):
                raise MissingValueError(f"column {name!r}: {len(value)} bytes, but each value has {size}")
            values.append(value)
        return [np.array(head, "<u4").tobytes(), *values]

    def _write_shard(self) -> None:
        number = len(self._shards)
        entry, data = self._packer.pack(number, self._sizes, self._pending)
        # An error at close (no space, a bucket that rejects the write) is raised here and ends the writer.
        self._save(self._packer.file_name(number), data)
        self._shards.append(entry)
        self._sizes = []
        self._pending_bytes = self._packer.empty_bytes
        self._count(entry)
        if self._on_shard is not None:
            self._on_shard(self._progress)

    def _save(self, name: str, data: Sequence[Buffer]) -> None:
        write_pieces(f"{self.folder}/{name}", data)

    def _count(self, entry: Mapping[str, Any]) -> None:
        so_far = self._progress
        self._progress = ResumePoint(
            so_far.shards + 1,
            so_far.samples + entry["samples"],
            so_far.raw_bytes + entry["raw_data"]["bytes"],
            so_far.stored_bytes + (entry["zip_data"] or entry["raw_data"])["bytes"],
        )


def write_pieces(path: str, pieces: Iterable[Buffer]) -> None:
    """Write a file that comes in pieces. path: without symlinks."""
    with open(path, "wb", opener=open_beneath) as file:
        file.writelines(pieces)


def write_index(folder: str, shards: Sequence[Mapping[str, Any]]) -> None:
    """Write index.json atomically: it appears complete or not at all. folder: without symlinks."""
    replace_text(f"{folder}/{INDEX_NAME}", index_text(shards))
