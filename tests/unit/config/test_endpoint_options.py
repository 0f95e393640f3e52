"""The endpoints of a data set: which ones a mount has, with what defaults, and how wrong tables are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from fusecache.config.endpoint_options import resolve_endpoints
from fusecache.config.options import MountOptions, load_options, shown_options
from fusecache.model.errors import ConfigError

OWN = "https://own.example.org"
FAR = "https://far.example.org"


def load(file: str, folder: Path, *, environment: dict[str, str] | None = None, **flags: Any) -> MountOptions:
    """Return the options of a mount of s3://data/train with a file."""
    path = folder / "fusecache.toml"
    path.write_text(file)
    given = {"source": "s3://data/train", "mountpoint": "/mnt", "endpoint_url": OWN, **flags}
    return load_options(
        given, environment or {}, config_path=path, home=Path("/home/x"), free_bytes=lambda _: 2**40
    )


def places(options: MountOptions) -> list[str]:
    """Return the mount's endpoints."""
    return [each.place for each in options.requests.endpoints]


def test_a_table_adds_an_endpoint_with_the_mounts_defaults(tmp_path: Path) -> None:
    options = load(f'profile = "p"\nregion = "eu"\n[[endpoint]]\nurl = "{FAR}"', tmp_path)
    assert places(options) == [f"{OWN} s3://data/train/", f"{FAR} s3://data/train/"]
    far = options.requests.endpoints[1]
    assert (far.profile, far.region, far.weight, far.primary) == ("p", "eu", 1.0, False)
    assert (options.source, options.endpoint_url) == ("s3://data/train", OWN)


def test_a_table_may_say_everything(tmp_path: Path) -> None:
    keys = 'bucket = "copy"\nprefix = "a/b"\nregion = "us"\ncredentials_file = "/k"\nweight = 2'
    options = load(f'profile = "p"\n[[endpoint]]\nurl = "{FAR}"\n{keys}', tmp_path)
    far = options.requests.endpoints[1]
    assert far.place == f"{FAR} s3://copy/a/b/"
    assert (far.profile, far.credentials_file, far.region, far.weight) == (None, Path("/k"), "us", 2.0)


def test_the_primary_takes_the_place_of_the_source(tmp_path: Path) -> None:
    file = f'[[endpoint]]\nurl = "{FAR}"\nbucket = "copy"\nprefix = ""\nprofile = "far"\nprimary = true'
    options = load(file, tmp_path, profile="own")
    assert places(options) == [f"{FAR} s3://copy/", f"{OWN} s3://data/train/"]
    assert (options.bucket, options.prefix, options.endpoint_url, options.profile) == ("copy", "", FAR, "far")
    assert options.requests.endpoints[1].profile == "own"
    assert (
        options.cache_dir
        == load_options(
            {"source": "s3://copy", "mountpoint": "/mnt", "endpoint_url": FAR},
            {},
            home=Path("/home/x"),
            free_bytes=lambda _: 2**40,
        ).cache_dir
    )


def test_a_table_for_the_own_endpoint_sets_its_weight(tmp_path: Path) -> None:
    options = load(f'[[endpoint]]\nurl = "{FAR}"\n[[endpoint]]\nurl = "{OWN}/"\nweight = 3', tmp_path)
    assert [(each.url.rstrip("/"), each.weight) for each in options.requests.endpoints] == [
        (OWN, 3),
        (FAR, 1),
    ]


def test_without_a_url_the_first_table_is_the_mounts_own(tmp_path: Path) -> None:
    options = load(f'[[endpoint]]\nurl = "{FAR}"\n[[endpoint]]\nurl = "{OWN}"', tmp_path, endpoint_url=None)
    assert places(options) == [f"{FAR} s3://data/train/", f"{OWN} s3://data/train/"]
    assert options.endpoint_url == FAR


def test_r2_keeps_its_own_region(tmp_path: Path) -> None:
    url = "https://abc.r2.cloudflarestorage.com"
    options = load(f'region = "eu-west-1"\n[[endpoint]]\nurl = "{url}"', tmp_path)
    assert options.requests.endpoints[1].region is None


def test_without_tables_nothing_changes(tmp_path: Path) -> None:
    assert load("", tmp_path).requests.endpoints == ()


