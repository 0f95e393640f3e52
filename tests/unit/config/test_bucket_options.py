"""The buckets of a mount of several, from tables, flags and families of variables."""

import json
from pathlib import Path

import pytest

from fusecache.config.options import MountOptions, load_mounts, top_of
from fusecache.model.errors import ConfigError
from fusecache.model.objects import GIB, MIB
from fusecache.remote.endpoints import Credentials

D = {
    "D_BUCKET_NAME": "data",
    "D_ENDPOINT_URL": "https://one",
    "D_READ_ACCESS_KEY_ID": "r",
    "D_READ_SECRET_ACCESS_KEY": "rs",
    "D_WRITE_ACCESS_KEY_ID": "w",
    "D_WRITE_SECRET_ACCESS_KEY": "ws",
}
TWO = '[[bucket]]\nname = "a"\nsource = "s3://one"\n[[bucket]]\nname = "b"\nsource = "s3://two/p"\n'
# At one endpoint, which is written in two ways.
ONE_INSIDE = """
[[bucket]]
name = "a"
source = "s3://one"
endpoint_url = "https://acc.example"
[[bucket]]
name = "b"
source = "s3://one/p"
endpoint_url = "{}"
"""


def load(
    text: str,
    folder: Path,
    *,
    buckets: tuple[str, ...] = (),
    flags: object = None,
    mountpoint: Path = Path("/m"),
    **environment: str,
) -> dict[str, MountOptions]:
    """Return the options of the mounts of a file."""
    path = folder / "fusecache.toml"
    path.write_text(text)
    given = {"mountpoint": str(mountpoint), **({} if flags is None else {"credentials_from": flags})}
    return load_mounts(
        given,
        environment,
        config_path=path,
        buckets=buckets,
        home=Path("/h"),
        user_id=1,
        free_bytes=lambda _: 2**40,
    )


def test_each_bucket_is_a_mount_in_the_folder_of_its_name(tmp_path: Path) -> None:
    text = f'profile = "p"\nendpoint_url = "https://all"\n{TWO}read_only = true\nprofile = "q"\nimmutable = ["x/"]'
    mounts = load(text, tmp_path)
    assert list(mounts) == ["a", "b"]
    one, two = mounts.values()
    assert (one.source, one.prefix, one.profile, one.endpoint_url) == ("s3://one", "", "p", "https://all")
    assert (one.read_only, one.immutable, one.mountpoint) == (False, (), Path("/m/a"))
    assert (two.source, two.prefix, two.profile, two.read_only) == ("s3://two/p", "p/", "q", True)
    assert (two.immutable, two.mountpoint) == (("x/",), Path("/m/b"))
    assert top_of(mounts) == Path("/m")


def test_a_table_may_have_any_option_of_a_mount(tmp_path: Path) -> None:
    text = f'umask = "077"\nfsync = "remote"\n{TWO}umask = "027"\nhttp_address = 9469\ndelete_delay = "1h"'
    one, two = load(text, tmp_path).values()
    assert (one.umask, one.writeback.fsync, one.monitoring.http_address) == (0o077, "remote", None)
    assert (two.umask, two.writeback.fsync, two.monitoring.http_address) == (
        0o027,
        "remote",
        "127.0.0.1:9469",
    )
    assert (one.writeback.delete_delay, two.writeback.delete_delay) == (0, 3600)


@pytest.mark.parametrize(
    ("mount", "table", "sizes"),
    [
        ("", "", (0.4 * 2**40, 0.4 * 2**40)),
        ('cache_size = "50%"', "", (0.25 * 2**40, 0.25 * 2**40)),
        ('cache_size = "10GiB"', "", (5 * GIB, 5 * GIB)),
        ('cache_size = "10GiB"', 'cache_size = "8GiB"', (2 * GIB, 8 * GIB)),
        ('cache_size = "50%"', 'cache_size = "20%"', (0.3 * 2**40, 0.2 * 2**40)),
        ('cache_size = "10GiB"', 'cache_dir = "/nvme"', (10 * GIB, 0.8 * 2**40)),
        ('cache_size = "10GiB"', 'cache_dir = "/nvme"\ncache_size = "1GiB"', (10 * GIB, GIB)),
    ],
)
def test_the_cache_is_divided_among_the_tables(
    tmp_path: Path, mount: str, table: str, sizes: tuple[float, float]
) -> None:
    mounts = load(f"{mount}\n{TWO}{table}", tmp_path)
    assert [each.cache_size for each in mounts.values()] == pytest.approx(sizes, abs=1)
    assert mounts["b"].cache_dir == (Path("/nvme") if "nvme" in table else mounts["a"].cache_dir.parent / "b")


