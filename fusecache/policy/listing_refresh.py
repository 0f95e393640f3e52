"""When a directory is listed: instead of probes for single names, and ahead of lookups. Pure."""

from math import exp

# A directory without a listing is listed from the third name on; the first two are probed.
PROBES_UNLISTED = 2
# A directory counts as in use for this long after the last lookup in it.
IN_USE_SECONDS = 3.0
# Upper limit for refreshing one page ahead of lookups: each LIST costs money.
LISTS_PER_SECOND = 1.3
# Allowance for scheduling delays on a busy node.
_LATE_SECONDS = 0.05
# Refreshing a page of a large directory costs as much CPU as this many probes (about 10 ms). So this many lookups in
# `IN_USE_SECONDS` justify one.
HEAT_OF_A_PAGE = 8.0
# If lookups wait for this share of the time, a directory visited only every WAITING_SECONDS counts as in use. Otherwise
# a program that cycles through thirty directories, waiting for a listing of each, would never get one ahead of time.
WAITING_SHARE = 0.3
WAITING_SECONDS = 6.0
# A long listing that only lookups need is followed by a pause of this many times its own duration.
LISTING_REST = 10


def is_listing_cheaper(probes: int, pages: int, seconds: float, idle_seconds: float) -> bool:
    """Return whether to list a directory, rather than probe the one name that is looked up.

    probes: other names probed since the last listing began. pages, seconds: size and duration of that listing (0 pages:
    there was none). idle_seconds: time since it ended. A one-page listing costs as much as a probe. A longer one pays
    off once as many probes were sent as it has pages, but may only take a small share of the time.
    """
    if pages == 0:
        return probes >= PROBES_UNLISTED
    return pages == 1 or (probes >= pages and idle_seconds >= seconds * LISTING_REST)


def relist_after_seconds(fresh_seconds: float, list_seconds: float) -> float:
    """Return the age at which a listing is refreshed ahead of lookups; inf: a refresh does not pay off.

    list_seconds: the duration of a refresh. Half as much is added, so that the new listing arrives in time.
    """
    seconds = max(fresh_seconds - 1.5 * list_seconds - _LATE_SECONDS, 1 / LISTS_PER_SECOND)
    return seconds if seconds < fresh_seconds else float("inf")


def decayed_heat(heat: float, seconds: float) -> float:
    """Return what is left of a count of lookups, or of a sum of waits, after some time."""
    return heat * exp(-seconds / IN_USE_SECONDS)


def is_in_use(idle_seconds: float, fresh_seconds: float, waiting_share: float) -> bool:
    """Return whether lookups are frequent enough to list a directory ahead of the next one.

    They are if each listing answers at least one lookup, or if lookups are rare only because each waits for a listing.
    waiting_share: the share of the last seconds in which callers waited for names.
    """
    if idle_seconds <= fresh_seconds:
        return True
    return idle_seconds <= WAITING_SECONDS and waiting_share >= WAITING_SHARE
