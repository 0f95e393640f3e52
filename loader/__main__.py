"""Command line tools for datasets: `fusecache dataset ls | head | stats | verify | merge | convert | simulate`.

`python -m loader` is the same, where the working directory has no `loader` of its own.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loader.errors import LoaderError, cause_text
from loader.tools.commands import count_text, list_shards, say, show_samples, show_stats, verify
from loader.tools.convert import add_convert, run_convert
from loader.tools.simulate import add_simulate, run_simulate
from loader.writing.merge import merge

_MERGE_DESCRIPTION = """Write one index.json over the datasets in a directory's folders. No shard is copied. Without
PARTS, every folder with an index.json is a part, in natural order (2 before 10), and a folder with shards but without
an index is an error: its writer has not finished. Parts with other columns than the first are merged with a warning,
because a batch cannot mix their samples."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 if the dataset has a problem, 2 for a wrong command line."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (any(word.startswith("-") for word in rest) or not _take(options, rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return _run(options)
    except LoaderError as problem:
        say(str(problem), error=True)
        return 1
    except BrokenPipeError:  # `ls | head`
        sys.stdout = None  # or the interpreter's exit would report the broken pipe
        return 0
    except OSError as problem:  # for example: no space, no permission
        say(f"{problem.filename or options.command}: {problem.strerror or cause_text(problem)}", error=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fusecache dataset", description="Inspect, check, merge and convert MDS datasets."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("ls", help="list the columns, and the shards with their samples and bytes")
    headed = commands.add_parser("head", help="print the first samples")
    headed.add_argument("-n", "--samples", type=int, default=5, help="number of samples (default: 5)")
    counted = commands.add_parser("stats", help="show how samples and bytes spread over shards and columns")
    checked = commands.add_parser(
        "verify", help="read every shard: check sizes, hashes and offsets, and decode every sample"
    )
    checked.add_argument(
        "--quick", action="store_true", help="check only that each file exists and has its size"
    )
    for command in (headed, checked):
        command.add_argument(
            "--allow-pickle", action="store_true", help="decode pickled columns; unpickling can run code"
        )
    for command in (shown, headed, counted, checked):
        command.add_argument("dataset", type=Path, help="directory that contains index.json")
    merged = commands.add_parser(
        "merge",
        help="write one index over the datasets in a directory's folders",
        description=_MERGE_DESCRIPTION,
    )
    merged.add_argument("dataset", type=Path, help="directory whose folders are the parts")
    merged.add_argument("parts", nargs="*", type=Path, help="folders, in order (default: all, 2 before 10)")
    merged.add_argument("--replace", action="store_true", help="overwrite an existing index.json")
    add_convert(
        commands.add_parser(
            "convert",
            help="convert text, JSON lines, CSV, Parquet, Hugging Face, tar files or another dataset to MDS",
        )
    )
    add_simulate(
        commands.add_parser(
            "simulate",
            help="estimate what a run will download: shards in use, first batch, epochs by cache policy",
        )
    )
    return parser


def _take(options: Any, rest: Sequence[str]) -> bool:
    """Assign paths that follow an option to the command; return False if the command takes no such paths.

    argparse reports them as unknown once paths stood before the option. Its remedy, parse_intermixed_args, does not
    support subcommands.
    """
    if options.command == "merge":
        options.parts += map(Path, rest)
        return True
    if options.command == "convert" and options.kind != "recompress":
        *inputs, out = rest
        options.inputs += [options.out, *inputs]
        options.out = out
        return True
    return False


def _run(options: Any) -> int:
    if options.command == "ls":
        return list_shards(options.dataset)
    if options.command == "head":
        return show_samples(options.dataset, options.samples, allow_pickle=options.allow_pickle)
    if options.command == "stats":
        return show_stats(options.dataset)
    if options.command == "verify":
        return verify(options.dataset, allow_pickle=options.allow_pickle, quick=options.quick)
    if options.command == "merge":
        shards = merge(options.dataset, options.parts or None, replace=options.replace)
        say(f"{options.dataset}: {count_text(shards, 'shard')} in one index")
        return 0
    if options.command == "simulate":
        return run_simulate(options)
    return run_convert(options)


if __name__ == "__main__":
    sys.exit(main())
