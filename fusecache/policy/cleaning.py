"""Which objects of a bucket `fusecache clean` removes, by name and age, and what that saves. Pure."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from fusecache.model.objects import ObjectInfo

# Younger objects may be part of something that is being written on another node.
RECENT_SECONDS = 3600.0
# The listing and the server's clock may be a second apart: some stores round both down.
_ROUNDING_SECONDS = 1.0
# Cloudflare R2's price, before its free tier. A gigabyte is 10^9 bytes.
R2_DOLLARS_PER_GB_MONTH = 0.015


@dataclass(frozen=True, slots=True)
class Selection:
    """Objects by name and age. prefix, suffix, pattern: of the name below the source; "" selects all names."""

    older_than_seconds: float = 0.0
    prefix: str = ""
    suffix: str = ""
    pattern: str = ""
    even_recent: bool = False

    @property
    def has_names(self) -> bool:
        """Whether it selects by name."""
        return bool(self.prefix or self.suffix or self.pattern)

    def newest_seconds(self, now: float) -> float:
        """Return the latest modification time of an object that may go. now: the store's clock at the start.

        Whatever was written after the start is younger.
        """
        return now - max(self.older_than_seconds, _ROUNDING_SECONDS if self.even_recent else RECENT_SECONDS)

    def has_name(self, name: str) -> bool:
        """Return whether a name below the source is selected."""
        if not (name.startswith(self.prefix) and name.endswith(self.suffix)):
            return False
        # As for the options of a mount: without a '/' the pattern is for the last part of the name.
        part = name if "/" in self.pattern else name.rpartition("/")[2]
        return not self.pattern or fnmatchcase(part, self.pattern)


@dataclass(slots=True)
class Amount:
    """A number of objects and their bytes."""

    objects: int = 0
    bytes: int = 0

    def add(self, info: ObjectInfo) -> None:
        """Count an object."""
        self.objects += 1
        self.bytes += info.size


def dollars_a_month(nbytes: int, *, is_r2: bool, dollars_per_gb: float | None) -> float | None:
    """Return what storing some bytes costs; None if the price is unknown. dollars_per_gb: the price, if given."""
    price = dollars_per_gb if dollars_per_gb is not None else R2_DOLLARS_PER_GB_MONTH if is_r2 else None
    return None if price is None else nbytes / 1e9 * price
