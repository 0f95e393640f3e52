"""One of the streams that a dataset consists of: its directory, and its share of an epoch."""

from dataclasses import dataclass, field
from pathlib import Path

from loader.order.spec import Weight


@dataclass(frozen=True, slots=True)
class Stream:
    """A directory with an index.json (or with one subdirectory a split), and at most one weight.

    proportion: of the epoch; set it for all streams or for none. Only the ratios count. repeat: times its samples.
    choose: number of samples an epoch. check_hashes: as in MDSDataset, for this stream only. Raises OrderError for two
    weights, or negative ones.
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
