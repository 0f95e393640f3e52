"""docs/order.md: its picture is what the orders draw, and its code runs."""

import re
import runpy
from pathlib import Path

import numpy as np

from loader import MDSWriter
from tests.support import ROOT

DOCS = ROOT / "docs"


def test_the_picture_is_drawn_from_the_orders_as_they_are() -> None:
    figure = runpy.run_path(str(DOCS / "order_figure.py"))["figure"]
    assert (DOCS / "order.svg").read_text() == figure()


def test_the_settings_shown_are_ones_that_work(tmp_path: Path) -> None:
    with MDSWriter(tmp_path / "train", {"x": "ndarray:int32:4"}, size_limit=4096) as writer:
        for number in range(1200):
            writer.write({"x": np.full(4, number, np.int32)})
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "order.md").read_text(), re.DOTALL)
    found: dict[str, object] = {}
    exec(code.replace('"data', f'"{tmp_path}').replace("/local", str(tmp_path)), found)
    assert len(next(iter(found["sampler"]))) == 512  # type: ignore[call-overload]
