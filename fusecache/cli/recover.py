"""`fusecache recover`: what was written here and is not in the bucket under its name, on a mount or in a cold cache.

Words, and copying to local paths; what things are and what becomes of them is the engine's.
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

from fusecache.model.errors import AlreadyExists, FusecacheError, MountError, NotFound
from fusecache.model.format_text import count_text, size_text
from fusecache.mount.control_client import Mount, request_stream
from fusecache.mount.launch import mount_of_this_node, resolve_in_mount
from fusecache.mount.mount_table import check_answers, root_of

_COPY_BYTES = 16 << 20
# Of a cold cache: only the next mount does something with these.
_NOT_DELETED = frozenset({"waiting", "local-only"})
ALL = "all"
Row = dict[str, Any]
# Numbers of the list, or ALL of it.
Wanted = tuple[int | str, ...]


def parse_ids(text: str) -> Wanted:
    """Return what a word of --restore or --delete names: `3`, `3,4` or `all`. Raises ArgumentTypeError."""
    if text == ALL:
        return (ALL,)
    if not re.fullmatch(r"[\d\s,]*\d[\d\s,]*", text):
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are numbers of the list, as 3 4 or 3,4, or all")
    return tuple(int(number) for number in re.findall(r"\d+", text))


class EntrySource(Protocol):
    """Where things are listed and removed."""

    def listing(self) -> Row:
        """Return `things`, their `count` and `bytes`."""
        ...

    def delete(self, number: int) -> int:
        """Remove one for good; return the bytes freed."""
        ...


class LiveMount:
    """A mount, asked through its daemon."""

    def __init__(self, mount: Mount) -> None:
        self.mount = mount

    def listing(self) -> Row:
        """Return `things`, their `count` and `bytes`."""
        return self._ask("recover", "recover")  # type: ignore[no-any-return]

    def delete(self, number: int) -> int:
        """Remove one for good; return the bytes freed."""
        return int(self._ask("delete", "freed_bytes", id=number))

    def restore(self, number: int, path: str) -> str:
        """Make one a file of the mount again; return its path inside."""
        return str(self._ask("bring-back", "path", id=number, paths=[path]))

    def _ask(self, command: str, fact: str, **words: Any) -> Any:
        row = request_stream(self.mount, {"command": command, **words})
        if row.get("result") != "ok":
            raise MountError(str(row.get("message") or row.get("result")))
        return row[fact]


def recover(
    place: str | None,
    *,
    restore: Sequence[Wanted],
    to: str | None,
    delete: Sequence[Wanted],
    confirmed: bool,
    as_json: bool,
) -> int:
    """List, or bring back, or remove; return the exit status: 0, or 1 if something could not be done."""
    to_restore = [each for word in restore for each in word]
    to_delete = [each for word in delete for each in word]
    for path in filter(None, (place, to)):
        check_answers(path)
    if to is not None and (len(to_restore) > 1 or ALL in to_restore) and not os.path.isdir(to):
        raise MountError(f"{to}: several things come back: name a directory that exists")
    # A mount whose daemon is gone answers nothing, and `reach` says what to do about it.
    directory = Path(place) if place is not None and root_of(place) is None else None
    if directory is not None and (directory / "fusecache.json").exists():
        from fusecache.engine.recovery.offline import OfflineCache  # the other commands do without the engine

        with OfflineCache(directory) as cache:
            return _run(cache, to_restore, to, to_delete, confirmed=confirmed, as_json=as_json)
    mount, _ = resolve_in_mount(place if place is not None else mount_of_this_node(Path.cwd()))
    return _run(LiveMount(mount), to_restore, to, to_delete, confirmed=confirmed, as_json=as_json)


def _run(
    source: EntrySource,
    restore: Sequence[int | str],
    to: str | None,
    delete: Sequence[int | str],
    *,
    confirmed: bool,
    as_json: bool,
) -> int:
    found = source.listing()
    is_mounted = isinstance(source, LiveMount)
    if not restore and not delete:
        sys.stdout.write(
            json.dumps(found, indent=2) + "\n" if as_json else listing_text(found, is_mounted=is_mounted)
        )
        return 0
    failed = False
    # A copy of a conflict is on the mount already.
    for number in _numbers(restore, found, left_out={"conflict"}):
        failed |= not _try(lambda number=number: _restore(source, found, number, to))
    to_delete = _numbers(delete, found, left_out=set() if is_mounted else {*_NOT_DELETED, "conflict"})
    for number in to_delete:
        if confirmed:
            failed |= not _try(lambda number=number: _delete(source, _row_of(found, number)))
        else:
            row = _row_of(found, number)
            _tell(f"{number}: would {_loss_of(row)}")
    if to_delete and not confirmed:
        raise MountError("nothing was removed: say it again with --yes")
    older = found["count"] - len(found["entries"])
    if older and ALL in (*restore, *delete):
        raise MountError(
            f"{count_text(older, 'older thing')} were not listed and are still there: say it again"
        )
    return int(failed)


def _numbers(named: Sequence[int | str], found: Row, *, left_out: Collection[str]) -> list[int]:
    """Return the numbers that are named, each once. left_out: kinds that ALL does not mean."""
    numbers: list[int] = []
    for each in named:
        if isinstance(each, int):
            numbers.append(each)
            continue
        meant = [row["id"] for row in found["entries"] if row["kind"] not in left_out]
        if not meant:
            _tell("nothing on the list to do this with")
        numbers += meant
    return list(dict.fromkeys(numbers))


def _try(call: Any) -> bool:
    try:
        _tell(call())
    except FusecacheError as exc:
        sys.stderr.write(f"fusecache: error: {exc}\n")
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
        raise MountError(f"{number}: nothing is mounted: say where its bytes go with --to PATH")
    if not row["local_path"]:
        raise NotFound(f"{number}: there are no bytes of it on this disk")
    copy_out(Path(row["local_path"]), target)
    return f"{number}: {target}: a copy, {size_text(row['bytes'])}; the original stays on the list"


def _inside(mount: Mount, target: Path) -> str | None:
    """Return a path inside the mount, or None if it is not in it."""
    with suppress(MountError):
        other, inner = resolve_in_mount(target.parent)
        if other.root == mount.root:
            return f"{inner}/{target.name}".lstrip("/")
    return None


def copy_out(source: Path, target: Path) -> None:
    """Copy a file to a local path that does not exist yet; it is whole and on the disk when this returns."""
    try:
        with open(source, "rb") as reader, open(target, "xb") as writer:
            try:
                shutil.copyfileobj(reader, writer, _COPY_BYTES)
                writer.flush()
                os.fsync(writer.fileno())
            except BaseException:
                target.unlink()
                raise
    except FileExistsError as exc:
        raise AlreadyExists(f"{target}: exists; give another path") from exc
    except FileNotFoundError as exc:
        if target.parent.is_dir():
            raise
        raise NotFound(
            f"{target}: there is no directory {os.path.abspath(target.parent)}; --to is a path as everywhere, from "
            "the working directory: one on the mount begins with the mountpoint"
        ) from exc


def _delete(source: EntrySource, row: Row) -> str:
    number = int(row["id"])
    freed = source.delete(number)
    if row["kind"] != "conflict":
        return f"{number}: removed, {size_text(freed)} freed"
    if row["kept_as"]:
        return f"{number}: our version {row['kept_as']}, {size_text(row['bytes'])}, is removed; theirs stays"
    return f"{number}: taken off the list"


def _loss_of(row: Row) -> str:
    """Return what deleting a thing would do."""
    if row["kind"] == "conflict" and not row["kept_as"]:
        return f"take {_name_of(row)} off the list"
    return f"remove {row.get('kept_as') or _name_of(row)}, {size_text(row['bytes'])}, for good"


def _row_of(found: Row, number: int) -> Row:
    row = next((row for row in found["entries"] if row["id"] == number), None)
    if row is None:
        raise NotFound(f"{number}: there is no such thing; `fusecache recover` lists them")
    return dict(row)


# ---- the listing


def listing_text(found: Row, *, is_mounted: bool) -> str:
    """Return a listing for people: two lines a thing, the newest last, then what can be done."""
    things = found["entries"]
    if not things:
        return "nothing was left behind\n"
    lines = []
    for row in things:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if row["time"] else "some time"
        lines.append(
            f"{row['id']:>6}  {row['kind']:<8} {size_text(row['bytes']):>10}  {when}  {_name_of(row)}"
        )
        lines.append(f"        {_message_of(row)}")
    if found["count"] > len(things):
        lines.append(f"and {count_text(found['count'] - len(things), 'older thing')}")
    here = f", {size_text(found['bytes'])} on this disk" if found["bytes"] else ""
    lines.append(count_text(found["count"], "thing") + here)
    return "\n".join([*lines, *_remedies(things, is_mounted=is_mounted)]) + "\n"


def _remedies(things: Sequence[Row], *, is_mounted: bool) -> Iterator[str]:
    """Yield what can be done about the things of a listing; nobody shall remove what only waits for its upload."""
    waiting = sum(row["kind"] == "waiting" for row in things)
    if waiting:
        wait, them = ("waits", "it") if waiting == 1 else ("wait", "them")
        yield (
            f"{count_text(waiting, 'file')} {wait} for upload: mount the bucket again with this cache directory, "
            f"which uploads {them}; a copy: --restore ID… --to PATH"
        )
    if any(row["kind"] not in {*_NOT_DELETED, "conflict"} for row in things):
        what = " (not of those that wait)" if waiting else ""
        to = "[--to PATH]" if is_mounted else "--to PATH"
        yield f"bring back: --restore ID… {to}; free the room{what}: --delete ID… --yes"
    copies = {bool(row["kept_as"]) for row in things if row["kind"] == "conflict"}
    if copies and not is_mounted:
        yield "in conflict: mount the bucket again to see to it"
        return
    if True in copies:
        yield (
            "in conflict: rename our version: --restore ID --to PATH, or mv it over the name; "
            "remove it, theirs stays: --delete ID… --yes"
        )
    if False in copies:
        yield "in conflict without a copy: make the change again, or take it off the list: --delete ID… --yes"


def _name_of(row: Row) -> str:
    return str(row["path"] or "(name not known)")


def _message_of(row: Row) -> str:
    """Return why a thing is on the list, and where its bytes are."""
    if row["kind"] == "conflict":
        ours = f"ours is {row['kept_as']}" if row["kept_as"] else "our change was given up"
        settled = ", and ours was written again since" if row["settled"] else ""
        return f"another client changed it first{settled}; {ours}"
    return "; ".join(filter(None, (row["message"], row["local_path"] or "its bytes are gone")))


def _tell(text: str) -> None:
    sys.stdout.write(text + "\n")