def test_memory_and_rates_are_divided_too(tmp_path: Path) -> None:
    one, two = load(f'memory = "300MiB"\nupload_rate = "9MB/s"\n{TWO}memory = "100MiB"', tmp_path).values()
    assert (one.memory, two.memory) == (200 * MIB, 100 * MIB)
    assert one.requests.upload_rate == two.requests.upload_rate == 4_500_000
    tables = "".join(f'[[bucket]]\nname = "b{number}"\nsource = "s3://b{number}"\n' for number in range(40))
    assert {each.memory for each in load(tables, tmp_path).values()} == {32 * MIB}


def test_names_of_the_mount_begin_with_the_folder_of_a_bucket(tmp_path: Path) -> None:
    text = f'pin = ["a/x/", "*.bin", "b/*/y", "*/z", "a/"]\n{TWO}pin = ["own"]'
    one, two = load(text, tmp_path).values()
    assert one.pin == ("x/", "*.bin", "z", "*")
    assert two.pin == ("*.bin", "*/y", "z", "own")


def test_a_mount_of_one_bucket_has_no_folder(tmp_path: Path) -> None:
    mounts = load('source = "s3://one/p"', tmp_path)
    assert [(name, each.source, each.mountpoint) for name, each in mounts.items()] == [
        ("", "s3://one/p", Path("/m"))
    ]
    assert top_of(mounts) == Path("/m")


def test_a_read_only_mount_has_read_only_buckets(tmp_path: Path) -> None:
    assert all(each.read_only for each in load(f"read_only = true\n{TWO}", tmp_path).values())


def test_keys_of_a_table_replace_all_of_the_mounts(tmp_path: Path) -> None:
    text = f'profile = "p"\nwrite_profile = "w"\nregion = "r"\n{TWO}profile = "q"\nendpoint_url = "https://x"'
    one, two = load(text, tmp_path).values()
    assert (one.profile, one.write_profile, one.region) == ("p", "w", "r")
    assert (two.profile, two.write_profile, two.region) == ("q", None, None)


def test_a_family_gives_bucket_endpoint_and_keys(tmp_path: Path) -> None:
    mount = load('[[bucket]]\nname = "a"\ncredentials_from = "D"', tmp_path, **D)["a"]
    (endpoint,) = mount.requests.endpoints
    assert (mount.source, mount.endpoint_url) == ("s3://data", "https://one")
    assert (endpoint.read_keys, endpoint.write_keys) == (Credentials("r", "rs"), Credentials("w", "ws"))
    assert endpoint.credentials_from == "D"
    text = '[[bucket]]\nname = "a"\ncredentials_from = "D"\nsource = "s3://other/p"'
    mount = load(text, tmp_path, **D)["a"]
    assert (mount.source, mount.requests.endpoints[0].bucket) == ("s3://other/p", "other")


def test_a_family_may_list_several_endpoints(tmp_path: Path) -> None:
    keys = {"read": {"access_key_id": "r", "secret_access_key": "s"}}
    listed = [{"endpoint_url": f"https://{each}", "name": each, "credentials": keys} for each in ("x", "y")]
    text = '[[bucket]]\nname = "a"\ncredentials_from = "D"\nread_only = true'
    mount = load(text, tmp_path, D_BUCKET_LIST=json.dumps(listed))["a"]
    assert [each.place for each in mount.requests.endpoints] == ["https://x s3://x/", "https://y s3://y/"]
    assert (mount.source, mount.endpoint_url) == ("s3://x", "https://x")


def test_flags_add_buckets_and_families(tmp_path: Path) -> None:
    mounts = load("", tmp_path, buckets=("a=s3://one", "b=s3://other/p"), flags=("b=D", "c=D"), **D)
    assert {name: each.source for name, each in mounts.items()} == {
        "a": "s3://one",
        "b": "s3://other/p",
        "c": "s3://data",
    }


@pytest.mark.parametrize("source", ["", "s3://data/p"])
def test_one_family_is_a_mount_of_its_bucket(tmp_path: Path, source: str) -> None:
    text = f'credentials_from = "D"\n{f"source = {source!r}" if source else ""}'
    options = load(text, tmp_path, **D)[""]
    (endpoint,) = options.requests.endpoints
    assert (options.source, options.endpoint_url) == (source or "s3://data", "https://one")
    assert endpoint.write_keys == Credentials("w", "ws")


