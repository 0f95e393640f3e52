"""`fusecache recover`: lists, restores or deletes files that did not reach the bucket under their names.

It works on a live mount, or on the cache directory of an unmounted one (the offline cache). This module prints
messages and copies files to local paths. The engine decides what the entries are and what happens to them.
"""

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fusecache.cli.say import print_line, say_error
from fusecache.model.errors import AlreadyExists, FusecacheError, MountError, NotFound
from fusecache.model.format_text import count_text, printable, size_text
from fusecache.mount.control_client import Mount, request_stream
from fusecache.mount.launch import mount_of_this_node, resolve_in_mount
from fusecache.mount.mount_table import check_answers, root_of

_COPY_BYTES = 16 << 20  # bytes per read of a copy
# Kinds that an offline cache cannot delete: only the next mount can.
_NOT_DELETED = frozenset({"waiting", "local-only"})
ALL = "all"
Row = dict[str, Any]
# Entry numbers, or ALL.
Ids = tuple[int | str, ...]


def parse_ids(text: str) -> Ids:
    """Parse an argument of --restore or --delete: `3`, `3,4` or `all`. Raises ArgumentTypeError."""
    if text == ALL:
        return (ALL,)
    if not re.fullmatch(r"[\d\s,]*\d[\d\s,]*", text):
        raise argparse.ArgumentTypeError(
            f"{text!r}: allowed are numbers from the list, like 3 4 or 3,4, or all"
        )
    return tuple(int(number) for number in re.findall(r"\d+", text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "place", nargs="?", help="a mount, or the cache directory of an unmounted one [the only mount]"
    )
    parser.add_argument(
        "--restore", nargs="+", type=parse_ids, action="extend", default=[], metavar="ID",
        help="restore entries as files, as NAME.recovered-1; a rejected file is uploaded again; "
        "several: 3 4 or 3,4; all: every entry except conflicts",
    )  # fmt: skip
    parser.add_argument(
        "--to",
        metavar="PATH",
        help="path to restore to, absolute or relative to the working directory; outside the mount you get a copy",
    )
    parser.add_argument(
        "--delete", nargs="+", type=parse_ids, action="extend", default=[], metavar="ID",
        help="delete entries and free their disk space; several: 3 4 or 3,4; all: every entry listed",
    )  # fmt: skip
    parser.add_argument("--yes", action="store_true", help="confirm --delete")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=recover, parser=parser)


class EntrySource(Protocol):
    """A list of entries that can be deleted: a live mount or an offline cache."""

    def listing(self) -> Row:
        """Return `entries` (the newest), and the `count` and `bytes` of all."""
        ...

    def delete(self, number: int) -> int:
        """Delete an entry permanently; return the bytes freed."""
        ...


