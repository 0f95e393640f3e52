"""Parsers that turn the text or TOML value of an option into a checked value.

Each function takes the value from a file, a variable or a flag. Its ValueError's text says what is allowed.
"""

import argparse
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar

from fusecache.model.names import CONTROL_NAME, unusable_name

T = TypeVar("T")
# A slower limit, shared by all uploads in flight, would be slower than the timeout of one body allows.
SLOWEST_RATE = 1000**2
# Each copies some GB/s: as much as any network of today.
MOVERS_MAX = 16
TIME_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)")
_SIZE = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:E\d+)?)\s*([KMGT]?)(IB|B)?")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def as_text(value: object) -> str:
    """Return a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ValueError("a non-empty string")
    return value


def as_header(value: object) -> str:
    """Return a string that is valid in a header as it is: visible ASCII."""
    if not isinstance(value, str) or not re.fullmatch(r"[!-~]+", value):
        raise ValueError("visible ASCII characters")
    return value


def as_encryption(value: object) -> str:
    """Return how new objects are encrypted: AES256, aws:kms[:KEY] or customer:FILE."""
    if not isinstance(value, str) or not re.fullmatch(r"AES256|aws:kms(:[!-~]+)?|customer:.+", value):
        raise ValueError("one of AES256, aws:kms, aws:kms:KEY, customer:FILE")
    return value


def as_source(value: object) -> str:
    """Return a bucket and prefix as s3://BUCKET[/PREFIX], gs://… or az://…."""
    if not isinstance(value, str) or not re.fullmatch(
        r"(s3|gs|az)://[A-Za-z0-9][A-Za-z0-9._-]*(/.*)?", value
    ):
        raise ValueError("s3://BUCKET or s3://BUCKET/PREFIX, and likewise gs://BUCKET and az://CONTAINER")
    bucket, _, prefix = value.partition("://")[2].rstrip("/").partition("/")
    if value.startswith("s3://") and bucket.endswith("--x-s3"):
        raise ValueError("a general purpose bucket: a directory bucket (--x-s3) lists its names in no order")
    if prefix and not all(part not in ("", ".", "..") for part in prefix.split("/")):
        raise ValueError("a prefix without empty parts, `.` and `..`")
    return value


def as_folder(value: object) -> str:
    """Return the name of a bucket's folder in the mount."""
    text = as_text(value)
    if (reason := unusable_name(text)) is not None or text == CONTROL_NAME:
        raise ValueError(f"the name of a folder: {reason or 'this one is reserved for the daemon'}")
    return text


def as_bucket(value: object) -> str:
    """Return the name of a bucket."""
    text = as_text(value)
    if "/" in text:
        raise ValueError("a bucket's name, without a prefix")
    as_source(f"s3://{text}")
    return text


def as_prefix(value: object) -> str:
    """Return a key prefix: empty, or ending in `/`."""
    if not isinstance(value, str):
        raise ValueError("a string")
    inner = value.strip("/")
    as_source(f"s3://bucket/{inner}")
    return f"{inner}/" if inner else ""


def as_weight(value: object) -> float:
    """Return a positive number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("a number above 0")
    return float(value)


def as_url(value: object) -> str:
    """Return an http or https URL without a path."""
    if not isinstance(value, str) or not re.fullmatch(r"https?://[^/\s]+/?", value):
        raise ValueError("a URL without a path, like https://host or http://host:port")
    return value


def as_path(value: object) -> Path:
    """Return an absolute path; `~` is the home directory."""
    return Path(os.path.abspath(Path(as_text(value)).expanduser()))


def as_flag(value: object) -> bool:
    """Return true or false, also from a word such as `yes` or `off`."""
    if isinstance(value, bool):
        return value
    word = value.lower() if isinstance(value, str) else ""
    if word not in (*_TRUE, *_FALSE):
        raise ValueError("true or false")
    return word in _TRUE


def parse_size(value: object) -> int:
    """Return bytes from 500, "50GiB", "500G" (decimal), "1.5 TB", "500e9". Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip().upper()) if isinstance(value, str) else None
    number = math.inf
    if match is not None and (match[2] or match[3] != "IB"):
        number = float(match[1]) * (1024 if match[3] == "IB" else 1000) ** " KMGT".index(match[2] or " ")
    if math.isinf(number):
        raise ValueError("bytes, as a number or like 50GiB, 500G")
    return int(number)


def as_rate(value: object) -> float:
    """Return bytes a second from "200MB/s", "1.5 GiB/s" or a number."""
    problem = ValueError(
        f"bytes a second, {SLOWEST_RATE // 1000**2}MB/s or more, like 200MB/s or 1GiB/s; 1 Gbit/s is 125MB/s"
    )
    try:
        rate = parse_size(value.strip().removesuffix("/s") if isinstance(value, str) else value)
    except ValueError:
        raise problem from None
    # 200Mb/s are bits to some and bytes to others.
    if rate < SLOWEST_RATE or "b" in str(value):
        raise problem
    return float(rate)


