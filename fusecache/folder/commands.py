"""What `pull`, `push` and `watch` do: they put the parts together, and say how it went."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trio

from fusecache.cli.say import print_line, say
from fusecache.config.options import FIELDS, MountOptions, load_options
from fusecache.daemon.checkup import check_disk
from fusecache.daemon.connect import connect, endpoint_of, identity_of, proven_conditions
from fusecache.engine.runtime.supervisor import unwrap_single_error
from fusecache.folder.follow import followed
from fusecache.folder.local_folder import LocalFolder, check_folder
from fusecache.folder.publishing import (
    METADATA_THREADS,
    PUBLISH_THREADS,
    UPLOAD_THREADS,
    FolderPublisher,
    PushReport,
    running_engine,
)
from fusecache.folder.pull import WORKERS, Patience, Pull, PullReport, list_bucket
from fusecache.folder.watching import FolderPasses, Show
from fusecache.model.errors import FolderError, FusecacheError
from fusecache.model.format_text import count_text, empty_text, size_text
from fusecache.model.names import CONTROL_NAME
from fusecache.mount.launch import READY, Parent, StartingDaemon, own_program
from fusecache.mount.progress import StepView
from fusecache.remote.endpoints import Transport

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
                return [*own_program(), *words, *hidden]

            message = StartingDaemon(command, arguments.folder / CONTROL_NAME / "pull.log").wait()
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
        question = empty_text(options.source, is_empty=not report.files and not report.skipped)
        if question:
            say(question)
        _say_names("left out", report.skipped)
        _say_names("failed", report.failed)
    return int(bool(report.skipped or report.failed))


def _pull(arguments: argparse.Namespace, options: MountOptions, parent: Parent) -> PullReport:
    endpoint = endpoint_of(options)
    with (
        LocalFolder(arguments.folder, identity_of(options, endpoint), "pull", create=True) as folder,
        closing(connect(options, endpoint, transport=Transport(WORKERS), was_used=False).remote) as remote,
    ):
        patience = Patience(arguments.give_up_after)
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


def push(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Publish a folder; return the exit status."""
    with StepView(sys.stderr, verb="pushing") as view:

        def show(report: PushReport, under_way: int) -> None:
            left = f"{count_text(under_way, 'file')} under way"
            view.show(report.published_bytes, None, left, f"{report.line()}, {left}")

        report = _publish(arguments, "push", show, lambda passes: passes.push())
    return _say_pushed(arguments, report)


def watch(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Publish what is closed in a folder until a signal; return the exit status."""
    told: dict[str, str] = {}

    def show(report: PushReport, _: int) -> None:
        now = report.conflicts | report.failed
        _say_names("not published", {name: why for name, why in now.items() if told.get(name) != why})
        told.clear()
        told.update(now)

    def ready() -> None:
        say(f"watching {arguments.folder}")

    report = _publish(
        arguments, "watch", show, lambda passes: passes.watch(arguments.sync_deadline, ready), create=True
    )
    return _say_pushed(arguments, report)


def _publish(
    arguments: argparse.Namespace,
    command: str,
    show: Show,
    work: Callable[[FolderPasses], Awaitable[None]],
    *,
    create: bool = False,
) -> PushReport:
    check_folder(arguments.folder, create=create)
    options = folder_options(arguments, read_only=False)
    endpoint = endpoint_of(options)
    identity = identity_of(options, endpoint)
    logging.getLogger("fusecache").setLevel(logging.ERROR)
    logging.getLogger("fusecache.engine.publish.rejections").setLevel(
        logging.CRITICAL
    )  # the report names them
    with LocalFolder(arguments.folder, identity, command, create=create) as folder:
        check_disk(options)
        connections = METADATA_THREADS + UPLOAD_THREADS + PUBLISH_THREADS
        proven = proven_conditions(options.cache_dir, identity)
        connection = connect(
            options, endpoint, transport=Transport(connections), was_used=False, proven=proven
        )
        with closing(connection.remote) as remote, unwrap_single_error():
            if connection.write_refusal is not None:
                raise FolderError(
                    f"{options.source}: the keys may read, but not write ({connection.write_refusal}); use keys that "
                    "may write"
                )

            async def run() -> PushReport:
                async with running_engine(options, connection, identity) as filesystem:
                    publisher = FolderPublisher(
                        folder, filesystem, remote, options, is_forced=getattr(arguments, "force", False)
                    )
                    passes = FolderPasses(
                        folder,
                        filesystem,
                        publisher,
                        show,
                        prefix=options.prefix,
                        removes=arguments.delete,
                        temp_names=options.writeback.temp_names if command == "watch" else (),
                    )
                    await work(passes)
                return publisher.report

            return trio.run(run)
    raise AssertionError("unreachable: it returns or raises")


def _say_pushed(arguments: argparse.Namespace, report: PushReport) -> int:
    if arguments.json:
        print_line(json.dumps(asdict(report)))
    else:
        say(report.line())
        _say_names("conflict", report.conflicts)
        _say_names("not published", report.failed)
    return report.status


def _say_names(verb: str, reasons: dict[str, str]) -> None:
    for name, why in list(reasons.items())[:_NAMES_SHOWN]:
        say(f"{verb}: {name}: {why}")
    if len(reasons) > _NAMES_SHOWN:
        say(f"{verb}: {len(reasons) - _NAMES_SHOWN} more; --json names all")


def folder_options(arguments: argparse.Namespace, *, read_only: bool) -> MountOptions:
    """Return the options of a mount that the folder would be. Raises ConfigError."""
    config = arguments.config or os.environ.get("FUSECACHE_CONFIG") or None
    own = Path(os.path.abspath(arguments.folder)) / CONTROL_NAME
    flags: dict[str, Any] = {name: getattr(arguments, name, None) for name in FIELDS}
    flags |= {"mountpoint": str(own / "none"), "read_only": read_only}
    flags["cache_dir"] = flags["cache_dir"] or str(own / "engine")
    return load_options(
        flags, os.environ, config_path=None if config is None else Path(config), user_id=os.geteuid()
    )
