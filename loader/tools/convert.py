"""Implements `fusecache dataset convert`: makes a dataset of text, rows, tar files or another dataset.

Writes down what an unfinished local conversion reads and how it writes, so that nothing else continues it.

A resumed conversion skips as many samples as its shards have. With other files, or in another order, it would skip the
wrong ones. The size of the file that it goes on with may change, because a bad row is mended before.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from fusecache.disk.beneath import replace_text
from loader.base.paths import check_is_local
from loader.errors import ArgumentError, LoaderError, NoSampleError, WriterError
from loader.mds.encodings import ENCODINGS_TEXT
from loader.mds.index import INDEX_NAME, read_index
from loader.tools.commands import count_text, progress_bar, say
from loader.tools.row_sources import (
    ArrowRows,
    CsvRows,
    JsonLines,
    ParquetRows,
    arrow_columns,
    csv_columns,
    json_columns,
    parquet_columns,
    saved_files,
)
from loader.tools.tar_rows import TarRows, tar_columns
from loader.tools.tokens import TokenOptions, TokenSource, load_tokenizer
from loader.writing.clusters import ENGINES, check_no_conversion, convert_on_cluster, described
from loader.writing.copies import recompress, shuffle
from loader.writing.parallel_writer import (
    OneFileSource,
    Source,
    numbered,
    part_folders,
    write_named,
    write_parallel,
)
from loader.writing.resume_scan import left_over_shards
from loader.writing.shard_packer import DEFAULT_SIZE_LIMIT, PackOptions, packer_of
from loader.writing.writer import MDSWriter

RECORD_NAME = "_inputs.json"


def conversion_of(
    sources: Sequence[OneFileSource], columns: Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the record of a conversion. Raises WriterError for columns or options that cannot work."""
    return {
        **described(sources),
        "columns": dict(columns),
        "options": {**packer_of(columns, options).settings, "align": options.get("align", 1)},
        "sizes": [_size(source) for source in sources],
    }


def _size(source: OneFileSource) -> int | None:
    """Return the size of a source's file. None if it cannot be read, which reading names."""
    try:
        return os.path.getsize(source.path)
    except OSError:
        return None


def check_inputs(root: Path, conversion: Mapping[str, Any]) -> None:
    """Raise WriterError if the conversion in root began with other inputs, or in another order, or otherwise.

    Without a record, as an earlier version leaves it, nothing is known and nothing is refused.
    """
    before = _read(root)
    if any(before[name] != conversion[name] for name in ("files", "kind") if before):
        raise WriterError(
            f"{root} holds a conversion of other files or options, or in another order: name its files in their order, "
            f"or choose another directory. If the same files only moved, remove {root / RECORD_NAME}"
        )
    for name in ("columns", "options"):
        if before and before[name] != conversion[name]:
            raise WriterError(
                f"{root} holds a conversion with other {name}, {json.dumps(before[name])}: continue with these, choose "
                f"another directory, or remove it and begin again"
            )


def check_sizes(root: Path, conversion: Mapping[str, Any], done: Iterable[int]) -> None:
    """Raise WriterError if a file whose samples are all in shards, by its number, has another size than before."""
    before = _read(root)
    for number in done if before else ():
        if before["sizes"][number] != conversion["sizes"][number]:
            raise WriterError(
                f"{root} holds the samples of {conversion['files'][number]}, which changed since: restore the file, "
                f"choose another directory, or remove {root} and begin again"
            )


def check_processes(root: Path, processes: int) -> None:
    """Raise WriterError if a directory has shards of a conversion by one process, and these are several, or reverse."""
    if not root.is_dir() or (root / INDEX_NAME).exists():
        return
    if processes > 1 and left_over_shards(root):
        begun, right = "one process", "--processes 1"
    elif processes == 1 and any(root.glob("[0-9][0-9][0-9][0-9][0-9]*/shard.*")):
        begun, right = "several processes", "--processes 2 or more"
    else:
        return
    raise WriterError(
        f"{root} holds a conversion by {begun}: continue it with {right} and --resume, choose another directory, or "
        f"remove it"
    )


def record_inputs(root: Path, conversion: Mapping[str, Any]) -> None:
    """Write the record of a conversion that begins or goes on."""
    root.mkdir(parents=True, exist_ok=True)
    replace_text(f"{os.path.realpath(root)}/{RECORD_NAME}", json.dumps(conversion))


