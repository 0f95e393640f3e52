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

_RENEW = "renew the key where the daemon reads it from: it is read again every 30 s"
_AGAIN = "write the file again; `fusecache recover` lists what is left of it"
_REMOUNT = "see to the cache's disk, then mount again: nothing that was closed is lost"

# The first that fits counts.
_CAUSES: tuple[tuple[type[FusecacheError], str, str], ...] = (
    (AccessDenied, "auth-failed", _RENEW),
    (CredentialsMissing, "auth-failed", _RENEW),
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


def way_out(error: Exception) -> str:
    """Return what somebody can do about an error; "": nothing is known."""
    return next((words for kind, _, words in _CAUSES if isinstance(error, kind)), "")
