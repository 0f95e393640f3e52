"""Templar-style datasets: a seed chooses pages from Parquet shards of text; their tokens are cached on disk.

    dataset = TemplarDataset("/mnt/bucket/fineweb", tokenizer=tokenizer, cache_folder="/nvme/pages")
    for tokens in dataset.batches(f"{uid}:{window}", 6, 8, 2048):
        ...                                                               # (8, 2048) int32

Two files lie beside the shards: `_metadata.yaml` (`configs`, each with a `config_name`) and `_shard_sizes.json`. For
each config, the latter has its `shards`, with `path`, `num_rows` and optionally `byte_size`, and `total_rows`. A page
is some rows of one row group. Opening reads these two files. Footers are read only of shards that have chosen pages.

Equal files and shards give equal pages for a seed, on any machine and in any process. Draw k of a seed uses the two
little-endian halves of `blake2b-256("<seed>\0<k>")`: the first modulo the number of configs, sorted by name, the
second modulo the rows of that config. A batch is cut from the tokens of the pages, in their order.

Reads the two files beside the shards of a Templar-style dataset, and checks them against each other.
"""

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loader.base.argument_checks import byte_count
from loader.base.mount_endpoint import find_endpoint
from loader.base.packages import optional_module
from loader.base.paths import check_is_local
from loader.base.single_flight import SingleFlight
from loader.errors import ArgumentError, DatasetError, LoaderError, ShardError
from loader.hints.job import HintJob, hold_name
from loader.hints.plan_messages import FileRow, path_on_mount
from loader.mds.shard_files import DecompressedCache
from loader.parquet.dataset import ParquetDataset
from loader.parquet.row_groups import FOOTERS_AT_ONCE

log = logging.getLogger("loader")

METADATA_NAME = "_metadata.yaml"
SIZES_NAME = "_shard_sizes.json"
# The config that stands for all others.
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class TemplarConfig:
    """A named part of the dataset. ends: (shards,) one past the last row of each. bytes: of each, 0 if unknown."""

    name: str
    shards: tuple[str, ...]
    ends: tuple[int, ...]
    bytes: tuple[int, ...]


def read_configs(root: str) -> tuple[TemplarConfig, ...]:
    """Return the configs that have shards, sorted by name. Raises DatasetError, naming file and cause."""
    sizes_path, metadata_path = os.path.join(root, SIZES_NAME), os.path.join(root, METADATA_NAME)
    yaml = optional_module("yaml", why=METADATA_NAME, package="pyyaml")
    try:
        sizes = json.loads(_text(sizes_path))
    except ValueError as problem:
        raise DatasetError(f"{sizes_path} is not JSON: {problem}") from None
    try:
        metadata = yaml.safe_load(_text(metadata_path))
    except (yaml.YAMLError, ValueError) as problem:
        raise DatasetError(f"{metadata_path} is not YAML: {problem}") from None
    names = _names(metadata, metadata_path)
    if not isinstance(sizes, dict):
        raise DatasetError(f"{sizes_path} is not a JSON object of configs")
    entries = {name: _entries(sizes[name], name, sizes_path) for name in names if name in sizes}
    entries = {name: found for name, found in sorted(entries.items()) if found}
    if not entries:
        raise DatasetError(
            f"{sizes_path} has no shards of the configs that {metadata_path} names: {', '.join(names)}"
        )
    prefix = _prefix(root, [found[0][0] for found in entries.values()])
    configs = []
    for name, found in entries.items():
        for path, _, _ in found:
            if not path.startswith(prefix):
                raise DatasetError(
                    f"{sizes_path}, config {name}: {path} lies outside of {prefix}, as the others do not"
                )
        configs.append(
            TemplarConfig(
                name,
                tuple(path[len(prefix) :] for path, _, _ in found),
                tuple(accumulate(rows for _, rows, _ in found)),
                tuple(size for _, _, size in found),
            )
        )
    return tuple(configs)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DatasetError(f"{path} does not exist: a Templar dataset has it beside its shards") from None
    except OSError as problem:
        raise DatasetError(f"{path} cannot be read: {problem.strerror}") from problem


def _names(metadata: Any, path: str) -> list[str]:
    configs = metadata.get("configs") if isinstance(metadata, dict) else None
    if not isinstance(configs, list) or not all(
        isinstance(config, dict) and isinstance(config.get("config_name"), str) for config in configs
    ):
        raise DatasetError(f"{path} has no list `configs`, each with a `config_name`")
    return [config["config_name"] for config in configs if config["config_name"] != _DEFAULT]


