"""Tools for datasets: `python -m loader ls | head | stats | verify | merge | convert | simulate`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loader.errors import LoaderError, cause_text
from loader.mds.merge import merge
from loader.tools.commands import count_text, list_shards, say, show_samples, show_stats, verify
from loader.tools.convert import add_convert, run_convert
from loader.tools.simulate import add_simulate, run_simulate


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 if all is well, 1 if the dataset is not, 2 for a wrong command line."""
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
        sys.stdout = None  # nor shall the interpreter's end complain
        return 0
    except OSError as problem:  # no space, no permission
        say(f"{problem.filename or options.command}: {problem.strerror or cause_text(problem)}", error=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loader", description="Look at MDS datasets, and make them."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("ls", help="columns, and the shards with their samples and bytes")
    headed = commands.add_parser("head", help="the first samples")
    headed.add_argument("-n", "--samples", type=int, default=5, help="how many (default: 5)")
    counted = commands.add_parser("stats", help="how samples and bytes spread over shards and columns")
    checked = commands.add_parser(
        "verify", help="read every shard: sizes, hashes, offsets, every sample decoded"
    )
    checked.add_argument("--quick", action="store_true", help="only that each file is there, and its size")
    for command in (headed, checked):
        command.add_argument(
            "--allow-pickle", action="store_true", help="decode pickled columns; they can run code"
        )
    for command in (shown, headed, counted, checked):
        command.add_argument("dataset", type=Path, help="directory that holds index.json")
    merged = commands.add_parser(
        "merge", help="one index over the datasets in a directory's folders", description=merge.__doc__
    )
    merged.add_argument("dataset", type=Path, help="directory whose folders hold the parts")
    merged.add_argument("parts", nargs="*", type=Path, help="folders, in order (default: all, 2 before 10)")
    merged.add_argument("--replace", action="store_true", help="write over an index.json that is there")
    add_convert(
        commands.add_parser("convert", help="make a dataset of text, JSON lines, Parquet or a dataset")
    )
    add_simulate(
        commands.add_parser(
            "simulate",
            help="what a run will download: shards in use, the first batch, epochs by cache policy",
        )
    )
    return parser


def _take(options: Any, rest: Sequence[str]) -> bool:
    """Take paths that stand behind an option; False if the command has none there.

    argparse calls them unknown once some stood before it, and its own remedy does not go with commands.
    """
    if options.command == "merge":
        options.parts += map(Path, rest)
        return True
    if options.command == "convert" and options.kind != "recompress":
        *inputs, out = rest
        options.inputs += [str(options.out), *inputs]
        options.out = Path(out)
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
