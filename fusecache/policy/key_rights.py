"""What a key should be able to do in a bucket, and how that differs from what it can do. Pure."""

import enum
from collections.abc import Mapping

LIST, GET, PUT, DELETE, MULTIPART, CONDITIONAL = RIGHTS = (
    "list",
    "get",
    "put",
    "delete",
    "multipart",
    "conditional",
)
# What a key can do by right; None: unknown, as the bucket did not answer.
Rights = Mapping[str, bool | None]


class KeyRole(enum.Enum):
    """What a key is for."""

    READ = "read"
    WRITE = "write"
    BOTH = "read and write"


def expected_rights(role: KeyRole, *, is_own: bool) -> dict[str, bool | None]:
    """Return what a key should be able to do; None: either way. is_own: in a bucket that it is for."""
    if not is_own:
        return dict.fromkeys(RIGHTS, False)
    if role is KeyRole.READ:
        return {right: right in (LIST, GET) for right in RIGHTS}
    # The daemon lists with the key for reading, but looks with the key for writing at what it is about to replace.
    return {right: None if right == LIST and role is KeyRole.WRITE else True for right in RIGHTS}


def wrong_rights(can: Rights, should: Rights) -> list[str]:
    """Return the rights that a key has and should not have, or lacks."""
    return [
        right for right in RIGHTS if None not in (can[right], should[right]) and can[right] != should[right]
    ]


def unknown_rights(can: Rights, should: Rights) -> list[str]:
    """Return the rights that matter and are not known."""
    return [right for right in RIGHTS if can[right] is None and should[right] is not None]