@pytest.mark.parametrize(
    ("tables", "cause"),
    [
        ('[[endpoint]]\nbucket = "b"', r"\[\[endpoint\]\] 1: url is missing; add url ="),
        (
            f'[[endpoint]]\nurl = "{FAR}"\nwieght = 2',
            r"\[\[endpoint\]\] 1: unknown key 'wieght': did you mean 'weight'",
        ),
        (f'[[endpoint]]\nurl = "{FAR}"\nxyzzy = 2', r"unknown key 'xyzzy': known are url, bucket"),
        (f'[[endpoint]]\nurl = "{FAR}"\nweight = 0', r"1: weight = 0: allowed is a number above 0"),
        (f'[[endpoint]]\nurl = "{FAR}"\nweight = -1.5', r"weight = -1.5: allowed"),
        (f'[[endpoint]]\nurl = "{FAR}"\nweight = inf', r"weight = inf: allowed"),
        (f'[[endpoint]]\nurl = "{FAR}"\nweight = true', r"weight = True: allowed"),
        (f'[[endpoint]]\nurl = "{FAR}/b"', r"1: url = .*: allowed is a URL without a path"),
        (f'[[endpoint]]\nurl = "{FAR}"\nbucket = "b/p"', r"bucket = 'b/p': allowed is a bucket's name"),
        (f'[[endpoint]]\nurl = "{FAR}"\nprefix = "a//b"', r"prefix = 'a//b': allowed is a prefix"),
        (
            f'[[endpoint]]\nurl = "{FAR}"\n[[endpoint]]\nurl = "{FAR}/"',
            r"two endpoints are the same, https://far",
        ),
        (f'[[endpoint]]\nurl = "{OWN}"', r"is the mount's own endpoint; add another one"),
        (
            f'[[endpoint]]\nurl = "{FAR}"\nprimary = true\n[[endpoint]]\nurl = "{OWN}"\nprimary = true',
            r"two endpoints are primary, https://own.* and https://far.*only one can take the writes",
        ),
        (f'[endpoint]\nurl = "{FAR}"', r"allowed are tables \[\[endpoint\]\]"),
        (f'endpoint = "{FAR}"', r"allowed are tables \[\[endpoint\]\]"),
        (
            '[[endpoint]]\ncredentials_from = "R2_D"',
            r"not set are .*R2_D_READ_ACCESS_KEY_ID.*or R2_D_BUCKET_LIST",
        ),
        ('[[endpoints]]\nurl = "x"', r"unknown key 'endpoints': did you mean 'endpoint'"),
    ],
)
def test_wrong_tables_are_refused_with_the_way_out(tmp_path: Path, tables: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause) as error:
        load(tables, tmp_path)
    assert "fusecache.toml" in str(error.value) or "R2_D" in str(error.value)


BUCKETS = json.dumps(
    [
        {
            "account_id": account,
            "name": name,
            "credentials": {"read": {"access_key_id": "a", "secret_access_key": "S"}},
        }
        for account, name in (("abc", "one"), ("def", "two"))
    ]
)


def test_a_table_may_stand_for_a_bucket_list(tmp_path: Path) -> None:
    file = '[[endpoint]]\ncredentials_from = "R2_D"\nweight = 2\nprefix = ""'
    options = load(file, tmp_path, environment={"R2_D_BUCKET_LIST": BUCKETS}, endpoint_url=None)
    hosts = [f"https://{account}.r2.cloudflarestorage.com" for account in ("abc", "def")]
    assert places(options) == [f"{hosts[0]} s3://one/", f"{hosts[1]} s3://two/"]
    assert [each.weight for each in options.requests.endpoints] == [2.0, 2.0]
    assert options.source == "s3://one"
    assert "S" not in json.dumps(shown_options(options)).split('"')


def test_a_table_may_take_one_bucket_of_a_family(tmp_path: Path) -> None:
    keys = {"READ_ACCESS_KEY_ID": "r", "READ_SECRET_ACCESS_KEY": "S", "WRITE_ACCESS_KEY_ID": "w"}
    family = {"ACCOUNT_ID": "abc", "BUCKET_NAME": "copy", "WRITE_SECRET_ACCESS_KEY": "S", **keys}
    variables = {f"R2_D_{name}": value for name, value in family.items()}
    options = load('[[endpoint]]\ncredentials_from = "R2_D"', tmp_path, environment=variables, profile="own")
    far = options.requests.endpoints[1]
    assert far.place == "https://abc.r2.cloudflarestorage.com s3://copy/train/"
    assert far.read_keys is not None
    assert far.write_keys is not None
    assert (far.read_keys.access_key, far.write_keys.access_key, far.profile) == ("r", "w", None)


def test_the_mounts_own_family_may_list_buckets() -> None:
    found = resolve_endpoints(
        {"source": "s3://one", "credentials_from": ("R2_D",)}, None, {"R2_D_BUCKET_LIST": BUCKETS}, label=""
    )
    assert [each.bucket for each in found["endpoints"]] == ["one", "two"]
