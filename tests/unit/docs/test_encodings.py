"""The table of encodings in docs/datasets.md is that of `convert --help`, and names every encoding."""

import re

from loader.mds.encodings import MEANINGS, NAMES, SCALARS
from tests.support import ROOT


def test_the_page_has_the_table_of_the_help() -> None:
    page = (ROOT / "docs/datasets.md").read_text()
    for name, text in MEANINGS.items():
        assert f"| `{name}` | {text} |\n" in page


def test_every_encoding_has_a_meaning() -> None:
    named = set(re.findall(r"[\w\[\]]+", " ".join(MEANINGS)))
    assert set(NAMES) - named == {*SCALARS, "jpegarray"} - named  # a range of numbers, and another spelling
