"""Each claim of docs/security.md names a test that exists."""

import re

import pytest

from tests.support import ROOT

TESTS = re.findall(r"`(tests/\S+\.py)::(\w+)`", (ROOT / "docs" / "security.md").read_text())


@pytest.mark.parametrize(("file", "name"), TESTS)
def test_claim_names_an_existing_test(file: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_every_claim_has_a_test() -> None:
    rows = re.findall(r"^\| .+ \| `tests/.+ \|$", (ROOT / "docs" / "security.md").read_text(), re.MULTILINE)
    assert len(rows) == len(TESTS) > 0
