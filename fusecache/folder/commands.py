"""What `pull`, `push` and `watch` do: they put the parts together, and say how it went."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict

import trio

from fusecache.cli.say import print_line, say
from fusecache.config.options import MountOptions
from fusecache.daemon.connect import connect, endpoint_of, identity_of
from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.folder.arguments import folder_options
from fusecache.folder.follow import followed
from fusecache.folder.listing import list_bucket
from fusecache.folder.local_folder import LocalFolder, check_folder
from fusecache.folder.patience import Patience
from fusecache.folder.pull import WORKERS, Pull, PullReport
from fusecache.model.errors import FusecacheError
from fusecache.model.format_text import size_text
from fusecache.model.names import CONTROL_NAME
from fusecache.mount.launch import READY, Parent, start_in_background
from fusecache.mount.progress import StepView

_NAMES_SHOWN = 20


def pull(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Fetch a bucket into a folder; return the exit status."""
    parent = Parent(arguments.ready_fd)
    try:
        check_folder(arguments.folder, create=True)
        options = folder_options(arguments, read_only=True)
        if arguments.follow and not arguments.foreground:

            def command(ready_fd: int) -> list[str]:
                hidden = ["--foreground", "--ready-fd", str(ready_fd)]
                return [sys.executable, "-m", "fusecache", *words, *hidden]

            message = start_in_background(command, arguments.folder / CONTROL_NAME / "pull.log")
            if message:
                say(message)
            return 0
        report = _pull(arguments, options, parent)
    except FusecacheError as exc:
        parent.report(f"error: {exc}")
        raise
    if arguments.json:
        print_line(json.dumps(asdict(report)))
    else:
        say(report.line())
        _say_names("left out", report.skipped)
        _say_names("failed", report.failed)
    return int(bool(report.skipped or report.failed))


def _pull(arguments: argparse.Namespace, options: MountOptions, parent: Parent) -> PullReport:
    endpoint = endpoint_of(options)
    with (
        LocalFolder(arguments.folder, identity_of("", options, endpoint), "pull", create=True) as folder,
        closing(connect(options, endpoint, max_connections=WORKERS, was_used=False).remote) as remote,
    ):
        patience = Patience()
        one = Pull(
            folder,
            remote,
            list_bucket(remote, options.prefix, patience),
            patience,
            order_last=options.writeback.order_last,
            is_forced=arguments.force,
        )
        total = sum(each.info.size for each in one.objects.values())

        async def run() -> None:
            with StepView(sys.stderr, verb="pulling") as view, unwrap_single_error():

                def show(report: PullReport) -> None:
                    done = f"{report.fetched_files} of {len(one.objects)} files"
                    line = f"{done}, {size_text(report.fetched_bytes)} of {size_text(total)}"
                    view.show(report.fetched_bytes, total, done, line)

                if not arguments.follow:
                    return await one.run(show)
                async with followed(one, folder.own):
                    parent.report(
                        f"{READY} {size_text(total)} to fetch; files come in the order in which they are read"
                    )
                    return await one.run(show)

        trio.run(run)
    return one.report


def _say_names(verb: str, reasons: dict[str, str]) -> None:
    for name, why in list(reasons.items())[:_NAMES_SHOWN]:
        say(f"{verb}: {name}: {why}")
    if len(reasons) > _NAMES_SHOWN:
        say(f"{verb}: {len(reasons) - _NAMES_SHOWN} more; --json names all")