def _entries(config: Any, name: str, path: str) -> list[tuple[str, int, int]]:
    """Return (path, rows, bytes or 0) of each shard of a config that has rows."""
    shards = config.get("shards") if isinstance(config, dict) else None
    if not isinstance(shards, list):
        raise DatasetError(f"{path}, config {name}: it has no list `shards`")
    found = []
    for number, shard in enumerate(shards):
        entry = shard if isinstance(shard, dict) else {}
        file, rows, size = entry.get("path"), entry.get("num_rows"), entry.get("byte_size") or 0
        if not isinstance(file, str) or type(rows) is not int or rows < 0 or type(size) is not int:
            raise DatasetError(f"{path}, config {name}, shard {number}: it has no `path` and `num_rows`")
        if file.startswith("/") or ".." in file.split("/"):
            raise DatasetError(f"{path}, config {name}, shard {number}: {file} leaves the dataset")
        found.append((file, rows, size))
    total = config.get("total_rows")
    if total and total != sum(rows for _, rows, _ in found):
        raise DatasetError(
            f"{path}, config {name}: total_rows is {total}, its shards have {sum(rows for _, rows, _ in found)}"
        )
    return [entry for entry in found if entry[1]]


def _prefix(root: str, shards: Sequence[str]) -> str:
    """Return the prefix of shard paths that are relative to the bucket or a parent folder, not to the dataset."""
    for shard in shards:
        parts = shard.split("/")
        for number in range(len(parts)):
            if os.path.isfile(os.path.join(root, *parts[number:])):
                return "".join(f"{part}/" for part in parts[:number])
    raise DatasetError(
        f"{root} has none of the first shards that {SIZES_NAME} names, such as {shards[0]}, nor the ends of their paths"
    )


PAGE_ROWS = 100
PAGE_CACHE_BYTES = 10 << 30
# Each open shard has one decoded row group in memory.
OPEN_SHARDS = 64
# Each page waits for a round trip to a remote bucket, which the daemon's hints make short.
PAGES_AT_ONCE = 8
_MAGIC = b"fcpages1"
_DIGEST_BYTES = 16

Tokens = NDArray[np.int32]


class Page(NamedTuple):
    """Rows of a shard. shard: its path below the dataset's directory. offset: of the first row in the row group."""

    shard: str
    row_group: int
    offset: int


