"""Writes docs/reference.md from the code: commands, options of a mount, exit statuses, JSON keys of `status`.

Also the picture of a file version's states in docs/on-disk.md.

`python -m scripts.reference`; a test compares the pages with what the code says now.
"""

import argparse
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import trio

from fusecache.cli.main import make_parser
from fusecache.config.endpoint_options import TABLE_KEYS
from fusecache.config.options import FIELDS, VARIABLE_PREFIX, add_flags
from fusecache.model.facts import FACTS, METRICS
from fusecache.model.records import TRANSITIONS
from tests.support import ROOT
from tests.support.node import Bucket, running_node

PAGE = ROOT / "docs" / "reference.md"
ON_DISK = ROOT / "docs" / "on-disk.md"

# When to change each option of a mount. An option that is missing here, or is no option any more, fails a test.
REASONS = {
    "source": "Always given, except with several buckets.",
    "mountpoint": "Always given.",
    "endpoint_url": "Set it for a store that is not AWS, if no variable names its endpoint.",
    "region": "Set it if AWS answers that the bucket is in another region.",
    "profile": "Set it if the keys are in a profile of ~/.aws that is not the default.",
    "write_profile": "Set it if one pair of keys may only read and another one may write.",
    "credentials_file": "Set it for keys that expire, or that a service reads from a file.",
    "cache_dir": "Set it to a directory on the node's fastest local disk.",
    "cache_size": "Set it if other programs need the disk, or if several mounts share it.",
    "memory": "Raise it if readers wait in the queue (`cache.wait_seconds` of the JSON); lower it on a small node.",
    "read_only": "Set it for jobs that only read, or if the keys may only read.",
    "allow_other": "Set it if users other than the one who mounts read the files.",
    "uid": "Set it if root mounts for another user.",
    "gid": "Set it if a group works with the files.",
    "umask": "Set it to 002 if a group may write, to 077 if others may not read.",
    "attribute_seconds": "Raise it if other clients rarely write: fewer LISTs; lower it to see their files sooner.",
    "immutable": "Set it for data sets: names that are known then cost no LISTs.",
    "posix_metadata": "Set it if programs need the times or modes that other nodes set.",
    "pin": "Set it for files that a job must find in the cache when it starts again, such as its newest checkpoint.",
    "whole_files": "Set it for weights with other names; empty if programs read large parts of weights, but never all.",
    "symlinks": "Set it to all if you trust each writer of the bucket, to none to follow no symlink.",
    "fuse_library": "Set it to pyfuse3 if the daemon's own library fails on your kernel.",
    "movers": "Set 0 where other programs keep all processors busy; for a faster network set more, and measure.",
    "keep_mounted": "Turn it off if something else starts the daemon again.",
    "settle_seconds": "Lower it if other nodes wait for files; raise it for programs that rewrite files at once.",
    "temp_names": "Set it if your programs rename from names that the list lacks.",
    "order_last": "Set it if your programs mark complete directories with names that the list lacks.",
    "delete_delay": "Set it for trainers that delete the old checkpoint before the new one is complete.",
    "drain_timeout": "Lower it if the node goes away some minutes after the stop.",
    "conflict": "Set it to last-wins if the store knows no `If-Match`, or the newest version always counts.",
    "fsync": "Set it to remote if another node goes on as soon as fsync returns.",
    "local_only": "Set it for logs and scratch files that only this node needs.",
    "credentials_from": "Set it if variables like `X_BUCKET_NAME` describe the bucket.",
    "start_without": "Set it to keys for a service, to nothing if a job must not begin without the bucket.",
    "unsigned": "Set it for public data, if you have no keys.",
    "requester_pays": "Set it if the bucket's owner asks for it.",
    "sse": "Set it if a rule demands another encryption than the bucket's default.",
    "storage_class": "Set it for data that is rarely read.",
    "upload_rate": "Set it if uploads take the bandwidth of other programs.",
    "download_rate": "Set it if reads take the bandwidth of other programs or nodes.",
    "peers": "Set it if several nodes read the same data. See [Many nodes](how-to/many-nodes.md).",
    "peers_key_file": "Set it with `peers`.",
    "peer_address": "Set it if a node does not find itself among the peers, as behind NAT.",
    "read_timeout": "Raise it if a job shall outlive longer outages of the bucket; lower it if it shall fail soon.",
    "log_level": "Set it to debug to report a problem.",
    "log_format": "Set it to json if a collector reads the log.",
    "http_address": "Set it to look at the mount in a browser, or if a Prometheus scrapes this node.",
    "http_token_file": "Set it if other machines, or not all users of the node, may read the page.",
}

# Commands that take every option of a mount.
_MOUNTING = ("mount", "run", "doctor")


