"""Which symlinks are followed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.policy.name_patterns import SymlinkRule, is_followed

_PARTS = ("a", "b", "..", ".", "")
_MOST_LINKS = 40
Directory = tuple[str, ...]


@pytest.mark.parametrize(
    ("target", "depth", "follows"),
    [
        ("ep1.pt", 0, True),
        ("./run//ep1.pt", 0, True),
        ("run/.", 0, True),
        ("..", 0, False),
        ("..", 1, True),
        ("../../blobs/0a", 2, True),
        ("../../blobs/0a", 1, False),
        ("./.././../x", 1, False),
        ("a/../b", 3, False),
        ("..a/...", 0, True),
        ("/", 5, False),
        ("/data/x", 5, False),
        ("//x", 5, False),
    ],
)
def test_inside_follows_relative_targets_only(target: str, depth: int, *, follows: bool) -> None:
    assert is_followed(SymlinkRule.INSIDE, target, depth=depth) is follows
    assert is_followed(SymlinkRule.ALL, target, depth=depth)
    assert not is_followed(SymlinkRule.NONE, target, depth=depth)


def leaves(target: str, at: Directory, links: dict[Directory, str]) -> bool:
    """Return whether the kernel's walk of a target goes above the root. at: where it starts. All names exist."""
    left = target.split("/")[::-1]
    followed = 0
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not at:
                return True
            at = at[:-1]
        elif (*at, part) in links and followed < _MOST_LINKS:
            followed += 1
            left += links[(*at, part)].split("/")[::-1]
        else:
            at = (*at, part)
    return False


@given(
    st.dictionaries(
        st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(tuple),
        st.lists(st.sampled_from(_PARTS), min_size=1, max_size=5).map("/".join),
        max_size=8,
    )
)
def test_chains_of_inside_links_never_leave(links: dict[Directory, str]) -> None:
    followed = {
        place: target
        for place, target in links.items()
        if target and is_followed(SymlinkRule.INSIDE, target, depth=len(place) - 1)
    }
    assert not [place for place, target in followed.items() if leaves(target, place[:-1], followed)]