class LiveMount:
    """The entries of a live mount, over its daemon's control socket."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount

    def listing(self) -> Row:
        """Return `entries` (the newest), and the `count` and `bytes` of all."""
        return self._ask("recover", "recover")  # type: ignore[no-any-return]

    def delete(self, number: int) -> int:
        """Delete an entry permanently; return the bytes freed."""
        return int(self._ask("delete", "freed_bytes", id=number))

    def restore(self, number: int, path: str) -> str:
        """Restore an entry as a file of the mount; return its path inside."""
        return str(self._ask("bring-back", "path", id=number, paths=[path]))

    def _ask(self, command: str, fact: str, **words: Any) -> Any:
        row = request_stream(self.mount, {"command": command, **words})
        if row.get("result") != "ok":
            raise MountError(str(row.get("message") or row.get("result")))
        return row[fact]


def recover(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """List, restore or delete entries; return the exit status: 0, or 1 if an entry failed."""
    place, to = arguments.place, arguments.to
    to_restore = [each for word in arguments.restore for each in word]
    to_delete = [each for word in arguments.delete for each in word]
    for path in filter(None, (place, to)):
        check_answers(path)
    if to is not None and (len(to_restore) > 1 or ALL in to_restore) and not os.path.isdir(to):
        raise MountError(f"{to}: --to must be an existing directory to restore several entries")
    # If the daemon of a mount is gone, `resolve_in_mount` raises an error that says what to do.
    directory = Path(place) if place is not None and root_of(place) is None else None
    if directory is not None and (directory / "fusecache.json").exists():
        from fusecache.engine.recovery.offline import OfflineCache  # other commands do not need the engine

        with OfflineCache(directory) as cache:
            return _run(cache, arguments, to_restore, to_delete)
    mount, _inner = resolve_in_mount(place if place is not None else mount_of_this_node(Path.cwd()))
    return _run(LiveMount(mount), arguments, to_restore, to_delete)


def _run(
    source: EntrySource,
    arguments: argparse.Namespace,
    restore: Sequence[int | str],
    delete: Sequence[int | str],
) -> int:
    found = source.listing()
    is_mounted = isinstance(source, LiveMount)
    if not restore and not delete:
        sys.stdout.write(
            json.dumps(found, indent=2) + "\n"
            if arguments.json
            else listing_text(found, is_mounted=is_mounted)
        )
        return 0
    failed = False
    # Our version of a conflict is a file of the mount already.
    for number in _numbers(restore, found, left_out={"conflict"}):
        failed |= not _try(lambda number=number: _restore(source, found, number, arguments.to))
    to_delete = _numbers(delete, found, left_out=set() if is_mounted else {*_NOT_DELETED, "conflict"})
    for number in to_delete:
        if arguments.yes:
            failed |= not _try(lambda number=number: _delete(source, _row_of(found, number)))
        else:
            row = _row_of(found, number)
            print_line(f"{number}: would {_loss_of(row)}")
    if to_delete and not arguments.yes:
        raise MountError("nothing was deleted; repeat the command with --yes to delete")
    older = found["count"] - len(found["entries"])
    if older and ALL in (*restore, *delete):
        raise MountError(
            f"not listed and still there: {count_text(older, 'older file')}; repeat the command for the rest"
        )
    return int(failed)


def _numbers(named: Sequence[int | str], found: Row, *, left_out: Collection[str]) -> list[int]:
    """Return the requested numbers without duplicates. left_out: kinds that ALL does not include."""
    numbers: list[int] = []
    for each in named:
        if isinstance(each, int):
            numbers.append(each)
            continue
        meant = [row["id"] for row in found["entries"] if row["kind"] not in left_out]
        if not meant:
            print_line("all: no entry on the list qualifies")
        numbers += meant
    return list(dict.fromkeys(numbers))


def _try(call: Any) -> bool:
    try:
        print_line(call())
    except FusecacheError as exc:
        say_error(exc)
        return False
    return True


def _restore(source: EntrySource, found: Row, number: int, to: str | None) -> str:
    row = _row_of(found, number)
    name = row["path"].rpartition("/")[2] or f"file-{number}"
    target = None if to is None else Path(to) / name if os.path.isdir(to) else Path(to)
    if isinstance(source, LiveMount):
        inner = "" if target is None else _inside(source.mount, target)
        if inner is not None:
            return f"{number}: {source.mount.root / source.restore(number, inner)}"
    if target is None:
        raise MountError(f"{number}: the bucket is not mounted; give a path for the copy with --to PATH")
    if not row["local_path"]:
        raise NotFound(f"{number}: its content is not on this disk")
    copy_out(Path(row["local_path"]), target)
    return f"{number}: copied to {target}, {size_text(row['bytes'])}; the entry stays on the list"


def _inside(mount: Mount, target: Path) -> str | None:
    """Return the target's path inside the mount, or None if it is outside."""
    with suppress(MountError):
        other, inner = resolve_in_mount(target.parent)
        if other.root == mount.root:
            return f"{inner}/{target.name}".lstrip("/")
    return None


def copy_out(source: Path, target: Path) -> None:
    """Copy a file to a local path that does not exist yet. When this returns, the copy is complete and fsynced.

    Only this user can read the copy, whatever the umask: the file's own mode is not known here.
    """
    try:
        with open(source, "rb") as reader, open(target, "xb", opener=_open_private) as writer:
            try:
                shutil.copyfileobj(reader, writer, _COPY_BYTES)
                writer.flush()
                os.fsync(writer.fileno())
            except BaseException:
                target.unlink()
                raise
    except FileExistsError as exc:
        raise AlreadyExists(f"{target}: already exists; give another path with --to") from exc
    except FileNotFoundError as exc:
        if target.parent.is_dir():
            raise
        raise NotFound(
            f"{target}: there is no directory {os.path.abspath(target.parent)}; --to is relative to the working "
            "directory, and a path on the mount begins with the mountpoint"
        ) from exc


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _delete(source: EntrySource, row: Row) -> str:
    number = int(row["id"])
    freed = source.delete(number)
    if row["kind"] != "conflict" and "change" not in row:
        return f"{number}: deleted, {size_text(freed)} freed"
    if row.get("kept_as"):
        return (
            f"{number}: our version {row['kept_as']}, {size_text(row['bytes'])}, is deleted; "
            "the other client's version stays"
        )
    return f"{number}: removed from the list"


