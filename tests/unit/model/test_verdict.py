"""The verdict on a mount of several buckets: each reason names its bucket."""

from typing import Any

from fusecache.model.verdict import ACTION, DEGRADED, OK, judge


def bucket(name: str, **facts: Any) -> dict[str, Any]:
    """Return the row of a bucket, well but for `facts`."""
    well = {"state": "ok", "refused_seconds": 0, "unanswered_seconds": 0}
    return {"bucket": name, **well, "waiting_for": "", "waiting_code": "", **facts}


def test_buckets_that_are_well_give_no_reason() -> None:
    assert judge({"buckets": [bucket("a"), bucket("b")]}, {}) == {"verdict": OK, "reasons": []}


def test_a_silent_bucket_is_named_once() -> None:
    ill = bucket("b", unanswered_seconds=70, waiting_for="no answer", oldest_pending_seconds=60)
    found = judge(
        {"buckets": [bucket("a"), ill], "waiting_for": "no answer", "oldest_pending_seconds": 60}, {}
    )
    assert found["verdict"] == DEGRADED
    assert [reason.partition(" for ")[0] for reason in found["reasons"]] == [
        "bucket b: the bucket has not answered"
    ]


def test_refused_keys_of_one_bucket_need_a_person() -> None:
    ill = bucket("b", state="auth-failed", refused_seconds=100, keys_from="environment (B_…)")
    found = judge({"buckets": [bucket("a"), ill]}, {})
    assert found["verdict"] == ACTION
    (reason,) = found["reasons"]
    assert reason.startswith("bucket b: the bucket has refused the keys for ")
    assert "environment (B_…)" in reason
