"""Which keys no path can name: found in one pass over the bucket's order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.model.names import unusable_name
from fusecache.policy.name_patterns import UnusableKeys


def unusable(keys: list[str]) -> dict[str, str]:
    """Return what a pass over a bucket of these keys finds."""
    finder = UnusableKeys()
    found = [pair for key in sorted(keys, key=str.encode) for pair in finder.see(key)]
    assert len(dict(found)) == len(found), "each key is named once"
    return dict(found)


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("a//b", "empty part"),
        ("/a", "empty part"),
        ("a//", "empty part"),
        ("a/../b", "not usable as names"),
        ("./a", "not usable as names"),
        ("x" * 256, "longer than 255"),
        (".fusecache/socket", "daemon's"),
        (".fusecache", "daemon's"),
    ],
)
def test_a_key_that_no_path_can_name_is_found_with_the_reason(key: str, why: str) -> None:
    found = unusable([key, "good", "good too/deep"])
    assert list(found) == [key]
    assert why in found[key]


def test_usual_keys_markers_and_the_prefixs_own_marker_are_fine() -> None:
    assert (
        unusable(
            [
                "",
                "a",
                "a-b",
                "dir/",
                "dir/file",
                "dir/.fusecache",
                "é",
                "e\N{COMBINING ACUTE ACCENT}",
                "x" * 255,
            ]
        )
        == {}
    )


def test_a_key_that_is_also_a_prefix_is_hidden_by_its_directory() -> None:
    found = unusable(["a", "a-b", "a.txt", "a/x", "a/x/y", "b", "b/"])
    assert set(found) == {"a", "a/x", "b"}
    assert all("directory" in why for why in found.values())


@given(st.sets(st.text("ab-/.", min_size=1, max_size=6), max_size=20))
def test_one_pass_finds_what_looking_at_all_keys_finds(keys: set[str]) -> None:
    def is_bad(key: str) -> bool:
        return any(unusable_name(part) for part in key.removesuffix("/").split("/"))

    hidden = {
        key
        for key in keys
        if not is_bad(key) and not key.endswith("/") and any(each.startswith(key + "/") for each in keys)
    }
    assert set(unusable(list(keys))) == {key for key in keys if is_bad(key)} | hidden


def test_the_content_of_a_directory_marker_is_found() -> None:
    finder = UnusableKeys()
    assert finder.see("empty/", 0) == []
    assert finder.see("full/", 7) == [("full/", "it is a directory, whose content no path shows")]
    assert finder.see("full/file", 7) == []
