"""The simulation of nodes that fill from each other, of few nodes and bytes."""

import pytest

from benchmarks.cluster_simulation import EPOCHS, LINK_BYTES_PER_SECOND, Load, epochs
from fusecache.policy.cache.granules import CHUNK_BYTES

NODES = tuple(f"10.0.0.{number}:9470" for number in range(1, 9))
CHUNKS = 200


def test_each_group_of_a_model_leaves_the_bucket_once() -> None:
    done = Load(NODES, CHUNKS).run()
    assert done.links.bucket_bytes == CHUNKS * CHUNK_BYTES
    # Each node gets from others what it does not own.
    assert sum(done.links.sent.values()) == (len(NODES) - 1) * CHUNKS * CHUNK_BYTES
    assert done.seconds > CHUNKS * CHUNK_BYTES * 7 / 8 / LINK_BYTES_PER_SECOND


def test_nodes_that_die_cost_few_groups_more() -> None:
    calm = Load(NODES, CHUNKS).run()
    done = Load(NODES, CHUNKS, failing={NODES[0]: calm.seconds / 2}).run()
    assert CHUNKS <= done.links.bucket_bytes / CHUNK_BYTES < 1.5 * CHUNKS
    assert done.links.sent[NODES[0]] < calm.links.sent[NODES[0]]


@pytest.mark.parametrize("by_plan", [False, True])
def test_data_set_that_fits_all_caches_together_is_fetched_once(*, by_plan: bool) -> None:
    rows = list(epochs(NODES, CHUNKS, 2 * CHUNKS // len(NODES), by_plan=by_plan))
    fetched = [links.bucket_bytes / CHUNK_BYTES for links, _ in rows]
    assert fetched[0] == CHUNKS
    assert sum(fetched[1:]) <= 0.1 * CHUNKS * EPOCHS  # uneven shares
    lan = [sum(links.sent.values()) / CHUNK_BYTES for links, _ in rows]
    # A plan saves the first way, from the owner, alone.
    assert (lan[0] == 0) == by_plan
    assert all(0.7 * CHUNKS < each <= CHUNKS for each in lan[1:])


def test_caches_that_lack_room_fetch_again() -> None:
    rows = list(epochs(NODES, CHUNKS, CHUNKS // 2 // len(NODES)))
    assert all(links.bucket_bytes > 0.3 * CHUNKS * CHUNK_BYTES for links, _ in rows)


def test_nodes_that_lose_their_caches_fetch_again() -> None:
    kept, lost = (
        sum(links.bucket_bytes for links, _ in epochs(NODES, CHUNKS, CHUNKS, failing=failing))
        for failing in (0, 1)
    )
    assert kept == CHUNKS * CHUNK_BYTES < lost