def page() -> str:
    """The page as the code says it now."""
    return "\n".join(
        [
            "# Reference",
            "",
            "Everything that `fusecache` has a name for: its [commands](#commands) with their arguments and exit",
            "statuses, the [options of a mount](#options-of-a-mount) with their defaults, and the",
            "[fields of its status](#json-keys-of-status). To get something done, begin with a how-to.",
            "",
            "<!-- Written from the code by `python -m scripts.reference`. Do not edit. -->",
            "",
            *_commands(),
            *_options(),
            *_table_keys(
                "endpoint",
                TABLE_KEYS,
                "one table for each other endpoint of the same data set:",
                "[read from several endpoints](how-to/several-endpoints.md).",
            ),
            "## Keys of a [[bucket]] table",
            "",
            "In the TOML file, one table for each bucket, instead of `source`:",
            "[mount several buckets at once](how-to/several-buckets.md). `name` is the bucket's folder in the mount;",
            "`source` or `credentials_from` says which bucket it is. All options of a mount may stand there, but",
            "`mountpoint`.",
            "",
            *_json_keys(),
        ]
    )


def on_disk() -> str:
    """The page of the cache directory, with the picture as the table of transitions has it now."""
    fence = "```mermaid\n"
    before, _, rest = ON_DISK.read_text().partition(fence)
    arrows = [
        f"    {old.value} --> {new.value}\n"
        for old, following in TRANSITIONS.items()
        for new in TRANSITIONS
        if new in following and new is not old
    ]
    return f"{before}{fence}stateDiagram-v2\n{''.join(arrows)}{rest[rest.index('```') :]}"


def status_keys() -> set[str]:
    """The keys that the engine of a node really has; those of the daemon around it are not among them."""

    async def collect() -> Mapping[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            async with running_node(Bucket(), Path(directory) / "cache") as user:
                return user.fs.statistics()

    return set(flat(trio.run(collect)))


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in FACTS:
            yield from flat(value, f"{name}.")
        else:
            yield name


def _commands() -> Iterator[str]:
    yield "## Commands"
    yield ""
    (choices,) = (each for each in make_parser()._actions if isinstance(each, argparse._SubParsersAction))
    for name, parser in choices.choices.items():
        if parser.prog != f"fusecache {name}":  # another word for a command
            yield f"Also: `fusecache {name}`."
            yield ""
            continue
        yield f"### fusecache {name}"
        yield ""
        yield str(parser.description)
        yield ""
        yield "| argument | meaning |"
        yield "|---|---|"
        options = _option_flags() if name in _MOUNTING else set()
        for action in parser._actions:
            if action.help == argparse.SUPPRESS or action.dest == "help":
                continue
            if not options & set(action.option_strings):
                yield f"| `{_spelling(action)}` | {_cell(action.help or '')} |"
        yield ""
        if name in _MOUNTING:
            yield "And every [option of a mount](#options-of-a-mount), as a flag."
            yield ""
        yield _exit_status(str(parser.epilog))
        yield ""


def _option_flags() -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def _exit_status(epilog: str) -> str:
    return epilog[epilog.index("Exit status") :]


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return ", ".join(action.option_strings) + value


def _options() -> Iterator[str]:
    yield "## Options of a mount"
    yield ""
    yield "Each is a flag (`--cache-size`), a key of the TOML file (`cache_size`), and a variable"
    yield f"(`{VARIABLE_PREFIX}CACHE_SIZE`). A flag wins over the variable, the variable over the file."
    yield ""
    yield "| option | meaning [default] | when to change it |"
    yield "|---|---|---|"
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    helps = {action.dest: action.help or "" for action in parser._actions}
    assert REASONS.keys() == FIELDS.keys(), REASONS.keys() ^ FIELDS.keys()
    for name, item in FIELDS.items():
        text = helps.get(name) or item.metadata["help"]
        yield f"| `{name}` | {_cell(text)} | {REASONS[name]} |"
    yield ""


def _table_keys(table: str, keys: Mapping[str, Any], what: str, page: str) -> Iterator[str]:
    yield f"## Keys of {'an' if table[0] == 'e' else 'a'} [[{table}]] table"
    yield ""
    yield f"In the TOML file, {what}"
    yield page
    yield ""
    yield "| key | meaning [default] |"
    yield "|---|---|"
    for name, item in keys.items():
        default = item.metadata["default_text"] or (
            {False: "no", (): "none"}.get(item.default) or f"{item.default:g}"
        )
        yield f"| `{name}` | {_cell(item.metadata['help'])} [{default}] |"
    yield ""


def _json_keys() -> Iterator[str]:
    yield "## JSON keys of status"
    yield ""
    yield "`<mount>/.fusecache/stats.json` has the same. Counters count since the mount began; sizes are in bytes."
    yield "Some are also a [metric](how-to/monitor.md#choose-a-way-out), with this name after `fusecache_`."
    yield ""
    yield "| key | meaning | metric |"
    yield "|---|---|---|"
    metrics: dict[str, list[str]] = {}
    for metric in METRICS:
        key = metric.key if metric.key in FACTS else metric.key.partition(".")[0]
        metrics.setdefault(key, []).append(f"`{metric.name}`")
    for name, text in FACTS.items():
        yield f"| `{name}` | {text} | {' '.join(metrics.get(name, ()))} |"
    yield ""


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("%%", "%").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
    ON_DISK.write_text(on_disk())
