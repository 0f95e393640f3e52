"""Implements `python -m loader convert`: makes a dataset of text, JSON lines, Parquet files or another dataset."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any

from loader.base.paths import check_is_local
from loader.errors import LoaderError, NoSampleError
from loader.mds.index import read_index
from loader.tools.commands import count_text, progress_bar, say
from loader.tools.row_sources import JsonLines, ParquetRows, json_columns, parquet_columns
from loader.tools.tokens import TokenOptions, TokenSource, load_tokenizer
from loader.writing.parallel_writer import Source, numbered, write_named, write_parallel
from loader.writing.recompress import recompress
from loader.writing.shard_packer import DEFAULT_SIZE_LIMIT, PackOptions
from loader.writing.writer import MDSWriter


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
    rows = kinds.add_parser("jsonl", help="JSON lines (also .gz, .zst), a sample a line")
    parquet = kinds.add_parser("parquet", help="Parquet files, a sample a row")
    for command in (rows, parquet):
        command.add_argument(
            "--columns", help="name:encoding,... (default: all, detected from the first file)"
        )
    again = kinds.add_parser(
        "recompress", help="copy a dataset with another compression; samples and shards stay the same"
    )
    again.add_argument("source", type=Path, help="directory that contains index.json")
    for command in (text, rows, parquet):
        command.add_argument("inputs", nargs="+", help="files, in the order of the samples")
        command.add_argument(
            "--processes", type=int, default=1, help="files converted at a time, each to a folder"
        )
        command.add_argument(
            "--resume", action="store_true", help="continue after the complete shards of an earlier run"
        )
        command.add_argument(
            "--size-limit", default=DEFAULT_SIZE_LIMIT, help="raw bytes of a shard (default: 64mb)"
        )
    for command in (text, rows, parquet, again):
        command.add_argument("out", type=Path, help="directory of the new dataset")
        command.add_argument("--compression", help="zstd:7, gz, bz2, br, snappy (default: none)")
        command.add_argument("--hashes", help="sha1,xxh64,... to store in the index")
        command.add_argument(
            "--align", type=int, default=1, help="bytes; samples begin at a multiple of it (default: 1)"
        )


def run_convert(options: Any) -> int:
    """Run the command. Raises LoaderError if it fails."""
    check_is_local(options.out)
    if options.kind == "recompress":
        return _recompress(options)
    for path in options.inputs:
        check_is_local(path)
    if options.kind == "text":
        if options.length < 0:
            raise LoaderError(f"--length {options.length} is negative")
        how = TokenOptions(
            options.tokenizer, options.length, options.dtype, options.end, options.field, options.lines
        )
        load_tokenizer(how)  # report its problems once, before anything is written
        try:
            return _write(options, how.columns, [TokenSource(path, how) for path in options.inputs])
        except NoSampleError as problem:
            if not options.length:
                raise
            raise NoSampleError(
                f"{problem}; no file has the {options.length} tokens of a sample: lower --length (0: each document is "
                f"a sample)"
            ) from None
    columns = _columns(options.columns)
    if options.kind == "jsonl":
        columns = columns or json_columns(options.inputs)
        return _write(options, columns, [JsonLines(path, columns) for path in options.inputs])
    columns = columns or parquet_columns(options.inputs)
    return _write(options, columns, [ParquetRows(path, columns) for path in options.inputs])


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


def _write(options: Any, columns: Mapping[str, str], sources: Sequence[Source]) -> int:
    how: dict[str, Any] = {
        "compression": options.compression,
        "hashes": _hashes(options),
        "size_limit": options.size_limit,
        "align": options.align,
    }
    if options.processes > 1:
        with closing(progress_bar(len(sources), "file")) as bar:
            samples = write_parallel(
                options.out,
                columns,
                sources,
                processes=options.processes,
                resume=options.resume,
                progress=lambda finished, _: bar.update(finished - bar.n),
                options=how,
            )
    else:
        with (
            closing(progress_bar(None, "sample")) as bar,
            MDSWriter(options.out, columns, resume=options.resume, **how) as writer,
        ):
            bar.update(writer.samples)
            rest = chain.from_iterable(numbered(source) for source in sources)
            for where, sample in islice(rest, writer.samples, None):
                write_named(writer, sample, where)
                bar.update()
            samples = writer.samples
            if not samples:
                raise NoSampleError(
                    f"the files contain no samples: there is nothing to write to {options.out}"
                )
    say(
        f"{options.out}: {count_text(samples, 'sample')}, columns "
        + ", ".join(f"{n} ({e})" for n, e in sorted(columns.items()))
    )
    return 0


def _recompress(options: Any) -> int:
    how = PackOptions(options.compression, _hashes(options), align=options.align)
    with closing(progress_bar(read_index(options.source).shards, "shard")) as bar:
        shards = recompress(
            options.source, options.out, how, progress=lambda finished: bar.update(finished - bar.n)
        )
    say(f"{options.out}: {count_text(shards, 'shard')}")
    return 0


def _hashes(options: Any) -> list[str]:
    return [name for name in (options.hashes or "").split(",") if name]
