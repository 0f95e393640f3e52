"""Parses sizes such as 500GB and 1.5 TiB."""

import math
import re

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e(\d+))? *([kmgt]?)(ib|b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of `500e9`, `500GB` (decimal) or `1.5 TiB`, as `fusecache mount --cache-size` takes them.

    Raises ValueError.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or (not found[3] and (found[4] or "").lower() == "ib"):
        raise ValueError(
            f"{text} is not a number of bytes: write for example 500GB, 1GiB or 500e9, or 0 for no cache"
        )
    base = 1024 if (found[4] or "").lower() == "ib" else 1000
    number = float(f"{found[1]}e{found[2] or 0}") * base ** _UNITS[found[3].lower()]
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a number of bytes: it is too large")
    return int(number)