def forget_inputs(root: Path) -> None:
    """Remove the record of a conversion that ended."""
    (root / RECORD_NAME).unlink(missing_ok=True)


def is_begun(root: Path) -> bool:
    """Return whether a directory has anything but a record."""
    return root.is_dir() and any(path.name != RECORD_NAME for path in root.iterdir())


def _read(root: Path) -> dict[str, Any]:
    """Return the record in a directory, {} without one. Raises WriterError if it is damaged."""
    record = root / RECORD_NAME
    try:
        found: dict[str, Any] = json.loads(record.read_bytes())
        _ = [found[name] for name in ("files", "kind", "columns", "options", "sizes")]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise WriterError(f"{record} is damaged: remove it if {root} began with these files") from None
    return found


# So that `verify` can check contents. It took 0.4 s for a GiB on two busy cores (2026-11-27).
DEFAULT_HASHES = ["xxh64"]
# Kind -> (source of one file, function that detects the columns from the files).
ROW_KINDS: Mapping[str, tuple[Callable[..., OneFileSource], Callable[[Sequence[str]], dict[str, str]]]] = {
    "jsonl": (JsonLines, json_columns),
    "csv": (CsvRows, csv_columns),
    "parquet": (ParquetRows, parquet_columns),
    "huggingface": (ArrowRows, arrow_columns),
    "tar": (TarRows, tar_columns),
    "webdataset": (TarRows, tar_columns),
}


def add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    kinds = parser.add_subparsers(dest="kind", required=True)
    text = kinds.add_parser("text", help="text or JSON lines to tokens")
    text.add_argument("--tokenizer", required=True, help="tokenizer.json, or a name that transformers knows")
    text.add_argument("--length", type=int, required=True, help="tokens a sample; 0: one document a sample")
    text.add_argument("--end", help="token after each document ('' for none; default: the tokenizer's own)")
    text.add_argument(
        "--dtype",
        default="int32",
        choices=["uint16", "int32", "uint32", "int64"],
        help="type of a token (default: int32)",
    )
    text.add_argument("--field", default="text", help="field of JSON lines with the text (default: text)")
    text.add_argument("--lines", action="store_true", help="each line is a document, instead of each file")
    tar = "tar files (also .gz, .zst), a column for each extension of a sample's members"
    helps = {
        "jsonl": "JSON lines (also .gz, .zst), a sample a line",
        "csv": "CSV, or TSV by its name (also .gz, .zst), with the names of the columns in the first line",
        "parquet": "Parquet files, a sample a row",
        "huggingface": "folders of Hugging Face's save_to_disk, a sample a row",
        "tar": tar,
        "webdataset": tar,
    }
    rows = [
        kinds.add_parser(
            kind, help=text, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=ENCODINGS_TEXT
        )
        for kind, text in helps.items()
    ]
    for command in rows:
        command.add_argument(
            "--columns", help="name:encoding,... (default: all, detected from the first file)"
        )
    again = kinds.add_parser(
        "recompress", help="copy a dataset with another compression; samples and shards stay the same"
    )
    mixed = kinds.add_parser("shuffle", help="copy a dataset with all its samples in a random order")
    mixed.add_argument("--seed", type=int, default=0, help="another seed is another order (default: 0)")
    mixed.add_argument(
        "--scratch", type=Path, help="folder with space for all samples (default: that for temporary files)"
    )
    mixed.add_argument(
        "--size-limit", default=DEFAULT_SIZE_LIMIT, help="raw bytes of a shard (default: 64mb)"
    )
    for command in (again, mixed):
        command.add_argument("source", type=Path, help="directory that contains index.json")
    for command in (text, *rows):
        command.add_argument(
            "inputs", nargs="+", help="files, in the order of the samples; folders of save_to_disk"
        )
        command.add_argument(
            "--engine",
            default="local",
            choices=["local", *ENGINES],
            help="local: this machine (default); ray, spark: the workers of a cluster, which see the same paths",
        )
        command.add_argument(
            "--processes",
            type=int,
            default=1,
            help="files converted at a time, each to a folder (engine local)",
        )
        command.add_argument(
            "--resume", action="store_true", help="continue after the complete shards of an earlier run"
        )
        command.add_argument(
            "--size-limit", default=DEFAULT_SIZE_LIMIT, help="raw bytes of a shard (default: 64mb)"
        )
    for command in (text, *rows, again, mixed):
        command.add_argument(
            "out", help="directory of the new dataset; a URL that mounts show, for a cluster"
        )
        command.add_argument("--compression", help="zstd:7, gz, bz2, br, snappy (default: none)")
        command.add_argument(
            "--hashes",
            default=",".join(DEFAULT_HASHES),
            help="sha1,xxh64,... to store in the index; '' for none (default: xxh64)",
        )
        command.add_argument(
            "--align", type=int, default=1, help="bytes; samples begin at a multiple of it (default: 1)"
        )


