"""Which node keeps a group: all agree, shares are even, and a change of the list moves little."""

from collections import Counter

from fusecache.policy.peer_choice import choose_owner

NODES = tuple(f"10.0.0.{number}:9470" for number in range(1, 9))
GROUPS = [(f"shard-{number // 8}", "etag", number % 8) for number in range(4000)]


def test_order_of_the_list_does_not_matter() -> None:
    for each in GROUPS[:50]:
        assert choose_owner(NODES, *each) == choose_owner(NODES[::-1], *each)


def test_shares_are_even() -> None:
    shares = Counter(choose_owner(NODES, *each) for each in GROUPS)
    assert set(shares) == set(NODES)
    assert max(shares.values()) < 1.25 * len(GROUPS) / len(NODES)


def test_node_that_leaves_moves_only_its_own_groups() -> None:
    left = NODES[:-1]
    for each in GROUPS:
        before = choose_owner(NODES, *each)
        assert before == NODES[-1] or choose_owner(left, *each) == before


def test_new_version_is_another_object() -> None:
    owners = {choose_owner(NODES, "shard", f"etag-{number}", 0) for number in range(100)}
    assert owners == set(NODES)