def as_size_or_share(value: object) -> int | str:
    """Return bytes, or a share as a string like `80%`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", value.strip()) if isinstance(value, str) else None
    if match is not None:
        if not 0 < float(match[1]) <= 100:
            raise ValueError("above 0 % and at most 100 % of the disk's free space")
        return f"{match[1]}%"
    try:
        return parse_size(value)
    except ValueError:
        raise ValueError("bytes, like 50GiB or 500G, or a share of the disk's free space, like 80%") from None


@dataclass(frozen=True, slots=True)
class Duration:
    """Parser of a duration from `low` to `high` seconds: a number of seconds, or with a unit, like `10m`."""

    low: float = 0.0
    high: float = math.inf

    def __call__(self, value: object) -> float:
        """Return seconds. Raises ValueError."""
        problem = ValueError(f"{self.range_text}, in seconds or with a unit, like 90, 90s, 10m or 2h")
        found = _DURATION.fullmatch(str(value).strip().lower())
        if isinstance(value, bool) or not isinstance(value, int | float | str) or found is None:
            raise problem
        seconds = float(found[1]) * TIME_UNITS.get(found[2], math.nan)
        if not self.low <= seconds <= self.high:
            raise problem
        return seconds

    @property
    def range_text(self) -> str:
        """The allowed range as text: `0 to 7d`."""
        if math.isinf(self.high):
            return f"{_time_text(self.low)} or more"
        return f"{_time_text(self.low)} to {_time_text(self.high)}"


def _time_text(seconds: float) -> str:
    """Return seconds as an option takes them, in the largest unit without a remainder: 0, 1.5s, 10m, 7d."""
    whole = [unit for unit in ("d", "h", "m") if seconds and seconds % TIME_UNITS[unit] == 0]
    return f"{seconds / TIME_UNITS[whole[0]]:g}{whole[0]}" if whole else f"{seconds:g}s" if seconds else "0"


@dataclass(frozen=True, slots=True)
class Whole:
    """Parser of a whole number from `low` to `high`."""

    low: int
    high: float = math.inf

    def __call__(self, value: object) -> int:
        """Return the number. Raises ValueError."""
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise ValueError(
                f"a whole number from {self.low} {'on' if math.isinf(self.high) else f'to {self.high}'}"
            )
        return value


as_id = Whole(0, 2**32 - 2)  # of a user or group
as_count = Whole(1)
as_movers = Whole(0, MOVERS_MAX)
_as_port = Whole(1, 2**16 - 1)


def as_octal(value: object) -> int:
    """Return permission bits from octal digits."""
    # Numbers are refused: TOML's 22 and 0o26 are the same number, and users who type 22 mean 0o22.
    if not isinstance(value, str) or not re.fullmatch(r"(0o)?0?[0-7]{1,3}", value):
        raise ValueError('octal digits up to 777 as a string, like "022"')
    return int(value, 8)


def one_of(*words: str) -> Callable[[object], str]:
    """Return a parser that accepts only one of `words`, in capitals or not; it returns the word as given here."""
    by_lower = {word.lower(): word for word in words}

    def parse(value: object) -> str:
        word = str(value).lower()
        if word not in by_lower:
            raise ValueError("one of " + ", ".join(words))
        return by_lower[word]

    return parse


def as_names(value: object) -> tuple[str, ...]:
    """Return names from a list, or from one comma-separated string."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple) or not all(isinstance(part, str) and part for part in value):
        raise ValueError("a list of strings (in a variable or a flag: separated by commas)")
    return tuple(value)


def as_http_address(value: object) -> str:
    """Return an address as IP:PORT. A port alone is one of 127.0.0.1. Raises ValueError."""
    host, colon, port = str(value).rpartition(":")
    host = "127.0.0.1" if not colon or host == "localhost" else host
    try:
        address, number = ip_address(re.sub(r"^\[(.*)\]$", r"\1", host)), _as_port(port)
    except ValueError:
        raise ValueError("an IP address and a port, like 127.0.0.1:9469 or [::1]:9469") from None
    return f"[{address}]:{number}" if address.version == 6 else f"{address}:{number}"


def is_host_port(text: str) -> bool:
    """Return whether a text is HOST:PORT."""
    found = re.fullmatch(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", text)
    return found is not None and _as_port.low <= int(found[1]) <= _as_port.high


def as_host_port(value: object) -> str:
    """Return HOST:PORT as given. Raises ValueError."""
    if not is_host_port(str(value)):
        raise ValueError("HOST:PORT, like gpu1:9470 or [fd00::1]:9470")
    return str(value)


def split_http_address(address: str) -> tuple[str, int]:
    """Return IP and port of what `as_http_address` returned."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_of_this_node(address: str) -> bool:
    """Return whether only programs of this node can reach an address. address: as for `split_http_address`."""
    return ip_address(split_http_address(address)[0]).is_loopback


def as_argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser for a command's argument, whose error says what is allowed."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as exc:
            raise argparse.ArgumentTypeError(f"{text!r}: allowed is {exc}") from None

    return parse_argument