def run_convert(options: Any) -> int:
    """Run the command. Raises LoaderError if it fails."""
    if options.kind == "recompress":
        check_is_local(options.out)
        return _recompress(options)
    if options.kind == "shuffle":
        return _shuffle(options)
    if options.engine == "local":
        check_is_local(options.out)
    tokens = None
    if options.kind == "text":
        tokens = TokenOptions(
            options.tokenizer, options.length, options.dtype, options.end, options.field, options.lines
        )
    columns = _columns(getattr(options, "columns", None))
    columns, sources = _sources(options.kind, options.inputs, columns, tokens, options.engine)
    how = {
        "compression": options.compression,
        "hashes": _hashes(options),
        "size_limit": options.size_limit,
        "align": options.align,
    }
    samples = _write(
        options.out,
        columns,
        sources,
        engine=options.engine,
        processes=options.processes,
        resume=options.resume,
        how=how,
    )
    say(
        f"{options.out}: {count_text(samples, 'sample')}, columns "
        + ", ".join(f"{n} ({e})" for n, e in sorted(columns.items()))
    )
    return 0


def convert(
    kind: str,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    tokens: TokenOptions | None = None,
    engine: str = "local",
    processes: int = 1,
    resume: bool = False,
    **options: Any,
) -> int:
    """Convert files to a dataset, as the command `convert` does; return its sample count.

    kind: text, jsonl, csv, parquet, huggingface, tar or webdataset. columns: name -> encoding; None: detected from the
    first file. tokens: for text.
    engine: local, ray or spark. processes: of the engine local. options: of MDSWriter; hashes are DEFAULT_HASHES unless
    they are given. Raises LoaderError.
    """
    columns, sources = _sources(kind, [str(path) for path in inputs], dict(columns or {}), tokens, engine)
    return _write(
        out,
        columns,
        sources,
        engine=engine,
        processes=processes,
        resume=resume,
        how={"hashes": DEFAULT_HASHES, **options},
    )


def _sources(
    kind: str, inputs: Sequence[str], columns: dict[str, str], tokens: TokenOptions | None, engine: str
) -> tuple[dict[str, str], list[OneFileSource]]:
    for path in inputs:
        check_is_local(path)
    if not inputs:
        raise WriterError("there is no file to convert")
    if engine != "local":  # a worker has another current directory
        inputs = [os.path.abspath(path) for path in inputs]
        if tokens is not None and os.path.exists(tokens.tokenizer):
            tokens = replace(tokens, tokenizer=os.path.abspath(tokens.tokenizer))
    if kind == "huggingface":
        inputs = [file for folder in inputs for file in saved_files(folder)]
    if kind in ROW_KINDS:
        source, detect = ROW_KINDS[kind]
        found = columns or detect(inputs)
        return found, [source(path, found, not columns) for path in inputs]
    if kind != "text" or tokens is None:
        raise ArgumentError(
            f"kind {kind!r}: it is {', '.join(ROW_KINDS)}, or text with tokens=TokenOptions(…)"
        )
    if tokens.length < 0:
        raise LoaderError(f"--length {tokens.length} is negative")
    load_tokenizer(tokens)  # report its problems once, before anything is written
    return tokens.columns, [TokenSource(path, tokens) for path in inputs]


def _columns(text: str | None) -> dict[str, str]:
    """Parse "name:encoding,...". A comma within an encoding precedes a number."""
    columns: dict[str, str] = {}
    name = ""
    for piece in (text or "").split(","):
        if name and piece.isdecimal():
            columns[name] += f",{piece}"
            continue
        name, colon, encoding = piece.partition(":")
        if text and not (name and colon and encoding):
            raise LoaderError(f"--columns {text!r}: write name:encoding,name:encoding")
        if name:
            columns[name] = encoding
    return columns


