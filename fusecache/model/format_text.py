"""Formats numbers and lines for people.

User-facing text for publish errors: a one-word code, and the remedy.
"""

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    Damaged,
    FusecacheError,
    InternalError,
    LocalDiskError,
    NoSpace,
    ObjectArchived,
    ObjectChanged,
    ReadOnly,
    Refused,
    StateError,
    Throttled,
    TooLarge,
    Unavailable,
)

_CREDENTIAL_ERRORS = (AccessDenied, CredentialsMissing)
_WRITE_AGAIN = "write the file again; `fusecache recover` lists what is left of it"
_MEND = "free or repair the cache disk; uploads then go on, and closed files are not lost"

# The first matching class counts.
_CAUSES: tuple[tuple[type[FusecacheError], str, str], ...] = (
    (AccessDenied, "auth-failed", ""),
    (CredentialsMissing, "auth-failed", ""),
    (BucketMissing, "bucket-missing", "create the bucket again; uploads wait for it"),
    (
        Throttled,
        "unavailable",
        "no action needed: the bucket throttles, requests are slowed down and retried",
    ),
    (
        Unavailable,
        "unavailable",
        "no action needed if the bucket comes back: requests are retried until it answers",
    ),
    (ObjectChanged, "conflict", "compare both versions; `fusecache recover` lists the local one"),
    (
        ObjectArchived,
        "archived",
        "restore the object from its archive: the change is repeated by itself, or at once with "
        "`fusecache recover --restore ID`",
    ),
    (TooLarge, "too-large", "split the file"),
    (
        Refused,
        "refused",
        "allow what the bucket forbids, then retry with `fusecache recover --restore ID`; or remove the file",
    ),
    (NoSpace, "no-space", _MEND),
    (StateError, "stopped", _MEND),
    (ReadOnly, "stopped", _MEND),
    (LocalDiskError, "local-disk", _WRITE_AGAIN),
    (Damaged, "damaged", _WRITE_AGAIN),
    (
        InternalError,
        "internal",
        "report the traceback in the daemon's log; retry with `fusecache recover --restore ID`",
    ),
)
# Codes that need an operator: waiting alone fixes none of these.
PERSONS = frozenset(code for _, code, _ in _CAUSES) - {"unavailable", "conflict", "internal"}


def code_of(error: Exception) -> str:
    """Return the one-word code of an error."""
    return next((code for kind, code, _ in _CAUSES if isinstance(error, kind)), "failed")


def remedy(error: Exception, keys_from: str = "") -> str:
    """Return what the operator can do about an error; "" if nothing is known. keys_from: see `renewal_text`."""
    if isinstance(error, _CREDENTIAL_ERRORS):
        return renewal_text(keys_from)
    return next((text for kind, _, text in _CAUSES if isinstance(error, kind)), "")


def renewal_text(keys_from: str) -> str:
    """Return how to renew rejected credentials.

    keys_from: where the keys are read from: `environment`, the path of a file, "" for another source.
    """
    if keys_from.startswith("environment"):
        return (
            f"the keys come from the daemon's {keys_from}: run `fusecache unmount --force`, then mount with new keys, "
            "which uploads the pending files"
        ) + ("; with `credentials_file` keys are renewed without that" if keys_from == "environment" else "")
    place = f"in {keys_from}" if keys_from else "where the daemon reads them"
    return f"renew the keys {place}; the daemon reads them again every 30 s"


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


def short_text(status: Mapping[str, Any]) -> str:
    """Return what a full disk takes from the cache of a status; "" if it takes nothing."""
    size = status.get("options", {}).get("cache_size", 0)
    if "cache" not in status or status["cache"]["limit_bytes"] >= size:
        return ""
    return f"; its disk has no space for the {size_text(size)} of cache_size"


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
