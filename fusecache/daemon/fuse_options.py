"""The options that libfuse gets for a mount. Users name the bucket and its prefix, so these are escaped."""

import re

import pyfuse3

from fusecache.model.format_text import printable

# Characters without a meaning for libfuse, fusermount3 and the mount table.
_SPECIAL = re.compile(rb"[^A-Za-z0-9:/._=+@~-]")


def fuse_options(source: str, *, allow_other: bool) -> set[str]:
    """Return the options of a mount. `nosuid` and `nodev` hold always: a bucket's writer gains no rights here."""
    own = {f"fsname={_escaped(source)}", "subtype=fusecache", "nosuid", "nodev"}
    return set(pyfuse3.default_options) | own | ({"allow_other"} if allow_other else set())


def _escaped(text: str) -> str:
    r"""Return a value of an option as ASCII, with every special byte as \ooo, which libfuse decodes (fuse_opt.c).

    A comma would begin another option. pyfuse3 refuses all but ASCII.
    """
    return _SPECIAL.sub(lambda match: rf"\{match[0][0]:03o}".encode(), printable(text).encode()).decode()
