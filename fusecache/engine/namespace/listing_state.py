"""What is known in memory of a directory's listing: its epoch, the times of its pages, their access frequency."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

from fusecache.model.errors import LocalDiskError

# Inode numbers from here on belong to listing rows, in ranges; one page of a listing takes at most one range.
LISTED_NUMBERS = 1 << 52
INODE_RANGE = 1024
# Sorts after every sort name.
LAST_NAME = "\U0010ffff"


@dataclass(eq=False, slots=True)
class PageTimes:
    """When each page of a directory was requested: names up to `ends[i]` at loop time `times[i]`."""

    ends: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, end: str, moment: float) -> None:
        """Append a page that ends at `end` and was requested at that loop time."""
        self.ends.append(end)
        self.times.append(moment)

    def of(self, sort_name: str) -> float:
        """Return when the page with that name was requested. Names after the last page belong to it."""
        return self.page_of(sort_name)[1]

    def page_of(self, sort_name: str) -> tuple[str, float]:
        """Return the end of the page with that name, and when it was requested."""
        if not self.times:
            return "", float("-inf")
        index = min(bisect_left(self.ends, sort_name), len(self.times) - 1)
        return self.ends[index], self.times[index]

    def start_of(self, sort_name: str) -> str:
        """Return the name after which the page with that name begins; "" for the first page."""
        index = min(bisect_left(self.ends, sort_name), len(self.times) - 1)
        return self.ends[index - 1] if index > 0 else ""

    def behind(self, start: str) -> float:
        """Return when the page that begins after that name was requested."""
        if not self.times:
            return float("-inf")
        return self.times[min(bisect_right(self.ends, start), len(self.times) - 1)]

    def renew(self, start: str, end: str, moment: float) -> None:
        """Record that the names after `start` up to `end`, and no others, were requested again at that loop time."""
        if self.ends:
            self.ends[-1] = LAST_NAME  # the last page covers all names after it
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, end)
        before = list(zip(self.ends[:first], self.times[:first], strict=True))
        if start and first < len(self.ends) and (not before or before[-1][0] != start):
            before.append((start, self.times[first]))
        after = [each for each in zip(self.ends[last:], self.times[last:], strict=True) if each[0] != end]
        parts = [*before, (end, moment), *after]
        self.ends, self.times = [part[0] for part in parts], [part[1] for part in parts]


class AccessHeat(NamedTuple):
    """Access frequency of one page of a directory: the loop time of the last lookup and a decaying count of lookups."""

    moment: float
    heat: float


@dataclass(eq=False, slots=True)
class ListingState:
    """What is known of a directory's names in the bucket; the rows themselves are in `index/listings.py`.

    epoch: of the newest complete listing (0: none). finished: loop time at which it ended (-inf: expired). seconds: its
    duration. page_times: when its pages were requested. hidden: objects that no name shows, so that they have no row.
    has_directories: whether it may contain any. inode_ranges: of its rows. free_numbers: the unused rest of one range.
    probes: single names requested since the listing began; probed: the last one, as a name requested twice in a row
    counts once. reader: the process that last read the directory; last_read: the child that it read last. uses: access
    frequency of each page, by the name after which the page begins. refusal: why its rows could not be stored;
    refused_until: loop time until which the directory is not listed again for that reason.
    """

    epoch: int = 0
    hidden: int = 0
    finished: float = float("-inf")
    seconds: float = 0.0
    page_times: PageTimes = field(default_factory=PageTimes)
    has_directories: bool = True
    inode_ranges: set[int] = field(default_factory=set)
    free_numbers: range = range(0)
    probes: int = 0
    probed: str = ""
    reader: int = 0
    last_read: str = ""
    uses: "dict[str, AccessHeat]" = field(default_factory=dict)
    refusal: LocalDiskError | None = None
    refused_until: float = float("-inf")

    def expire(self) -> None:
        """Mark everything known as stale."""
        self.finished = float("-inf")
        self.page_times.times = [float("-inf")] * len(self.page_times.times)

    def on_lost(self) -> None:
        """The rows are gone: the directory counts as not listed."""
        self.epoch, self.finished = 0, float("-inf")
        self.page_times, self.inode_ranges, self.free_numbers = PageTimes(), set(), range(0)
        self.has_directories = True
