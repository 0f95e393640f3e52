"""The verdict on a mount: what is wrong with its bucket gives one reason."""

from typing import Any

from fusecache.model.verdict import ACTION, DEGRADED, OK, judge


def status(**facts: Any) -> dict[str, Any]:
    """Return a status in which all is well but for `facts`."""
    well = {"state": "ok", "refused_seconds": 0, "unanswered_seconds": 0}
    return {**well, "waiting_for": "", "waiting_code": "", **facts}


def test_a_bucket_that_is_well_gives_no_reason() -> None:
    assert judge(status(), {}) == {"verdict": OK, "reasons": []}


def test_a_silent_bucket_is_named_once() -> None:
    found = judge(status(unanswered_seconds=70, waiting_for="no answer", oldest_pending_seconds=60), {})
    assert found["verdict"] == DEGRADED
    assert [reason.partition(" for ")[0] for reason in found["reasons"]] == ["the bucket has not answered"]


def test_refused_keys_need_a_person() -> None:
    found = judge(status(state="auth-failed", refused_seconds=100, keys_from="environment (B_…)"), {})
    assert found["verdict"] == ACTION
    (reason,) = found["reasons"]
    assert reason.startswith("the bucket has refused the keys for ")
    assert "environment (B_…)" in reason
