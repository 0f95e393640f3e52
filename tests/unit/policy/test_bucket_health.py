"""How a bucket answers, in one word, and since when."""

from fusecache.model.errors import AccessDenied, ObjectMissing, Unavailable
from fusecache.policy.bucket_health import BucketHealth, BucketState

DENIED = AccessDenied("403")


def test_the_state_is_the_gravest_that_lasts() -> None:
    now = [100.0]
    health = BucketHealth(lambda: now[0])
    assert health.state is BucketState.ANSWERING
    health.writes_held = "a check of the start failed"
    assert health.state is BucketState.HELD
    health.on_silence(5.0)
    now[0] += 10
    health.on_silence()
    assert (health.state, health.silent_seconds) == (BucketState.SILENT, 15.0)
    health.on_refused(DENIED)
    now[0] += 3
    assert (health.state, health.refused_seconds(has_writes=False)) == (BucketState.REFUSED, 3.0)
    assert health.refusal is DENIED
    health.on_answer()
    assert (health.state, health.silent_seconds, health.refusal) == (BucketState.HELD, 0.0, None)
    health.writes_held = ""
    assert health.state is BucketState.ANSWERING


def test_writes_that_are_refused_count_only_while_there_are_writes() -> None:
    now = [0.0]
    health = BucketHealth(lambda: now[0])
    health.on_write(DENIED)
    now[0] += 90
    health.on_write(Unavailable("503"))  # says nothing about the keys
    health.on_answer()  # of reads
    assert health.state is BucketState.REFUSED
    assert health.refused_seconds(has_writes=True) == 90
    assert health.refused_seconds(has_writes=False) == 0
    health.on_write(ObjectMissing("404"))  # with other keys this would be a 403
    assert health.state is BucketState.ANSWERING
