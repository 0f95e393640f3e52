"""torchtitan's data loader interface: its checkpoint holds the loader's state, and continues the run elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.serving.test_grain import GLOBAL_BATCH, write_numbers
from tests.support.mounts import Mount


def test_a_checkpoint_of_torchtitan_continues_on_another_number_of_ranks(
    mount: Callable[..., Mount], job: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    one = mount()
    write_numbers(one.path / "data")

    def steps(ranks: int, first: int, count: int) -> list[set[int]]:
        """Return the first tokens of each step over all ranks. first: the checkpoint's step, 0 without one."""
        words = [ranks, GLOBAL_BATCH, one.path / "data", one.path / "saved", first, count]
        found = job("tests.serving.titan_ranks", *words)
        return [set(batch) for batch in found["batches"]]

    whole = steps(1, 0, 20)
    assert [len(batch) for batch in whole] == [GLOBAL_BATCH] * 20
    assert steps(2, 0, 7) == whole[:7]
    assert steps(4, 7, 13) == whole[7:]
