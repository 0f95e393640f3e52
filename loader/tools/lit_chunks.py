"""Reads the chunks of LitData with its own package. Each source reads one chunk, and can be pickled.

LitData's pickles run code, so they are never decoded.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loader.base.optional_imports import optional_module
from loader.errors import EncodingError, LoaderError, WriterError, cause_text
from loader.tools.row_sources import value_converter

INDEX = "index.json"
# LitData's format -> encoding. An image file is taken as it is, and not decoded.
ENCODINGS = {
    "int": "int",
    "float": "float64",
    "bool": "uint8",
    "str": "str",
    "bytes": "bytes",
    "json": "json",
    "jpeg": "jpeg",
    "numpy": "ndarray",
    "no_header_numpy": "ndarray",
    "tensor": "ndarray",
    "no_header_tensor": "ndarray",
}
DECODED = ENCODINGS.keys() - {"jpeg"}


@dataclass(frozen=True, slots=True)
class LitChunk:
    """The samples of one chunk. number: its place in index.json of its folder. columns: name -> encoding."""

    path: str
    number: int
    columns: Mapping[str, str]
    all_names: bool = False

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples. Raises LoaderError, naming chunk and sample, for what is damaged or fits no column."""
        folder = os.path.dirname(self.path)
        index = _read_index(folder)
        formats = _formats(index, folder)
        _check_columns(self.columns, formats, folder, all_names=self.all_names)
        converts = {name: value_converter(encoding) for name, encoding in self.columns.items()}
        for number, sample in enumerate(self._samples(index, formats)):
            row: dict[str, Any] = {}
            for name, convert in converts.items():
                try:
                    row[name] = convert(_plain(sample[name]))
                except (EncodingError, TypeError, ValueError, ArithmeticError) as problem:
                    raise LoaderError(
                        f"{self.path}, sample {number}: {name}: {problem}; choose another encoding with --columns"
                    ) from None
            yield row

    def _samples(self, index: Mapping[str, Any], formats: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
        litdata = _litdata()
        raw = optional_module("litdata.streaming.serializers", why="convert litdata").BytesSerializer
        chunk = index["chunks"][self.number]
        _check_size(self.path, chunk)
        # LitData unpacks a chunk beside itself, where it may also remove it. So it gets a folder with a link.
        with tempfile.TemporaryDirectory(prefix="litdata-") as folder:
            os.symlink(os.path.abspath(self.path), os.path.join(folder, chunk["filename"]))
            with open(os.path.join(folder, INDEX), "w") as file:
                json.dump({**index, "chunks": [chunk]}, file)
            unread = {kind: raw() for kind in formats.values() if kind not in DECODED}
            number = 0
            try:
                dataset = litdata.StreamingDataset(folder, shuffle=False, serializers=unread)
                for number in range(chunk["chunk_size"]):
                    yield dataset[number]
            except Exception as problem:
                raise LoaderError(
                    f"{self.path}, sample {number}: {cause_text(problem)}; the chunk is damaged, or this version of "
                    f"litdata cannot read it: make it again, or install the version that wrote it"
                ) from problem


def lit_sources(folders: Sequence[str], columns: dict[str, str]) -> tuple[dict[str, str], list[LitChunk]]:
    """Return the columns, detected from the first folder if there are none, and a source for each chunk.

    Raises LoaderError without the package litdata, and for folders whose samples are not dicts of plain values.
    """
    _litdata()
    found = columns
    sources: list[LitChunk] = []
    for folder in folders:
        index = _read_index(folder)
        formats = _formats(index, folder)
        found = found or {name: _encoding(name, kind, folder) for name, kind in formats.items()}
        _check_columns(found, formats, folder, all_names=not columns)
        for number, chunk in enumerate(index["chunks"]):
            path = os.path.join(folder, chunk["filename"])
            _check_size(path, chunk)
            sources.append(LitChunk(path, number, found, not columns))
    if not sources:
        raise WriterError(f"{', '.join(folders)}: there is no chunk to convert")
    return found, sources


def _litdata() -> Any:
    os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")  # it would ask the package index
    return optional_module("litdata", why="convert litdata")


def _read_index(folder: str) -> dict[str, Any]:
    path = os.path.join(folder, INDEX)
    try:
        with open(path, "rb") as file:
            index: dict[str, Any] = json.load(file)
        _ = index["chunks"], index["config"]["data_format"]  # raises without them
    except OSError as problem:
        raise LoaderError(f"{path} cannot be read: {problem.strerror}: name a folder of LitData") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise LoaderError(
            f"{path} is no index of LitData: {cause_text(problem)}: name a folder of LitData"
        ) from None
    return index


def _formats(index: Mapping[str, Any], folder: str) -> dict[str, str]:
    """Return column -> LitData's format. Raises LoaderError for samples that are not dicts of plain values."""
    config = index["config"]
    if config.get("encryption"):
        raise LoaderError(f"{folder} is encrypted: decrypt it with litdata first")
    try:
        _, spec = json.loads(config["data_spec"])
        names = json.loads(spec["context"])
        plain = spec["type"] == "builtins.dict" and not any(
            one["children_spec"] for one in spec["children_spec"]
        )
        formats = [kind.partition(":")[0] for kind in config["data_format"]]
    except (TypeError, ValueError, KeyError, AttributeError):
        plain = False
    if not plain or len(names) != len(formats):
        raise LoaderError(
            f"{folder}: its samples are not dicts of plain values: read them with litdata, and write dicts with "
            f"loader.MDSWriter"
        )
    return dict(zip(names, formats, strict=True))


def _encoding(name: str, kind: str, folder: str) -> str:
    if kind not in ENCODINGS:
        raise LoaderError(
            f"{folder}: {name} is stored as {kind}, which has no encoding here: name the other columns with --columns"
        )
    return ENCODINGS[kind]


def _check_columns(
    columns: Mapping[str, str], formats: Mapping[str, str], folder: str, *, all_names: bool
) -> None:
    missing = columns.keys() - formats.keys()
    if missing:
        raise LoaderError(f"{folder} has no {', '.join(sorted(missing))}: leave it out of --columns")
    more = formats.keys() - columns.keys()
    if all_names and more:
        raise LoaderError(
            f"{folder}: {', '.join(sorted(more))} is no column of the first folder: name the columns that all folders "
            f"have with --columns"
        )
    for name, encoding in columns.items():
        _encoding(name, formats[name], folder)
        if formats[name] == "jpeg" and encoding not in ("jpeg", "bytes"):
            raise LoaderError(
                f"--columns {name}:{encoding}: it holds the bytes of JPEG files: choose jpeg or bytes"
            )


def _check_size(path: str, chunk: Mapping[str, Any]) -> None:
    """Raise LoaderError for a chunk that is cut short. LitData waits for the rest of it."""
    try:
        size = os.path.getsize(path)
    except OSError as problem:
        raise LoaderError(f"{path} cannot be read: {problem.strerror}: fetch it again") from None
    if size < chunk["chunk_bytes"]:
        raise LoaderError(
            f"{path} is cut short: it has {size} of {chunk['chunk_bytes']} bytes: fetch it again"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, memoryview):
        return bytes(value)
    return value.numpy() if hasattr(value, "numpy") else value
