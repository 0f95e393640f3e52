"""Errors of publishing as a person needs them: one word, and what to do about it."""

from fusecache.model.errors import (
    AccessDenied,
    BucketMissing,
    CredentialsMissing,
    Damaged,
    FusecacheError,
    LocalDiskError,
    NoSpace,
    ObjectChanged,
    ReadOnly,
    Refused,
    StateError,
    Throttled,
    TooLarge,
    Unavailable,
)

_OF_KEYS = (AccessDenied, CredentialsMissing)
_AGAIN = "write the file again; `fusecache recover` lists what is left of it"
_REMOUNT = "see to the cache's disk, then mount again: nothing that was closed is lost"

# The first that fits counts.
_CAUSES: tuple[tuple[type[FusecacheError], str, str], ...] = (
    (AccessDenied, "auth-failed", ""),
    (CredentialsMissing, "auth-failed", ""),
    (BucketMissing, "bucket-missing", "make the bucket again: uploads wait for it"),
    (Throttled, "unavailable", "nothing to do: it is asked less often, and goes on by itself"),
    (Unavailable, "unavailable", "nothing to do if the bucket comes back: it is asked again for ever"),
    (ObjectChanged, "conflict", "compare both versions; `fusecache recover` names ours"),
    (TooLarge, "too-large", "cut the file in pieces"),
    (
        Refused,
        "refused",
        "see what the bucket forbids, then `fusecache recover --restore ID` tries again; or remove the file",
    ),
    (NoSpace, "no-space", _REMOUNT),
    (StateError, "stopped", _REMOUNT),
    (ReadOnly, "stopped", _REMOUNT),
    (LocalDiskError, "local-disk", _AGAIN),
    (Damaged, "damaged", _AGAIN),
)
# A person must act: waiting alone mends none of these.
PERSONS = frozenset(code for _, code, _ in _CAUSES) - {"unavailable", "conflict"}


def code_of(error: Exception) -> str:
    """Return the word for an error."""
    return next((code for kind, code, _ in _CAUSES if isinstance(error, kind)), "failed")


def remedy(error: Exception, keys_from: str = "") -> str:
    """Return what somebody can do about an error; "": nothing is known. keys_from: see `renewal_text`."""
    if isinstance(error, _OF_KEYS):
        return renewal_text(keys_from)
    return next((words for kind, _, words in _CAUSES if isinstance(error, kind)), "")


def renewal_text(keys_from: str) -> str:
    """Return how keys that are refused are renewed.

    keys_from: where they are read from: `environment`, the path of a file, "" for something else.
    """
    if keys_from == "environment":
        return (
            "the keys are those of the daemon's environment: `fusecache unmount --force`, and mount with others, "
            "which uploads what waits"
        )
    place = f"in {keys_from}" if keys_from else "where the daemon reads them"
    return f"renew the keys {place}: it reads them again every 30 s"
