"""Every case has a test, and `docs/cases.md` names it: read from the markers `case(…)` in the sources of the tests.

From the sources, so that it holds whichever tests a run selects; what is marked is a test that pytest collects.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "cases.md"
CASES = range(1, 56)

_CASE = re.compile(r"\*\*(\d+)\.\*\* ")
_TEST = re.compile(r"\* `(\S+\.py)`: `(test_\w+)`")


def marked_cases(test: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Yield the numbers in a test's decorators `@pytest.mark.case(…)`."""
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.case":
            assert decorator.args, f"{test.name}: a case without a number"
            for argument in decorator.args:
                yield ast.literal_eval(argument)


def marked_tests() -> dict[int, set[tuple[str, str]]]:
    """Return case -> (file below `tests`, name) of the tests that are marked with it."""
    found: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for number in marked_cases(node):
                is_collected = path.name.startswith("test_") and node.name.startswith("test_")
                assert is_collected, f"{path}: {node.name} is no test that pytest collects"
                found[number].add((path.relative_to(TESTS).as_posix(), node.name))
    return found


def listed_tests() -> dict[int, set[tuple[str, str]]]:
    """Return case -> (file below `tests`, name) of the tests that the page names for it."""
    found: dict[int, set[tuple[str, str]]] = {}
    number = 0
    for line in PAGE.read_text().splitlines():
        if case := _CASE.match(line):
            number = int(case[1])
            assert number not in found, f"case {number} stands twice in {PAGE}"
            found[number] = set()
        elif test := _TEST.match(line):
            found[number].add((test[1], test[2]))
    return found


def test_every_case_has_a_test() -> None:
    marked = marked_tests()
    assert [number for number in CASES if not marked[number]] == []
    assert set(marked) <= set(CASES)


def test_the_page_names_every_case_with_exactly_the_tests_that_are_marked() -> None:
    marked, listed = marked_tests(), listed_tests()
    assert list(listed) == list(CASES)
    differences = {
        number: (sorted(marked[number] - listed[number]), sorted(listed[number] - marked[number]))
        for number in CASES
        if marked[number] != listed[number]
    }
    assert differences == {}  # case: (marked and not on the page, on the page and not marked)