class TemplarDataset:
    """Pages of text, chosen by a seed.

    path: the directory with the two files. tokenizer: takes a list of texts; returns a list of token ids for each, or
    an object with these as `input_ids`. None: the column has lists of token ids. cache_folder: stores tokenised pages,
    up to cache_bytes, for all processes of the machine; it must not lie in the dataset. tokenizer_name: distinguishes
    the cached pages of tokenizers and their settings; default: the tokenizer's `name_or_path`. page_rows: rows of a
    page; fewer in smaller row groups. text_column: the column with the text, or with the lists of token ids.
    Raises DatasetError, naming file and cause, for files that cannot be read or contradict each other; LoaderError for
    settings that cannot work, or a missing package; ArgumentError for a URL.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer: Callable[[list[str]], Any] | None = None,
        tokenizer_name: str | None = None,
        cache_folder: str | Path | None = None,
        cache_bytes: int | str = PAGE_CACHE_BYTES,
        page_rows: int = PAGE_ROWS,
        text_column: str = "text",
    ) -> None:
        if page_rows < 1:
            raise LoaderError(f"page_rows is {page_rows}: a page has at least 1 row")
        check_is_local(path)
        self._root = os.fspath(path)
        self._tokenizer = tokenizer
        self._tokenizer_name = tokenizer_name or str(getattr(tokenizer, "name_or_path", "") or "")
        self._page_rows, self._text_column = page_rows, text_column
        limit = byte_count(cache_bytes, "cache_bytes")
        self._folder = None if cache_folder is None else self._cache(cache_folder, limit)
        self._configs = read_configs(self._root)
        self._bytes = {
            shard: size
            for config in self._configs
            for shard, size in zip(config.shards, config.bytes, strict=True)
        }
        self._rows = {
            shard: stop - start
            for config in self._configs
            for shard, start, stop in zip(config.shards, (0, *config.ends), config.ends, strict=False)
        }
        self._has_warned = False
        self._reset()

    def _reset(self) -> None:
        """Start with nothing open in this process."""
        self._open: OrderedDict[str, ParquetDataset] = OrderedDict()
        self._opening: SingleFlight[ParquetDataset] = SingleFlight()
        self._making: SingleFlight[list[Tokens]] = SingleFlight()

    def __getstate__(self) -> dict[str, Any]:
        rebuilt = ("_open", "_opening", "_making")
        return {name: value for name, value in self.__dict__.items() if name not in rebuilt}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    @property
    def files(self) -> tuple[str, ...]:
        """The paths of all shards, in the form that ParquetDataset takes."""
        return tuple(os.path.join(self._root, shard) for config in self._configs for shard in config.shards)

    @property
    def configs(self) -> dict[str, int]:
        """Config name -> rows, for each config that pages are chosen from."""
        return {config.name: config.ends[-1] for config in self._configs}

    def pages(self, seed: str | int, n: int) -> list[Page]:
        """Return n pages chosen by the seed: configs are equally likely, and so are the rows within a config.

        Each page is drawn independently, so pages may overlap; a larger n for the same seed only appends pages. A page
        that would pass the end of its row group begins earlier. Raises LoaderError for n < 1, and DatasetError if a
        shard contradicts the two files.
        """
        if n < 1:
            raise LoaderError(f"{n} pages: at least 1 is chosen")
        drawn = [self._draw(seed, number) for number in range(n)]
        shards = list(dict.fromkeys(shard for shard, _ in drawn))
        with ThreadPoolExecutor(min(FOOTERS_AT_ONCE, len(shards)), "page-footers") as pool:
            sizes = pool.map(lambda shard: self._shard(shard).shard_sizes, shards)
            ends = {shard: np.cumsum(found) for shard, found in zip(shards, sizes, strict=True)}
        return [self._page(shard, row, ends[shard]) for shard, row in drawn]

    def texts(self, page: Page) -> list[str]:
        """Return the texts of a page. Raises LoaderError for a page of another dataset, ShardError for failed reads."""
        texts = self._values(page)
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise self._bad_row(page, number, f"{type(text).__name__}, not text")
        return texts

    def tokens(self, page: Page) -> list[Tokens]:
        """Return the token ids of each text of a page, (tokens,) int32, from the cache folder if they are there.

        Threads that request the same page concurrently share one tokenisation. A damaged cached page is made again. If
        the folder cannot be written, a warning is logged once, and the page is used uncached.
        """
        # Copies, because each thread may write to its arrays.
        return [row.copy() for row in self._making.do(page, partial(self._cached_tokens, page))]

    def batches(
        self,
        seed: str | int,
        n: int,
        batch_size: int,
        sequence_length: int,
        *,
        end_token: int | None = None,
        threads: int = PAGES_AT_ONCE,
    ) -> Iterator[Tokens]:
        """Return the batches of n pages chosen by the seed, each (batch_size, sequence_length) int32.

        The texts of the pages are joined in order, with end_token after each, and cut into rows of sequence_length
        tokens, which fill one batch after the other. Tokens after the last whole batch are dropped. end_token: None
        means the tokenizer's `eos_token_id`; -1 puts nothing between texts. Batches depend on the files, the tokenizer
        and these arguments only, not on `threads`, which read pages ahead, up to twice their number. They call the
        tokenizer concurrently: use threads=1 if it does not allow that.

        On a mount, the daemon is told at once which bytes of which shards come, and fetches them before their turn.
        Raises ArgumentError for numbers below 1, LoaderError if no token ends a text or the pages do not fill a batch,
        and the errors of `pages` at once and of `tokens` at their page's turn.
        """
        for name, number in (
            ("batch_size", batch_size),
            ("sequence_length", sequence_length),
            ("threads", threads),
        ):
            if number < 1:
                raise ArgumentError(f"{name} is {number}: it is at least 1")
        if end_token is None:
            end_token = getattr(self._tokenizer, "eos_token_id", None)
        if end_token is None:
            raise LoaderError(
                "the tokenizer does not say which token ends a text: pass end_token, or end_token=-1 for nothing "
                "between texts"
            )
        end = np.array([end_token] if end_token >= 0 else [], np.int32)
        pages = self.pages(seed, n)
        return self._packed_batches(pages, (batch_size, sequence_length), end, threads, self._hinted(pages))

    def _cached_tokens(self, page: Page) -> list[Tokens]:
        if self._folder is None:
            return self._tokenised(page)
        name = (self._tokenizer_name, self._page_rows, self._text_column, page)
        about = f"{name} {self._shard(page.shard).fingerprint if page.shard in self._bytes else ''}"
        key = hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
        made: list[list[Tokens]] = []

        def make() -> bytes:
            made.append(self._tokenised(page))
            return _packed(made[-1])

        for _ in range(2):
            try:
                path = Path(self._folder.path(key, 0, make))
                found = made[-1] if made else _unpacked(path.read_bytes())
                if found is not None:
                    return found
                path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue  # another process evicted it
            except OSError as problem:
                if not self._has_warned:
                    self._has_warned = True
                    log.warning("the cache folder takes no tokenised pages: %s", problem)
                break
        return made[-1] if made else self._tokenised(page)

    def _packed_batches(
        self, pages: list[Page], shape: tuple[int, int], end: Tokens, threads: int, hints: HintJob
    ) -> Iterator[Tokens]:
        size, was_filled = shape[0] * shape[1], False
        pending: list[Tokens] = []
        pool = ThreadPoolExecutor(threads, "templar-pages")
        try:
            ahead = iter(pages)
            coming = deque(pool.submit(self.tokens, page) for page in islice(ahead, 2 * threads))
            for number in range(1, len(pages) + 1):
                for row in coming.popleft().result():
                    pending += [row, end]
                hints.tell(number)
                coming.extend(pool.submit(self.tokens, page) for page in islice(ahead, 1))
                joined = np.concatenate(pending)
                whole = joined.size // size * size
                was_filled |= whole > 0
                yield from joined[:whole].reshape(-1, *shape)
                pending = [joined[whole:]]
        finally:
            pool.shutdown(cancel_futures=True)
            hints.close()
        if not was_filled:
            raise LoaderError(
                f"{len(pages)} pages have {pending[0].size} tokens, and a batch takes {size}: choose more pages, or "
                f"smaller batches"
            )

    def _hinted(self, pages: list[Page]) -> HintJob:
        """Tell the daemon of the mount, if there is one, which bytes the pages take."""

        def extents(page: Page) -> list[tuple[int, int]]:
            try:
                return self._shard(page.shard).extents(page.row_group)
            except (OSError, DatasetError):
                return []  # the read of the page says what is wrong

        place = find_endpoint(self._root)
        if place is None:
            return HintJob("", log)
        job = HintJob(hold_name("templar", 0, self._root), log)
        with ThreadPoolExecutor(min(FOOTERS_AT_ONCE, len(pages)), "page-extents") as pool:
            rows = [
                FileRow(path, start, stop - start, step)
                for step, (page, several) in enumerate(zip(pages, pool.map(extents, pages), strict=True))
                if (path := path_on_mount(place[1] + page.shard)) is not None
                for start, stop in several
            ]
        job.begin(place[0], rows)
        return job

    def _values(self, page: Page) -> list[Any]:
        """Return the column's values in the rows of a page."""
        shard, group, offset = page
        if shard not in self._bytes:
            raise LoaderError(f"{shard} is not a shard of {self._root}")
        dataset = self._shard(shard)
        sizes = dataset.shard_sizes
        if not (0 <= group < sizes.size and 0 <= offset < sizes[group]):
            raise LoaderError(
                f"{shard} has no row {offset} in row group {group}: this is a page of another dataset"
            )
        first = int(sizes[:group].sum())
        found = dataset[first + offset : first + min(offset + self._page_rows, int(sizes[group]))]
        return [sample[self._text_column] for sample in found]

    def _bad_row(self, page: Page, number: int, words: str) -> ShardError:
        return ShardError(
            f"{os.path.join(self._root, page.shard)}, row group {page.row_group}, row {page.offset + number}: "
            f"{self._text_column} is {words}"
        )

    def _tokenised(self, page: Page) -> list[Tokens]:
        if self._tokenizer is None:
            return self._stored_tokens(page)
        texts = self.texts(page)
        answer = self._tokenizer(texts)
        # transformers returns a BatchEncoding, which is a mapping; `tokenizers` returns a list of encodings.
        rows = answer["input_ids"] if isinstance(answer, Mapping) else answer
        try:
            found = [_token_ids(getattr(row, "ids", row)) for row in rows]
        except ValueError:
            raise LoaderError(
                "the tokenizer returns no list of token ids, of 0 to 2**31 - 1, for each text"
            ) from None
        if len(found) != len(texts):
            raise LoaderError(f"the tokenizer returned {len(found)} lists of tokens for {len(texts)} texts")
        return found

    def _stored_tokens(self, page: Page) -> list[Tokens]:
        """Return the lists of token ids that the column has."""
        found = []
        for number, value in enumerate(self._values(page)):
            if isinstance(value, str):
                raise LoaderError("tokens need a tokenizer: TemplarDataset(..., tokenizer=...)")
            try:
                found.append(_token_ids(value))
            except ValueError:
                raise self._bad_row(page, number, "no list of token ids, of 0 to 2**31 - 1") from None
        return found

    def _draw(self, seed: str | int, number: int) -> tuple[str, int]:
        """Return the shard, and the row in it, of one draw."""
        digest = hashlib.blake2b(f"{seed}\0{number}".encode(), digest_size=32).digest()
        config = self._configs[int.from_bytes(digest[:16], "little") % len(self._configs)]
        row = int.from_bytes(digest[16:], "little") % config.ends[-1]
        shard = bisect_right(config.ends, row)
        return config.shards[shard], row - (config.ends[shard - 1] if shard else 0)

    def _page(self, shard: str, row: int, ends: NDArray[np.int64]) -> Page:
        group = int(np.searchsorted(ends, row, side="right"))
        size = int(ends[group]) - (int(ends[group - 1]) if group else 0)
        offset = row - int(ends[group]) + size
        return Page(shard, group, max(0, min(offset, size - self._page_rows)))

    def _shard(self, shard: str) -> ParquetDataset:
        found = self._open.get(shard)
        return self._opening.do(shard, partial(self._opened, shard)) if found is None else found

    def _opened(self, shard: str) -> ParquetDataset:
        found = self._open.get(shard)
        if found is not None:
            return found  # another thread has just opened it
        path = os.path.join(self._root, shard)
        found = ParquetDataset(path, [self._text_column], cache_bytes=0)
        size = int(found.index.raw_bytes[0])
        for unit, here, stated in (
            ("rows", len(found), self._rows[shard]),
            ("bytes", size, self._bytes[shard] or size),
        ):
            if here != stated:
                raise DatasetError(
                    f"{path} has {here} {unit}, {SIZES_NAME} says {stated}: one of them was replaced"
                )
        self._open[shard] = found
        with suppress(KeyError):  # another thread evicts concurrently
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)
        return found

    def _cache(self, folder: str | Path, limit_bytes: int) -> DecompressedCache:
        inner, root = os.path.realpath(folder), os.path.realpath(self._root)
        if inner == root or inner.startswith(root + "/"):
            raise LoaderError(
                f"the cache folder {folder} lies in the dataset, which is not written to: choose another"
            )
        if not self._tokenizer_name:
            raise LoaderError(
                "a cache folder needs a tokenizer_name, which differs between tokenizers and their settings, so that "
                "their cached pages are not mixed up"
            )
        return DecompressedCache(folder, limit_bytes)


