"""What was measured: one row a round, case and competitor, and the medians over the rounds. No I/O."""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: figures by name, or why there are none; limit_seconds: it took longer than that."""

    round: int
    case: str
    competitor: str
    figures: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    limit_seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it for the JSON file."""
        row: dict[str, Any] = {"round": self.round, "case": self.case, "competitor": self.competitor}
        row |= {name: round(value, 6) for name, value in self.figures.items()}
        if self.error:
            row["error"] = self.error
        if self.limit_seconds is not None:
            row["limit_seconds"] = self.limit_seconds
        return row

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Row":
        """Return the row that `as_json` wrote."""
        figures = dict(content)
        return cls(
            figures.pop("round"),
            figures.pop("case"),
            figures.pop("competitor"),
            error=figures.pop("error", ""),
            limit_seconds=figures.pop("limit_seconds", None),
            figures=figures,
        )


class Results:
    """All rows of one run."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.rows = list(rows)

    def add(self, row: Row) -> None:
        """Remember a row."""
        self.rows.append(row)

    def cases(self) -> list[str]:
        """Return the cases in the order in which they were first measured."""
        return list(dict.fromkeys(row.case for row in self.rows))

    def competitors(self) -> list[str]:
        """Return everybody measured, in order of appearance."""
        return list(dict.fromkeys(row.competitor for row in self.rows))

    def competitors_of(self, case: str) -> set[str]:
        """Return everybody measured in a case."""
        return {row.competitor for row in self.rows if row.case == case}

    def median(self, case: str, competitor: str, figure: str) -> float | None:
        """Return the median over the rounds; None if it was never measured."""
        values = self._values(case, competitor, figure)
        return statistics.median(values) if values else None

    def range(self, case: str, competitor: str, figure: str) -> tuple[float, float] | None:
        """Return the lowest and the highest figure of the rounds; None if it was measured less than twice."""
        values = self._values(case, competitor, figure)
        return (min(values), max(values)) if len(values) > 1 else None

    def highest(self, competitor: str, figure: str) -> float | None:
        """Return the highest value in any case; None if it was never measured."""
        values = [
            row.figures[figure] for row in self.rows if row.competitor == competitor and figure in row.figures
        ]
        return max(values, default=None)

    def error(self, case: str, competitor: str) -> str:
        """Return why a competitor has no figures in a case; empty if it has some, or never ran."""
        rows = self._of(case, competitor)
        if any(row.figures for row in rows):
            return ""
        return next((row.error for row in rows if row.error), "")

    def limit(self, case: str, competitor: str) -> float | None:
        """Return the seconds that a competitor was cut off at, None if it was not."""
        rows = self._of(case, competitor)
        if any(row.figures for row in rows):
            return None
        return max((row.limit_seconds for row in rows if row.limit_seconds is not None), default=None)

    def _values(self, case: str, competitor: str, figure: str) -> list[float]:
        return [row.figures[figure] for row in self._of(case, competitor) if figure in row.figures]

    def _of(self, case: str, competitor: str) -> list[Row]:
        return [row for row in self.rows if row.case == case and row.competitor == competitor]
