"""What the recipes' tests found, as the table that docs/how-to/recipes.md shows."""

import subprocess
from dataclasses import astuple, dataclass

from tests.recipes.runs import VENVS

HEADER = (
    "trainer",
    "version",
    "ranks",
    "killed",
    "resumed on another mount",
    "losses equal",
    "objects equal",
)


@dataclass(frozen=True)
class Row:
    """One story of one trainer. losses, objects: how many were compared, and were equal."""

    trainer: str
    version: str
    ranks: int
    killed: str
    resumed: str
    losses: str
    objects: str


ROWS: list[Row] = []


def version(recipe: str, package: str) -> str:
    """Return the version of a package in a recipe's virtual environment."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run(
        [VENVS / recipe / "bin" / "python", "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


def render(rows: list[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [HEADER, ("---",) * len(HEADER), *map(astuple, rows)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
