"""Converts documents to samples of tokens, with a tokenizer chosen by name.

With a length, documents are concatenated, each followed by the end token, and cut into samples of exactly that many
tokens. The tokens left over at the end of a file are dropped, which is logged. Without a length, each document is a
sample of its own length.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from loader.base.packages import optional_module
from loader.errors import LoaderError
from loader.tools.row_sources import json_rows, text_lines

BATCH_DOCUMENTS = 256  # the tokenizer uses all cores for one batch
# The files of a tokenizer's folder, which may also have the weights of a model.
TOKENIZER_ENDINGS = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
JSON_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")

log = logging.getLogger("loader")

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """How text becomes tokens.

    tokenizer: a tokenizer.json, or a name or folder that transformers or tokenizers know. length: tokens a sample, 0
    for one document a sample. dtype: int32, uint16, .... end: the end token, "" for none, None for the tokenizer's
    own. field: the field of JSON lines with the text. lines: each line of a text file is a document, not the file.
    """

    tokenizer: str
    length: int
    dtype: str = "int32"
    end: str | None = None
    field: str = "text"
    lines: bool = False

    @property
    def columns(self) -> dict[str, str]:
        """Column name -> encoding of the samples."""
        return {"tokens": f"ndarray:{self.dtype}" + (f":{self.length}" if self.length else "")}


@dataclass(frozen=True, slots=True)
class TokenSource:
    """The samples of one file."""

    path: str
    options: TokenOptions

    @property
    def settings(self) -> str:
        """The options and the digest of the tokenizer's files: another tokenizer may not continue a conversion."""
        return f"{self.options} {_files_digest(self.options.tokenizer)}"

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Yield the samples. Raises LoaderError for a file or a tokenizer that cannot be read."""
        encode, end = load_tokenizer(self.options)
        dtype = np.dtype(self.options.dtype)
        documents = _documents(self.path, self.options)
        pending = np.zeros(0, np.int64)
        while batch := list(islice(documents, BATCH_DOCUMENTS)):
            found = [_checked([*ids, *end], dtype, self.path) for ids in encode(batch)]
            if not self.options.length:
                yield from ({"tokens": ids.astype(dtype)} for ids in found if ids.size)
                continue
            pending = np.concatenate([pending, *found])
            whole = pending.size // self.options.length * self.options.length
            for sample in pending[:whole].astype(dtype).reshape(-1, self.options.length):
                yield {"tokens": sample}
            pending = pending[whole:]
        if pending.size:
            log.warning("dropped tokens that fill no sample: tokens=%d path=%s", pending.size, self.path)


def load_tokenizer(options: TokenOptions) -> tuple[Encode, list[int]]:
    """Return (function from documents to ids, without special tokens; list with the end token's id, or empty).

    Raises LoaderError if there is no such tokenizer, or its end token is unknown.
    """
    name = options.tokenizer
    if os.path.isfile(name):
        return _from_tokenizers(name, options)
    if _is_path(name) and not os.path.isdir(name):
        raise LoaderError(f"there is no tokenizer {name}: no such file or folder")
    transformers = optional_module("transformers", why=f"the tokenizer {name}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as problem:
        raise LoaderError(f"there is no tokenizer {name}: {str(problem).splitlines()[0]}") from None
    end = tokenizer.eos_token if options.end is None else options.end
    if end is None:
        raise LoaderError(_no_end(name))
    ids = [] if end == "" else [tokenizer.convert_tokens_to_ids(end)]
    if ids in ([None], [tokenizer.unk_token_id]) and end != tokenizer.unk_token:
        raise LoaderError(f"{name} has no token {end!r}")

    def encode(texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return found

    return encode, ids


def _files_digest(name: str) -> str:
    """Return the digest of a tokenizer's file, or of the files in its folder; "" for a name of the hub."""
    paths = [Path(name)] if os.path.isfile(name) else []
    if os.path.isdir(name):
        paths = [path for path in sorted(Path(name).iterdir()) if path.suffix in TOKENIZER_ENDINGS]
    return hashlib.sha256(b"".join(_file_digest(path) for path in paths)).hexdigest() if paths else ""


def _file_digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.name.encode() + b"\0" + path.read_bytes()).digest()
    except OSError as problem:
        raise LoaderError(
            f"{path} cannot be read: {problem.strerror}: check its path and its mode"
        ) from problem


def _is_path(name: str) -> bool:
    """Return whether a name can only be a path; looking it up in the hub would take a minute to fail.

    A name with one slash may be either, because the hub's names are `owner/name`.
    """
    return name.endswith((".json", "/")) or name.startswith((".", "/", "~")) or name.count("/") > 1


def _from_tokenizers(path: str, options: TokenOptions) -> tuple[Encode, list[int]]:
    tokenizers = optional_module("tokenizers", why=f"the tokenizer {path}")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(Path(path).read_text())
    except Exception as problem:  # noqa: BLE001 -- the library raises plain Exception
        raise LoaderError(f"{path} is not a tokenizer: {problem}") from None
    if options.end is None:
        raise LoaderError(_no_end(path))
    end = tokenizer.token_to_id(options.end) if options.end else None
    if options.end and end is None:
        raise LoaderError(f"{path} has no token {options.end!r}")

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    return encode, [] if end is None else [end]


def _no_end(name: str) -> str:
    return (
        f"{name} does not say which token ends a document: name it with --end TOKEN, or --end '' to concatenate "
        f"documents with nothing between"
    )


def _documents(path: str, options: TokenOptions) -> Iterator[str]:
    if path.endswith(JSON_ENDINGS):
        for number, row in enumerate(json_rows(path), start=1):
            text = row.get(options.field)
            if not isinstance(text, str):
                raise LoaderError(
                    f"{path}, line {number} has no text {options.field!r}: name the field with --field"
                )
            yield text
        return
    if options.lines:
        yield from (line.rstrip("\n") for line in text_lines(path))
    else:
        yield "".join(text_lines(path))


def _checked(ids: Sequence[int], dtype: np.dtype[Any], path: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    found = np.array(ids, np.int64)
    if found.size and int(found.max()) > np.iinfo(dtype).max:
        raise LoaderError(f"{path}: token {found.max()} does not fit {dtype.name}: choose a wider --dtype")
    return found
