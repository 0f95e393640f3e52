"""Documents into samples of tokens, by a tokenizer that has a name.

With a length, documents are laid end to end, an end token behind each, and cut into samples of exactly that
many; what is left at the end of a file fills no sample, is left out, and is logged. Without, each document is
a sample of its own length.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from loader.base.optional_imports import optional_module
from loader.errors import LoaderError
from loader.tools.row_sources import json_rows, text_lines

BATCH_DOCUMENTS = 256  # the tokenizer works on a batch with all cores
JSON_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson")

log = logging.getLogger("loader")

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """How text becomes tokens.

    tokenizer: a tokenizer.json, or a name or folder that transformers or tokenizers know. length: tokens a
    sample, 0 for one document a sample. dtype: int32, uint16, .... end: the end token, "" for none, None for
    the tokenizer's own. field: of JSON lines. lines: each line of a text is a document, not the file.
    """

    tokenizer: str
    length: int
    dtype: str = "int32"
    end: str | None = None
    field: str = "text"
    lines: bool = False

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the samples."""
        return {"tokens": f"ndarray:{self.dtype}" + (f":{self.length}" if self.length else "")}


@dataclass(frozen=True, slots=True)
class TokenSource:
    """The samples of one file."""

    path: str
    options: TokenOptions

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
            log.warning("left out, as they fill no sample: tokens=%d path=%s", pending.size, self.path)


def load_tokenizer(options: TokenOptions) -> tuple[Encode, list[int]]:
    """Return (documents to ids, without special tokens; the end token's id, or nothing).

    Raises LoaderError if there is no such tokenizer, or its end token is not known.
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


def _is_path(name: str) -> bool:
    """Return whether a name can only mean a file or folder: asking the network for it would take a minute to fail.

    One slash is no sign of it: the hub's names are `owner/name`.
    """
    return name.endswith((".json", "/")) or name.startswith((".", "/", "~")) or name.count("/") > 1


def _from_tokenizers(path: str, options: TokenOptions) -> tuple[Encode, list[int]]:
    tokenizers = optional_module("tokenizers", why=f"the tokenizer {path}")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(Path(path).read_text())
    except Exception as problem:  # noqa: BLE001 -- the library raises no other kind
        raise LoaderError(f"{path} is no tokenizer: {problem}") from None
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
        f"{name} does not say which token ends a document: name it with --end TOKEN, or --end '' to lay documents "
        f"end to end with nothing between"
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
