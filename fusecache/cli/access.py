"""`fusecache access`: arguments, and the table of what each key can do. `fusecache.bucket.access` sends the requests.

Exit status: 0 as it should be; 1 a key has a right that it should not have, or lacks one; 2 not known, or an error.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusecache.cli.say import print_line, say, say_error
from fusecache.cli.sources import SCHEME, add_source_flags, split_source
from fusecache.config.endpoint_options import family_names, key_family
from fusecache.config.options import load_mounts
from fusecache.model.errors import ConfigError
from fusecache.policy.key_rights import RIGHTS, KeyRole, unknown_rights, wrong_rights

if TYPE_CHECKING:
    from fusecache.bucket.access import Finding, ProbedKey
    from fusecache.bucket.address import Place

EXIT_WRONG, EXIT_UNKNOWN = 1, 2
_WORDS = {True: "yes", False: "no", None: "?"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="s3://BUCKET[/PREFIX] to test [without any argument: all NAME_BUCKET_NAME of the environment, see below]",
    )
    parser.add_argument(
        "--credentials-from", action="append", default=[], metavar="NAME",
        help="also the bucket and keys of the variables NAME_BUCKET_NAME, NAME_ACCOUNT_ID or NAME_ENDPOINT_URL, "
        "NAME_READ_ACCESS_KEY_ID, NAME_READ_SECRET_ACCESS_KEY, NAME_WRITE_…; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, metavar="FILE",
        help="also every bucket of a mount's configuration file, with its own keys",
    )  # fmt: skip
    add_source_flags(parser)
    parser.add_argument(
        "--write-profile",
        metavar="PROFILE",
        help="for SOURCE: profile with the keys for writing [one key for both]",
    )
    parser.add_argument("--read-only", action="store_true", help="for SOURCE: the keys should only read")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=access, parser=parser, error_status=EXIT_UNKNOWN)


def access(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Test every key in every bucket; print what it can do beside what it should. Return the exit status."""
    if not (arguments.sources or arguments.credentials_from or arguments.config):
        arguments.credentials_from = family_names(os.environ)
        if not arguments.credentials_from:
            arguments.parser.error(
                "name a bucket, s3://BUCKET, its variables with --credentials-from, or a mount's --config; the "
                "environment has no variables NAME_BUCKET_NAME with NAME_READ_ACCESS_KEY_ID, such as R2_BUCKET_NAME"
            )
        say(f"found in the environment: {', '.join(f'{each}_…' for each in arguments.credentials_from)}")
    if arguments.read_only and arguments.write_profile:
        arguments.parser.error("--read-only and --write-profile exclude each other")
    from fusecache.bucket.access import probe_place  # other commands do not need boto3

    places, keys = _places_and_keys(arguments)
    findings: list[Finding] = []
    left: list[str] = []

    def on_left(text: str) -> None:
        left.append(text)
        say_error(text)

    for place in places:
        findings += probe_place(place, keys, on_left)
    rows = [_row(each) for each in findings]
    is_wrong, is_unknown = (any(row[name] for row in rows) for name in ("wrong", "unknown"))
    is_unknown = is_unknown or bool(left)
    if arguments.json:
        result = "wrong" if is_wrong else "unknown" if is_unknown else "ok"
        sys.stdout.write(json.dumps({"result": result, "keys": rows, "left": left}, indent=2) + "\n")
    else:
        _print_table(rows)
    return EXIT_WRONG if is_wrong else EXIT_UNKNOWN if is_unknown else 0


def _places_and_keys(arguments: argparse.Namespace) -> "tuple[list[Place], list[ProbedKey]]":
    """Return the buckets, each once, and the keys. Raises ConfigError."""
    from fusecache.bucket.access import ProbedKey
    from fusecache.bucket.address import BucketKeys, place_of

    url, region, file = arguments.endpoint_url, arguments.region, arguments.credentials_file
    places = [place_of(*split_source(each), endpoint_url=url, region=region) for each in arguments.sources]
    first_role = KeyRole.READ if arguments.write_profile or arguments.read_only else KeyRole.BOTH
    keys = [
        ProbedKey(
            " ".join(filter(None, (str(file or "profile" if profile else "default keys"), profile))),
            role,
            tuple(places),
            BucketKeys(credentials_file=file, profile=profile),
        )
        for role, profile in ((first_role, arguments.profile), (KeyRole.WRITE, arguments.write_profile))
        if places and (role is first_role or profile)
    ]
    for name in arguments.credentials_from:
        family = key_family(name, os.environ)
        found = [(KeyRole.READ, family.read_keys), (KeyRole.WRITE, family.write_keys)]
        if not family.bucket or not family.url or not any(each for _, each in found):
            raise ConfigError(f"{name}: not set: {', '.join(family.missing)}")
        if family.missing:
            say(f"{name}: not set, so not all of it is tested: {', '.join(family.missing)}")
        place = place_of(family.bucket, "", endpoint_url=family.url, region=None)
        keys += [
            ProbedKey(f"{name} {role.value}", role, (place,), BucketKeys(credentials))
            for role, credentials in found
            if credentials is not None
        ]
        if not any(place.has_bucket_of(each) for each in places):
            places.append(place)
    if arguments.config is not None:
        own, own_keys = _of_config(arguments.config)
        places += [each for each in own if not any(each.has_bucket_of(place) for place in places)]
        keys += own_keys
    return places, keys