def _write(
    out: str | Path,
    columns: Mapping[str, str],
    sources: Sequence[OneFileSource],
    *,
    engine: str,
    processes: int,
    resume: bool,
    how: Mapping[str, Any],
) -> int:
    try:
        if engine != "local":
            if engine not in ENGINES or processes > 1:
                raise ArgumentError(
                    f"engine {engine!r}, {processes} processes: the engines are local, {', '.join(ENGINES)}, and only "
                    f"local has processes"
                )
            return convert_on_cluster(engine, str(out), columns, sources, resume=resume, options=how)
        check_is_local(out)
        check_no_conversion(Path(out))
        return _write_here(Path(out), columns, sources, processes=processes, resume=resume, how=how)
    except NoSampleError as problem:
        length = getattr(getattr(sources[0], "options", None), "length", 0)
        if not length:
            raise
        raise NoSampleError(
            f"{problem}; no file has the {length} tokens of a sample: lower --length (0: each document is a sample)"
        ) from None


def _write_here(
    out: Path,
    columns: Mapping[str, str],
    sources: Sequence[OneFileSource],
    *,
    processes: int,
    resume: bool,
    how: Mapping[str, Any],
) -> int:
    conversion = conversion_of(sources, columns, how)
    check_processes(out, processes)
    if processes > 1:
        begun = is_begun(out)
        finished = [
            number
            for number, folder in enumerate(part_folders(len(sources)))
            if (out / folder / INDEX_NAME).exists()
        ]
        if begun and resume and (finished or any(out.glob("*/shard.*"))):
            check_inputs(out, conversion)
            check_sizes(out, conversion, finished)
        if not begun or (resume and not (out / INDEX_NAME).exists()):
            record_inputs(out, conversion)
        with closing(progress_bar(len(sources), "file")) as bar:
            samples = write_parallel(
                out,
                columns,
                sources,
                processes=processes,
                resume=resume or not begun,
                progress=lambda finished, _: bar.update(finished - bar.n),
                options=how,
            )
    else:
        with (
            closing(progress_bar(None, "sample")) as bar,
            MDSWriter(out, columns, resume=resume, **how) as writer,
        ):
            if writer.samples:
                check_inputs(out, conversion)
            bar.update(writer.samples)
            every = chain.from_iterable(numbered(source) for source in sources)
            skipped = _skip_written(writer, every, sources)
            check_sizes(out, conversion, range(skipped))
            record_inputs(out, conversion)
            for where, sample in every:
                write_named(writer, sample, where)
                bar.update()
            samples = writer.samples
            if not samples:
                raise NoSampleError(f"the files contain no samples: there is nothing to write to {out}")
    forget_inputs(out)
    return samples


def _skip_written(
    writer: MDSWriter,
    every: Iterator[tuple[tuple[Source, int], Mapping[str, Any]]],
    sources: Sequence[Source],
) -> int:
    """Take the samples that the writer has already; return the number of sources before that of the last one."""
    last: Source = sources[0]

    def written() -> Iterator[Mapping[str, Any]]:
        nonlocal last
        for (source, _), sample in every:
            last = source
            yield sample

    writer.skip_written(written())
    return next(number for number, source in enumerate(sources) if source is last)


def _recompress(options: Any) -> int:
    how = PackOptions(options.compression, _hashes(options), align=options.align)
    with closing(progress_bar(read_index(options.source).shards, "shard")) as bar:
        shards = recompress(
            options.source, Path(options.out), how, progress=lambda finished: bar.update(finished - bar.n)
        )
    say(f"{options.out}: {count_text(shards, 'shard')}")
    return 0


def _shuffle(options: Any) -> int:
    how = PackOptions(options.compression, _hashes(options), options.size_limit, options.align)
    total = int(read_index(options.source).samples.sum())
    with closing(progress_bar(2 * total, "sample")) as bar:
        samples = shuffle(
            options.source, options.out, how, seed=options.seed, scratch=options.scratch, progress=bar.update
        )
    say(f"{options.out}: {count_text(samples, 'sample')}")
    return 0


def _hashes(options: Any) -> list[str]:
    return [name for name in options.hashes.split(",") if name]