def _token_ids(row: Any) -> Tokens:
    """Return a list of token ids as an array of its own. Raises ValueError if it is something else."""
    found = np.asarray(row)
    if found.ndim != 1 or (
        found.size and (found.dtype.kind not in "iu" or not 0 <= found.min() <= found.max() < 1 << 31)
    ):
        raise ValueError("not token ids")
    return found.astype(np.int32)


def _packed(rows: Sequence[Tokens]) -> bytes:
    """Encode a page for disk: magic, digest of the rest, u32 texts, u32 end of each, i32 tokens; little-endian."""
    ends = np.cumsum([row.size for row in rows], dtype="<u4")
    body = (
        len(rows).to_bytes(4, "little")
        + ends.tobytes()
        + b"".join(row.astype("<i4").tobytes() for row in rows)
    )
    return _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() + body


def _unpacked(data: bytes) -> list[Tokens] | None:
    """Return the rows of a cached page, None if it is damaged."""
    start = len(_MAGIC) + _DIGEST_BYTES
    body = data[start:]
    if data[:start] != _MAGIC + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest():
        return None
    count = int.from_bytes(body[:4], "little")
    ends = np.frombuffer(body, "<u4", count, 4).tolist()
    tokens = np.frombuffer(body, "<i4", offset=4 + 4 * count).astype(np.int32)
    return [tokens[first:stop] for first, stop in zip([0, *ends], ends, strict=False)]