def _of_config(path: Path) -> "tuple[list[Place], list[ProbedKey]]":
    """Return the buckets of a mount's configuration file, and their keys. Raises ConfigError."""
    from fusecache.bucket.access import ProbedKey
    from fusecache.bucket.address import BucketKeys, place_of

    # Nothing is mounted, and nothing cached: more than all tables together have of their own.
    nowhere = {"mountpoint": os.devnull, "cache_size": f"{1 << 60}"}
    mounts = load_mounts(nowhere, os.environ, config_path=path)
    places: list[Place] = []
    # A key of several buckets is for all of them.
    found: dict[tuple[BucketKeys, KeyRole], tuple[str, list[Place]]] = {}
    for name, mount in mounts.items():
        if not mount.source.startswith(SCHEME):
            say(f"{mount.source}: not tested, as this command knows {SCHEME} only")
            continue
        for number, each in enumerate(mount.requests.endpoints or (mount.own_endpoint(mount.endpoint_url),)):
            url, region = each.url or mount.endpoint_url, each.region or mount.region
            place = place_of(each.bucket, each.prefix or "", endpoint_url=url, region=region)
            places.append(place)
            reader = BucketKeys(each.read_keys, each.credentials_file, each.profile)
            writer = BucketKeys(each.write_keys, each.credentials_file, mount.write_profile)
            has_writer = not number and bool(each.write_keys or mount.write_profile) and not mount.read_only
            only_reads = has_writer or bool(number) or mount.read_only
            roles = {KeyRole.READ if only_reads else KeyRole.BOTH: reader}
            if has_writer:
                roles[KeyRole.WRITE] = writer
            for role, source in roles.items():
                label = f"{name or each.bucket} {role.value}"
                found.setdefault((source, role), (label, []))[1].append(place)
    of_source = {
        source: tuple(place for (other, _), (_, own) in found.items() if other == source for place in own)
        for source, _ in found
    }
    keys = [ProbedKey(label, role, of_source[source], source) for (source, role), (label, _) in found.items()]
    return places, keys


def _row(finding: "Finding") -> dict[str, Any]:
    """Return a finding as plain values."""
    should = finding.should
    return {
        "bucket": finding.place.bucket,
        "source": finding.place.source,
        "endpoint": finding.place.endpoint.url or "AWS",
        "key": finding.key.name,
        "role": finding.key.role.value,
        "own": finding.key.is_for(finding.place),
        "can": finding.can,
        "should": should,
        "wrong": wrong_rights(finding.can, should),
        "unknown": unknown_rights(finding.can, should),
        "causes": {right: cause for right, cause in finding.causes.items() if cause},
    }


def _print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows by bucket, then a line for each wrong or unknown right."""
    width = max(len(row["key"]) for row in rows)
    for index, row in enumerate(rows):
        if not index or rows[index - 1]["source"] != row["source"]:
            print_line(f"{row['source']} at {row['endpoint']}: can/should")
            print_line(f"  {'key':{width}}  " + "  ".join(f"{right:11}" for right in RIGHTS).rstrip())
        cells = [_cell(row, right) for right in RIGHTS]
        print_line(f"  {row['key']:{width}}  " + "  ".join(f"{cell:11}" for cell in cells).rstrip())
    for row, word in ((row, word) for row in rows for word in ("wrong", "unknown")):
        by_cause: dict[str, list[str]] = {}
        for right in row[word]:
            by_cause.setdefault(_cause(row, right), []).append(right)
        for cause, rights in by_cause.items():
            print_line(f"{word}: {row['key']}: {', '.join(rights)} in {row['source']}: {cause}")
    if not any(row["wrong"] or row["unknown"] for row in rows):
        print_line("every key can do what it should, and no more")


def _cell(row: Mapping[str, Any], right: str) -> str:
    should = row["should"][right]
    mark = " !" if right in row["wrong"] else ""
    return f"{_WORDS[row['can'][right]]}/{'-' if should is None else _WORDS[should]}{mark}"


def _cause(row: Mapping[str, Any], right: str) -> str:
    if row["can"][right]:
        if not row["own"]:
            return "allowed, but the key is for another bucket: make a token for one bucket alone"
        return "allowed, but the key is for reading: make a token that may only read"
    cause = row["causes"].get(right, "")
    return cause if row["can"][right] is None else f"not allowed: {cause}"