def test_the_cache_directory_follows_the_mountpoint(tmp_path: Path) -> None:
    one, more = load(TWO, tmp_path), load(f'{TWO}[[bucket]]\nname = "c"\nsource = "s3://three"', tmp_path)
    assert one["a"].cache_dir == more["a"].cache_dir
    assert one["a"].cache_dir.name == "a"
    assert one["a"].cache_dir.parent.name.startswith("buckets-")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (TWO.replace('"b"', '"a"'), r"two buckets have the name 'a'; give one of them another name"),
        (TWO.replace("s3://two/p", "s3://one/"), r"buckets a and b have the same source s3://one; remove"),
        (TWO.replace("s3://two/p", "s3://one/p"), r"s3://one and s3://one/p lie one inside the other"),
        (ONE_INSIDE.format("https://ACC.example/"), r"s3://one and s3://one/p lie one inside the other"),
        (ONE_INSIDE.format("https://acc.example:443"), r"s3://one and s3://one/p lie one inside the other"),
        (TWO.replace('"a"', '"x/y"'), r"1: name = 'x/y': allowed is the name of a folder: a name must not"),
        (TWO.replace('"a"', '".."'), r"1: name = '..': allowed is the name of a folder"),
        (TWO.replace('"a"', '".fusecache"'), r"reserved for the daemon"),
        (TWO.replace('name = "a"', ""), r"1: name is missing; add name = "),
        (TWO.replace("name", "nmae"), r"1: unknown key 'nmae': did you mean 'name'"),
        ('[[bucket]]\nname = "a"', r"bucket a: source is missing; add source = .*, or credentials_from"),
        ('[[bucket]]\nname = "a"\nsource = "http://b"', r"1: source = 'http://b': allowed is s3://"),
        (f'source = "s3://c"\n{TWO}', r"source = s3://c: a mount has one source, or several buckets"),
        (f'{TWO}[[endpoint]]\nurl = "https://x"', r"\[\[endpoint\]\] beside \[\[bucket\]\]: .*X_BUCKET_LIST"),
        (f'{TWO}profile = "q"\n'.replace("s3://two/p", "gs://two"), r"bucket b: profile: only for s3://"),
        ('bucket = "a"', r"allowed are tables \[\[bucket\]\]"),
        ("[bucket]\nname = 'a'", r"allowed are tables \[\[bucket\]\]"),
        (f'credentials_from = "D"\n{TWO}', r"credentials_from D: write NAME=D"),
        (
            f"http_address = 9469\n{TWO}",
            r"http_address = 127.0.0.1:9469: each bucket has a daemon, .* \[\[bucket\]\] tables",
        ),
        (f"{TWO}mountpoint = '/x'", r"2: unknown key 'mountpoint'"),
        (
            f'memory = "63MiB"\n{TWO}',
            r"bucket a: memory = 31.5 MiB: allowed is 32 MiB or more for each bucket",
        ),
        (f'cache_size = "1GiB"\n{TWO}cache_size = "1GiB"', r"bucket a: cache_size: the tables take all"),
        ('[[bucket]]\nname = "a"\ncredentials_from = ["D", "E"]', r"1: credentials_from names one family"),
        (f'upload_rate = "1MB/s"\n{TWO}', r"bucket a: upload_rate: its share is less than 1MB/s"),
    ],
)
def test_bad_tables_are_named(tmp_path: Path, text: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        load(text, tmp_path)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("s3://b",), r"--bucket s3://b: write NAME=s3://b"),
        (("a=b",), r"--bucket a=b: source = 'b': allowed is s3://"),
        (("a/b=s3://c",), r"--bucket a/b=s3://c: name = 'a/b': allowed is the name of a folder"),
    ],
)
def test_bad_flags_are_named(tmp_path: Path, flags: tuple[str, ...], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        load("", tmp_path, buckets=flags)


@pytest.mark.parametrize("missing", [name for name in D if name != "D_ENDPOINT_URL"])
def test_a_missing_variable_is_named_by_bucket(tmp_path: Path, missing: str) -> None:
    environment = {name: value for name, value in D.items() if name != missing}
    with pytest.raises(ConfigError, match=rf"bucket a: .*not set are.* {missing}"):
        load('[[bucket]]\nname = "a"\ncredentials_from = "D"', tmp_path, **environment)


def test_a_read_only_bucket_needs_no_write_keys(tmp_path: Path) -> None:
    environment = {name: value for name, value in D.items() if "WRITE" not in name}
    text = '[[bucket]]\nname = "a"\ncredentials_from = "D"\nread_only = true'
    assert load(text, tmp_path, **environment)["a"].read_only


def test_equal_names_at_two_endpoints_are_two_buckets(tmp_path: Path) -> None:
    text = TWO.replace("s3://two/p", "s3://one") + 'endpoint_url = "https://elsewhere"'
    assert len(load(text, tmp_path)) == 2
