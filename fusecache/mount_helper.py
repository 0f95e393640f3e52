"""`mount.fusecache`, which mount(8) and systemd call for lines of /etc/fstab with the type fusecache.

mount(8) gives it `SOURCE DIRECTORY [-sfnv] [-o OPTIONS]`. Exit status as mount(8) documents it.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from fusecache.cli.main import main as run_command
from fusecache.cli.say import say_error
from fusecache.config.options import FIELDS
from fusecache.config.values import as_flag
from fusecache.model.errors import ConfigError
from fusecache.model.format_text import nearest_text

USAGE, FAILED = 1, 32  # mount(8)
# Options that mean something to mount(8) or systemd, or that hold for every mount of fusecache.
_FOREIGN = {
    "_netdev", "async", "atime", "auto", "defaults", "dev", "diratime", "exec", "group", "noatime", "noauto", "nodev",
    "nodiratime", "nofail", "nosuid", "nouser", "owner", "relatime", "rw", "suid", "user", "users",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Mount what a line of fstab says; return mount(8)'s exit status."""
    parser = argparse.ArgumentParser(prog="mount.fusecache", description="Mount a bucket for mount(8).")
    parser.add_argument("source")
    parser.add_argument("directory")
    parser.add_argument("-o", dest="options", action="append", default=[])
    parser.add_argument("-t", dest="type")
    parser.add_argument("-f", dest="fakes", action="store_true")
    parser.add_argument("-s", dest="is_sloppy", action="store_true")
    parser.add_argument("-n", action="store_true")
    parser.add_argument("-v", action="store_true")
    arguments = parser.parse_args(argv)
    words = [word for text in arguments.options for word in text.split(",") if word]
    try:
        flags = list(_flags(words, is_sloppy=arguments.is_sloppy))
    except ConfigError as exc:
        say_error(f"{arguments.directory}: {exc}")
        return USAGE
    if arguments.fakes:
        return 0
    status = run_command(["mount", arguments.source, arguments.directory, *flags])
    return FAILED if status else 0


def _flags(words: Sequence[str], *, is_sloppy: bool) -> Iterator[str]:
    """Yield the flags of `fusecache mount` for the options of a line. Raises ConfigError for an unknown one.

    is_sloppy: leave out unknown options, as mount -s asks.
    """
    for word in words:
        key, has_value, value = word.partition("=")
        name = key.replace("-", "_")
        if word == "ro":
            yield "--read-only"
        elif word == "remount":
            raise ConfigError("a mount cannot change its options: unmount it and mount it again")
        elif name == "config" and value:
            yield f"--config={value}"
        elif name in FIELDS and name not in ("source", "mountpoint"):
            flag = "--" + name.replace("_", "-")
            is_flag = FIELDS[name].metadata["parse"] is as_flag
            if is_flag and value not in ("", "true", "false"):
                raise ConfigError(f"{word}: allowed is true or false")
            if not is_flag and not has_value:
                raise ConfigError(f"{word}: it needs a value, like {key}=…")
            if value == "false":
                flag = flag.replace("--", "--no-", 1)
            yield flag if is_flag else f"{flag}={value}"
        elif word not in _FOREIGN and not key.startswith(("x-", "X-", "comment")) and not is_sloppy:
            known = nearest_text(name, [*FIELDS, "config"])
            raise ConfigError(
                f"unknown mount option {key!r}{known}; it may be any option of `fusecache mount`"
            )


if __name__ == "__main__":
    sys.exit(main())
