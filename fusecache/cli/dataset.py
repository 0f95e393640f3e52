"""`fusecache dataset`: the command line of `loader`, whatever modules the working directory has."""

import argparse
import os
import sys
from collections.abc import Sequence

from fusecache.cli.extras import require_extra
from fusecache.mount.launch import own_program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command; its words are the loader's."""
    parser.usage = "fusecache dataset ls|head|stats|verify|merge|convert|simulate …"
    parser.set_defaults(run=dataset, parser=parser)


def dataset(_: argparse.Namespace, words: Sequence[str]) -> int:
    """Become the loader's program."""
    require_extra("loader")
    *python, _package = own_program()
    sys.stdout.flush()
    os.execv(python[0], [*python, "loader", *words[1:]])
