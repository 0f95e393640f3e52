"""One of the datasets that a dataset is made of: where it lies, and how much of an epoch it is."""

from dataclasses import dataclass, field
from pathlib import Path

from loader.order.spec import Weight


@dataclass(frozen=True, slots=True)
class Stream:
    """A directory with an index.json (or with one directory a split), and at most one weight.

    proportion: of the epoch; all streams or none have one, and their sum counts as 1. repeat: times its
    samples. choose: samples an epoch. check_hashes: as in MDSDataset, for this stream alone. Raises OrderError for
    two weights, or negative ones.
    """

    path: str | Path
    split: str | None = None
    proportion: float | None = None
    repeat: float | None = None
    choose: int | None = None
    check_hashes: bool = False
    weight: Weight = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "weight", Weight(self.proportion, self.repeat, self.choose))
