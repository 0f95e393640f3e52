"""`fusecache clean`: arguments, confirmation, messages and the log. `fusecache.bucket.cleaning` does the work.

Exit status: 0 all that was selected is gone (without --delete: is listed), 1 some of it stays, or an error.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fusecache.cli import uploads
from fusecache.cli.say import print_line, say, say_error
from fusecache.cli.sources import SCHEME, add_source_flags, ask_mounts, split_source
from fusecache.config.endpoint_options import key_family
from fusecache.config.option_groups import ORDER_LAST
from fusecache.config.values import Duration, as_argument, as_count
from fusecache.model.errors import ConfigError, ObjectChanged, RemoteError
from fusecache.model.format_text import count_text, seconds_text, size_text
from fusecache.model.objects import ObjectInfo
from fusecache.mount.control_client import command
from fusecache.mount.launch import resolve_in_mount
from fusecache.policy.checkpoints import (
    RECENT_SECONDS,
    Amount,
    CheckpointSummary,
    Fate,
    Selection,
    dollars_a_month,
)

if TYPE_CHECKING:
    from fusecache.bucket.address import BucketKeys, Place
    from fusecache.bucket.cleaning import CleaningPlan

# Bytes of keys in one question to a mount: half of what its daemon accepts.
_QUESTION_BYTES = 1 << 19


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "place", metavar="SOURCE|PATH", help="s3://BUCKET[/PREFIX], or a directory in a mount"
    )
    what = parser.add_argument_group("what to remove")
    what.add_argument(
        "--older-than",
        type=as_argument(Duration()),
        metavar="DURATION",
        help="objects, checkpoints or uploads of at least this age, like 7d",
    )
    what.add_argument("--prefix", default="", help="objects whose name below the source begins with this")
    what.add_argument("--suffix", default="", help="objects whose name ends with this")
    what.add_argument(
        "--glob", default="", metavar="PATTERN",
        help="objects whose name matches; with a '/' the whole name below the source, else its last part",
    )  # fmt: skip
    what.add_argument(
        "--keep-checkpoints", type=as_argument(as_count), metavar="N",
        help="whole checkpoints except the newest N of each series; a checkpoint is a directory like step-1000, and "
        "whole if it has the commit markers of its series",
    )  # fmt: skip
    what.add_argument(
        "--incomplete", action="store_true",
        help="with --keep-checkpoints: also incomplete checkpoints that are older than a whole one",
    )  # fmt: skip
    what.add_argument(
        "--uploads", action="store_true", help="multipart uploads that were never finished [at least 1d old]"
    )
    what.add_argument("--wipe", action="store_true", help="everything below the source")
    how = parser.add_argument_group("how")
    how.add_argument("--delete", action="store_true", help="remove it; without this flag it is only listed")
    how.add_argument(
        "--even-recent", action="store_true", help="also objects that were modified within the last hour"
    )
    how.add_argument(
        "--yes-wipe",
        metavar="BUCKET/PREFIX",
        help="confirms --wipe --delete where no person can type the name",
    )
    how.add_argument(
        "--price-per-gb", type=float, metavar="DOLLARS", help="price of a gigabyte for a month [0.015 on R2]"
    )
    how.add_argument(
        "--log", type=Path, metavar="FILE",
        help="gets a line of JSON for each removed object [~/.local/state/fusecache/clean.log]",
    )  # fmt: skip
    how.add_argument("--json", action="store_true", help="print the list and the result as JSON")
    add_source_flags(parser)
    parser.set_defaults(run=clean, parser=parser)


def clean(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """List what would go, or remove it; return the exit status."""
    _check(arguments)
    from fusecache.bucket.address import open_store  # other commands do not need boto3
    from fusecache.bucket.cleaning import Cleaner, server_now

    place, keys = _address(arguments)
    find_in_use = partial(_find_in_use, place.bucket, place.prefix, is_needed=arguments.delete)
    with ExitStack() as stack:
        store = stack.enter_context(closing(open_store(place, keys)))
        now = server_now(store, place.prefix)
        if arguments.uploads:
            arguments.abort = arguments.yes = arguments.delete
            arguments.confirmation = "--delete"
            arguments.older_than = arguments.older_than or 86400.0
            return uploads.uploads(arguments, words)
        log = stack.enter_context(_open_log(arguments.log)) if arguments.delete else None
        output = (_JsonOutput if arguments.json else _Output)(place.bucket, now, log)
        cleaner = Cleaner(store, _plan(arguments, place.prefix), now, find_in_use, output)
        survey = cleaner.survey()
        if arguments.wipe and arguments.delete:
            _confirm(place.source.removeprefix(SCHEME), arguments.yes_wipe, survey.selected)
        stack.callback(output.close)
        cleaner.remove(survey)
        output.result = "stays" if output.stays else "ok"
        dollars = dollars_a_month(
            output.gone.bytes, is_r2=place.endpoint.is_r2, dollars_per_gb=arguments.price_per_gb
        )
        output.end(arguments, dollars, survey.recent)
    return int(output.stays)


def _check(arguments: argparse.Namespace) -> None:
    """Exit with status 2 unless the arguments say clearly what to remove."""
    names = bool(arguments.prefix or arguments.suffix or arguments.glob)
    modes = {
        "--keep-checkpoints": arguments.keep_checkpoints is not None,
        "--uploads": arguments.uploads,
        "--wipe": arguments.wipe,
        "--prefix, --suffix and --glob": names,
    }
    chosen = [name for name, is_chosen in modes.items() if is_chosen]
    error = arguments.parser.error
    if len(chosen) > 1:
        error(f"{chosen[0]} and {chosen[1]} exclude each other: run the command twice")
    if not chosen and arguments.older_than is None:
        error("say what to remove: --older-than, --keep-checkpoints, --uploads, --wipe, or names with --glob")
    if arguments.wipe and arguments.older_than is not None:
        error("--wipe removes everything: use --older-than alone for what is old")
    if arguments.incomplete and arguments.keep_checkpoints is None:
        error("--incomplete belongs to --keep-checkpoints")
    if (
        arguments.uploads
        and arguments.older_than is not None
        and arguments.older_than < uploads.SHORTEST_SECONDS
    ):
        error("--uploads: allowed for --older-than is 1h or more")


def _address(arguments: argparse.Namespace) -> "tuple[Place, BucketKeys]":
    """Return where to clean, and the keys for it: those of the mount for a path in one."""
    from fusecache.bucket.address import BucketKeys, place_of

    source, inner, access = arguments.place, "", {}
    if "://" not in source:
        mount, inner = resolve_in_mount(source)
        access = command(mount, {"command": "in-use", "keys": [], "path": inner})
        source = access["source"]
    chosen = {
        name: getattr(arguments, name) or access.get(name)
        for name in ("endpoint_url", "region", "profile", "credentials_file")
    }
    bucket, prefix = split_source(source)
    place = place_of(
        bucket,
        "/".join(filter(None, (prefix.rstrip("/"), inner))),
        endpoint_url=chosen["endpoint_url"],
        region=chosen["region"],
    )
    file, family = chosen["credentials_file"], access.get("credentials_from")
    if family and not (arguments.profile or arguments.credentials_file):
        found = key_family(family, os.environ)
        if found.write_keys is None:
            raise ConfigError(
                f"{arguments.place}: not set are {', '.join(found.missing)}, the keys of the mount"
            )
        return place, BucketKeys(found.write_keys)
    return place, BucketKeys(credentials_file=Path(file) if file else None, profile=chosen["profile"])


def _plan(arguments: argparse.Namespace, below: str) -> "CleaningPlan":
    from fusecache.bucket.cleaning import CleaningPlan

    return CleaningPlan(
        below,
        Selection(
            arguments.older_than or 0.0,
            arguments.prefix,
            arguments.suffix,
            arguments.glob,
            even_recent=arguments.even_recent,
        ),
        ORDER_LAST,
        keep_checkpoints=arguments.keep_checkpoints,
        removes_incomplete=arguments.incomplete,
        removes_directories=arguments.wipe,
        removes=arguments.delete,
    )


def _find_in_use(bucket: str, prefix: str, keys: Sequence[str], *, is_needed: bool) -> dict[str, str]:
    """Return which keys a mount of this node needs, and why."""
    if len(keys) > 1 and len(json.dumps(keys)) > _QUESTION_BYTES:
        half = len(keys) // 2
        first = _find_in_use(bucket, prefix, keys[:half], is_needed=is_needed)
        return first | _find_in_use(bucket, prefix, keys[half:], is_needed=is_needed)
    found: dict[str, str] = {}
    for row in ask_mounts(bucket, prefix, {"command": "in-use", "keys": list(keys)}, is_needed=is_needed):
        found |= row["in_use"]
    return found


def _confirm(name: str, typed: str | None, amount: Amount) -> None:
    """Raise ConfigError unless the name of what is wiped was given once more."""
    if typed is None:
        if not sys.stdin.isatty():
            raise ConfigError(f"nothing was removed: confirm with --yes-wipe {name}")
        say(f"this removes {_amount_text(amount)}: everything in {name}. Type {name} to go on:")
        typed = sys.stdin.readline().strip()
    if typed.removeprefix(SCHEME).rstrip("/") != name:
        raise ConfigError(f"nothing was removed: {typed!r} is not {name!r}")


def _open_log(path: Path | None) -> TextIO:
    """Open the log for appending. Raises ConfigError."""
    if path is None:
        state = os.environ.get("XDG_STATE_HOME")
        path = (Path(state) if state else Path.home() / ".local" / "state") / "fusecache" / "clean.log"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ConfigError(
            f"cannot write the log {path}: {exc.strerror}; name another one with --log"
        ) from exc
    return open(descriptor, "a", buffering=1, encoding="utf-8")


class _Output:
    """Prints and logs what happens; a `CleaningListener`. gone: what was removed, or would be.

    stays: something that was selected is still there.
    """

    def __init__(self, bucket: str, now: float, log: TextIO | None) -> None:
        self.gone = Amount()
        self.stays = False
        self.result = "error"  # until all is done
        self._bucket = bucket
        self._now = now
        self._log = log
        self._folder = ""

    def on_checkpoint(self, checkpoint: CheckpointSummary, fate: Fate) -> None:
        """Print a checkpoint that goes, or that stays for a reason to know."""
        if fate is Fate.REMOVED:
            self._folder = checkpoint.folder
            if self._log is None:  # no object of it will be reported
                self.gone.objects += checkpoint.objects
                self.gone.bytes += checkpoint.bytes
            age = seconds_text(max(0.0, self._now - checkpoint.newest))
            self._print(
                f"{checkpoint.folder}  {_amount_text(Amount(checkpoint.objects, checkpoint.bytes))}  {age} old"
            )
        elif fate is not Fate.KEPT:
            self._print(f"{checkpoint.folder}  stays: {fate.value}")

    def on_object(self, info: ObjectInfo, error: RemoteError | None) -> None:
        """Print an object that goes by itself, and log what was removed."""
        if self._log is not None:
            self._log.write(json.dumps(self._row(info, error)) + "\n")
        if isinstance(error, ObjectChanged):
            self.on_kept(info.key, "it changed after the listing")
        elif error is not None:
            self.stays = True
            say_error(error)
        else:
            self.gone.add(info)
            if not self._folder or not info.key.startswith(self._folder):
                age = seconds_text(max(0.0, self._now - info.modified))
                self._print(f"{info.key}  {size_text(info.size)}  {age} old")

    def on_kept(self, name: str, why: str) -> None:
        """Print what stays although it was selected."""
        self.stays = True
        say_error(f"{name} stays: {why}")

    def end(self, arguments: argparse.Namespace, dollars: float | None, recent_objects: int) -> None:
        """Print how much is gone."""
        price = (
            "" if dollars is None else f", ${dollars:,.2f} a month" if dollars >= 0.005 else ", $0 a month"
        )
        end = "removed" if arguments.delete else "would go; nothing was removed: add --delete"
        self._print(f"{_amount_text(self.gone)}{price} {end}")
        if recent_objects and (arguments.older_than or 0.0) < RECENT_SECONDS:
            age, remedy = (
                ("second", "they were written as this command began; run it again")
                if arguments.even_recent
                else ("hour", "add --even-recent")
            )
            say(f"{count_text(recent_objects, 'object')} of the last {age} stay: {remedy}")
        say(
            "mounts of this node were asked what they need; those of other nodes and containers cannot be "
            "seen from here"
        )

    def close(self) -> None:
        """Print what ends the output, also after an error."""

    def _print(self, text: str) -> None:
        print_line(text)

    def _row(self, info: ObjectInfo, error: RemoteError | None) -> dict[str, Any]:
        return {
            "time": _time_text(time.time()),
            "bucket": self._bucket,
            "key": info.key,
            "etag": info.etag,
            "bytes": info.size,
            "modified": _time_text(info.modified),
            "result": "removed" if error is None else "stays",
            "error": "" if error is None else str(error),
        }


class _JsonOutput(_Output):
    """Prints one JSON value: a row for each object and checkpoint as it comes, then the sums."""

    def __init__(self, bucket: str, now: float, log: TextIO | None) -> None:
        super().__init__(bucket, now, log)
        self._sums: dict[str, Any] = {}
        self._before = '{"rows": [\n'

    def on_checkpoint(self, checkpoint: CheckpointSummary, fate: Fate) -> None:
        """Print a checkpoint's row."""
        super().on_checkpoint(checkpoint, fate)
        result = self._removed if fate is Fate.REMOVED else "stays"
        error = "" if fate is Fate.REMOVED else fate.value
        row = {"folder": checkpoint.folder, "objects": checkpoint.objects, "bytes": checkpoint.bytes}
        self._add({**row, "modified": _time_text(checkpoint.newest), "result": result, "error": error})

    def on_object(self, info: ObjectInfo, error: RemoteError | None) -> None:
        """Print an object's row."""
        super().on_object(info, error)
        if not isinstance(error, ObjectChanged):  # else `on_kept` has the row
            row = self._row(info, error)
            self._add(row if error is not None else {**row, "result": self._removed})

    def on_kept(self, name: str, why: str) -> None:
        """Print the row of what stays although it was selected."""
        super().on_kept(name, why)
        self._add({"folder" if name.endswith("/") else "key": name, "result": "stays", "error": why})

    def end(self, arguments: argparse.Namespace, dollars: float | None, recent_objects: int) -> None:
        """Add the sums."""
        super().end(arguments, dollars, recent_objects)
        self._sums = {"dollars_a_month": dollars, "too_young_objects": recent_objects}

    def close(self) -> None:
        """Print the sums."""
        sums = {"result": self.result, "objects": self.gone.objects, "bytes": self.gone.bytes, **self._sums}
        sys.stdout.write(
            ("" if self._before.startswith(",") else self._before) + "\n], " + json.dumps(sums)[1:] + "\n"
        )

    @property
    def _removed(self) -> str:
        return "would-go" if self._log is None else "removed"

    def _add(self, row: dict[str, Any]) -> None:
        sys.stdout.write(self._before + json.dumps(row))
        self._before = ",\n"

    def _print(self, text: str) -> None:
        pass


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _amount_text(amount: Amount) -> str:
    return f"{count_text(amount.objects, 'object')}, {size_text(amount.bytes)}"
