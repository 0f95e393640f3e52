"""Formats numbers and lines for people."""

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

_NO_OBJECTS = " has no objects yet: is the prefix right?"
_COMMAND_OF_A_MOUNT = re.compile(r"`fusecache (?:recover|status|sync|unmount)(?=`| --)")


def printable(text: str) -> str:
    r"""Return text with every control, format and other invisible character escaped, as \x1b or \u202e; one line.

    Writers of the bucket choose its keys. Raw, these could forge lines or drive a terminal.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def at_mount(text: str, mountpoint: object, *, in_json: bool = False) -> str:
    """Return a text with the mountpoint in each command that it names, so that it runs anywhere on the node."""
    place = shlex.quote(str(mountpoint))
    place = json.dumps(place)[1:-1] if in_json else place
    return _COMMAND_OF_A_MOUNT.sub(lambda found: f"{found[0]} {place}", text)


def size_text(count: float) -> str:
    """Return a size for people: 512 B, 3.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def usable_bytes(cache: Mapping[str, Any]) -> int:
    """Return what the cache of a status can really use: its size, or less if the disk has no space for that."""
    return int(cache.get("usable_bytes", cache["limit_bytes"]))


def short_text(cache: Mapping[str, Any]) -> str:
    """Return what a full disk takes from the cache of a status; "" if it takes nothing."""
    if usable_bytes(cache) >= cache["limit_bytes"]:
        return ""
    return f"; its disk has no space for the {size_text(cache['limit_bytes'])} of cache_size"


def count_text(count: int, noun: str) -> str:
    """Return `1 file`, `3 files`, `12 345 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}".replace(",", " ")


def seconds_text(seconds: float) -> str:
    """Return a duration in the unit that suits it: 120 µs, 41 ms, 3.2 s, 5 min, 2 h 5 min, 3 d 2 h."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 24 else f"{hours // 24} d {hours % 24} h"


def changes_text(changes: int, contents: int | None, nbytes: int) -> str:
    """Return `3 changes, 1.2 GiB`; `2 changes of names` if no content is among them. contents: None if unknown."""
    if changes and contents == 0:
        return f"{count_text(changes, 'change')} of names"
    return f"{count_text(changes, 'change')}, {size_text(nbytes)}"


def left_text(seconds: float | None) -> str:
    """Return `, about 5 min left`; "" if unknown, or less than a second."""
    return f", about {seconds_text(seconds)} left" if seconds is not None and seconds >= 1 else ""


def nearest_text(word: str, known: Iterable[str]) -> str:
    """Return `: did you mean 'status'?` for a misspelt word, "" if no known word is similar."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f": did you mean {found[0]!r}?" if found else ""


def empty_text(source: str, *, is_empty: bool) -> str:
    """Return what to ask the user if a prefix has no object; "" for a whole bucket, which may be new."""
    if not is_empty or "/" not in source.partition("://")[2].rstrip("/"):
        return ""
    return f"{source.rstrip('/')}/{_NO_OBJECTS}"


def split_questions(message: str) -> tuple[str, str]:
    """Return a daemon's message for the user without the texts of `empty_text`, and those."""
    texts = message.split("; ")
    questions = [each for each in texts if each.endswith(_NO_OBJECTS)]
    return "; ".join(each for each in texts if each not in questions), "; ".join(questions)
