"""What `fusecache status` says of hints."""

from fusecache.cli.status import status_view

JOB = {
    "job": "llama-0",
    "step": 120,
    "seconds_a_step": 0.25,
    "windows": [3],
    "extents": 10,
    "planned_steps": 900,
    "horizon_steps": 40,
    "horizon_bytes": 3 << 20,
    "lead_seconds": 10.0,
    "fetched_bytes": 5 << 20,
    "hit_bytes": 3 << 20,
    "missed_bytes": 1 << 20,
    "late": 2,
    "skipped": 1,
    "silent_seconds": 0.1,
}


def shown(hints: dict) -> list[str]:
    """The lines about hints."""
    lines = status_view({"hints": hints}).splitlines()
    begin = next((place for place, line in enumerate(lines) if line.startswith("hints")), len(lines))
    return [line.removeprefix("hints").strip() for line in lines[begin:]]


def test_each_job_has_its_horizon_and_what_came_of_it() -> None:
    assert shown({"jobs": [JOB]}) == [
        "llama-0: step 120, 250 ms per step; 40 steps ahead (10.0 s, 3.0 MiB) of 900 planned steps",
        "75.0% of 4.0 MiB read were cached, 2 arrived late, 1 skipped",
    ]


def test_a_job_that_has_ended_or_is_silent_is_not_shown_as_one_that_runs() -> None:
    ended = {**JOB, "silent_seconds": 95.0, "ended_seconds": 50.0}
    assert shown({"jobs": [ended]}) == [
        "llama-0: its process exited 50.0 s ago, at step 120; prefetch stops until it starts again"
    ]
    assert shown({"jobs": [{**ended, "ended_seconds": 61.0}]}) == []
    assert "no message for 1 min" in shown({"jobs": [{**ended, "ended_seconds": 0.0}]})[1]


def test_what_is_not_so_says_nothing() -> None:
    assert shown({"jobs": []}) == []
    assert shown({}) == []
    new = {**JOB, "seconds_a_step": 0.0, "hit_bytes": 0, "missed_bytes": 0, "late": 0, "skipped": 0}
    assert shown({"jobs": [new] * 7}) == [
        *["llama-0: step 120; 40 steps ahead (10.0 s, 3.0 MiB) of 900 planned steps"] * 5,
        "and 2 jobs more",
    ]
