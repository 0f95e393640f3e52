"""What a key should be able to do, and the differences."""

import pytest

from fusecache.policy.key_rights import RIGHTS, KeyRole, expected_rights, unknown_rights, wrong_rights


@pytest.mark.parametrize("role", KeyRole)
def test_key_of_another_bucket_may_nothing(role: KeyRole) -> None:
    should = expected_rights(role, is_own=False)
    assert wrong_rights(dict.fromkeys(RIGHTS, False), should) == []
    assert wrong_rights(dict.fromkeys(RIGHTS, True), should) == list(RIGHTS)


def test_read_key_should_read_only() -> None:
    should = expected_rights(KeyRole.READ, is_own=True)
    assert [right for right in RIGHTS if should[right]] == ["list", "get"]
    assert wrong_rights(dict.fromkeys(RIGHTS, True), should) == ["put", "delete", "multipart", "conditional"]


def test_write_key_need_not_list() -> None:
    should = expected_rights(KeyRole.WRITE, is_own=True)
    for lists in (True, False, None):
        can = {**dict.fromkeys(RIGHTS, True), "list": lists}
        assert (wrong_rights(can, should), unknown_rights(can, should)) == ([], [])


def test_unknown_is_neither_right_nor_wrong() -> None:
    should = expected_rights(KeyRole.BOTH, is_own=True)
    can = dict.fromkeys(RIGHTS)
    assert (wrong_rights(can, should), unknown_rights(can, should)) == ([], list(RIGHTS))
