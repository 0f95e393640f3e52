"""What `status` says of the cost of requests."""

from pathlib import Path

import pytest
import trio

from fusecache.engine.durability.recent_rates import COST_WINDOW_SECONDS
from fusecache.model.prices import R2_PRICES
from tests.support.node import Bucket, running_node

DAY_SECONDS = 86_400


async def test_daily_cost_follows_the_last_minutes(bucket: Bucket, cache: Path) -> None:
    """A job that polls a name twice a second, then ends."""
    async with running_node(bucket, cache, prices=R2_PRICES) as user:
        await user.mkdir("run")
        await user.write("run/log", b"1")
        assert await user.drained() == "durable"
        start = user.fs.statistics()["requests"]["lists"]
        for _ in range(2 * 1000):
            await user.fs.resolve("run/log")
            await trio.sleep(0.5)
        polled = user.fs.statistics()["costs"]
        steady = (user.fs.statistics()["requests"]["lists"] - start) / 1000 * DAY_SECONDS
        assert steady > 0
        assert polled["class_a_per_day"] == pytest.approx(steady, rel=0.05)
        assert polled["dollars_per_day"] == pytest.approx(steady * 4.5e-6, rel=0.05)
        by_kind = polled["dollars_per_day_by_kind"]
        assert by_kind == {"lists": polled["dollars_per_day"], "writes": 0, "heads": 0, "gets": 0}
        assert polled["rate_seconds"] == pytest.approx(COST_WINDOW_SECONDS, abs=5)
        await trio.sleep(COST_WINDOW_SECONDS + 10)
        assert user.fs.statistics()["costs"]["dollars_per_day"] == 0
        assert user.fs.statistics()["costs"]["dollars"] >= polled["dollars"] > 0
