"""User-facing text for publish errors: a one-word code, and the remedy."""

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