def _loss_of(row: Row) -> str:
    """Return what deleting an entry would do."""
    if "change" in row or (row["kind"] == "conflict" and not row["kept_as"]):
        return f"remove {_name_of(row)} from the list"
    return f"delete {row.get('kept_as') or _name_of(row)}, {size_text(row['bytes'])}, permanently"


def _row_of(found: Row, number: int) -> Row:
    row = next((row for row in found["entries"] if row["id"] == number), None)
    if row is None:
        raise NotFound(f"{number}: no such entry; without --restore and --delete, this command lists them")
    return dict(row)


# ---- the listing


def listing_text(found: Row, *, is_mounted: bool) -> str:
    """Return the list as text: two lines per entry, the newest last, then the commands that apply."""
    entries = found["entries"]
    if not entries:
        return "nothing to recover\n"
    lines = []
    for row in entries:
        when = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if row["time"] else "time unknown"
        )
        lines.append(
            f"{row['id']:>6}  {row['kind']:<8} {size_text(row['bytes']):>10}  {when}  {_name_of(row)}"
        )
        lines.append(f"        {_message_of(row)}")
    if found["count"] > len(entries):
        lines.append(f"and {count_text(found['count'] - len(entries), 'older file')}")
    here = f", {size_text(found['bytes'])} on this disk" if found["bytes"] else ""
    lines.append(count_text(found["count"], "file") + here)
    lines += _remedies(entries, is_mounted=is_mounted)
    return "".join(f"{printable(line)}\n" for line in lines)


def _remedies(entries: Sequence[Row], *, is_mounted: bool) -> Iterator[str]:
    """Yield the commands that apply to the entries. Never suggests deleting a file that only waits for its upload."""
    waiting = sum(row["kind"] == "waiting" for row in entries)
    if waiting:
        wait, them = ("waits", "it") if waiting == 1 else ("wait", "them")
        yield (
            f"{count_text(waiting, 'file')} {wait} for upload: mount the bucket again with this cache directory to "
            f"upload {them}; to get a copy: --restore ID… --to PATH"
        )
    if any("change" in row for row in entries):
        again = "repeat it: --restore ID…" if is_mounted else "mount the bucket to repeat it"
        yield f"rejected change: {again}; give it up: --delete ID… --yes"
    if any(row["kind"] not in {*_NOT_DELETED, "conflict"} and "change" not in row for row in entries):
        what = " (not files that wait for upload)" if waiting else ""
        to = "[--to PATH]" if is_mounted else "--to PATH"
        yield f"restore: --restore ID… {to}; delete and free disk space{what}: --delete ID… --yes"
    copies = {bool(row["kept_as"]) for row in entries if row["kind"] == "conflict"}
    if copies and not is_mounted:
        yield "conflict: mount the bucket again to resolve it"
        return
    if True in copies:
        yield (
            "conflict: to rename our version: --restore ID --to PATH, or mv it over the original name; "
            "to delete it and keep the other client's: --delete ID… --yes"
        )
    if False in copies:
        yield "conflict without a copy: repeat the change, or remove it from the list: --delete ID… --yes"


def _name_of(row: Row) -> str:
    return str(row["path"] or "(name unknown)")


def _message_of(row: Row) -> str:
    """Return why an entry is on the list, and where its content is."""
    if row["kind"] == "conflict":
        ours = f"our version is {row['kept_as']}" if row["kept_as"] else "our change was dropped"
        settled = ", and this node wrote it again since" if row["settled"] else ""
        return f"another client changed it first{settled}; {ours}"
    if "change" in row:
        return str(row["message"])
    return "; ".join(filter(None, (row["message"], row["local_path"] or "its content is gone")))
