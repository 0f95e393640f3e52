"""The options of a mount: where they come from, which one counts, and how a wrong one is refused."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fusecache.config.option_groups import ORDER_LAST
from fusecache.config.options import (
    FIELDS,
    FLAG_VALUES_TEXT,
    MountOptions,
    add_flags,
    changed_options,
    default_cache_dir,
    free_bytes_at,
    load_options,
    shown_options,
)
from fusecache.config.values import parse_size
from fusecache.disk.state_directory import StateDirectory
from fusecache.model.errors import ConfigError
from fusecache.model.objects import GIB, MIB

FREE = 100 * GIB


def load(
    *words: str,
    environment: dict[str, str] | None = None,
    file: str | None = None,
    folder: Path | None = None,
) -> MountOptions:
    """Options from a command line, an environment and the text of a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("source", nargs="?")
    parser.add_argument("mountpoint", nargs="?")
    add_flags(parser)
    config_path = None
    if file is not None:
        assert folder is not None
        config_path = folder / "fusecache.toml"
        config_path.write_text(file)
    return load_options(
        vars(parser.parse_args(words)),
        environment or {},
        config_path=config_path,
        home=Path("/home/someone"),
        user_id=1000,
        free_bytes=lambda _: FREE,
    )


def _values(options: MountOptions) -> dict[str, Any]:
    """Every option's value by its name."""
    return {
        **dataclasses.asdict(options),
        **dataclasses.asdict(options.session),
        **dataclasses.asdict(options.writeback),
        **dataclasses.asdict(options.requests),
        **dataclasses.asdict(options.monitoring),
    }


MOUNT = ("s3://bucket/some/prefix", "/mnt/data")


def test_source_and_mountpoint_are_enough() -> None:
    options = load(*MOUNT)
    assert (options.bucket, options.prefix, options.mountpoint) == (
        "bucket",
        "some/prefix/",
        Path("/mnt/data"),
    )
    assert options.cache_size == FREE * 8 // 10
    assert (options.memory, options.writeback.settle_seconds) == (256 * MIB, 1.0)
    assert (options.umask, options.read_only, options.uid) == (0o022, False, None)
    assert options.cache_dir.parent == Path("/home/someone/.cache/fusecache")


def test_a_bucket_without_prefix_has_none() -> None:
    assert load("s3://bucket", "/mnt").prefix == ""
    assert load("s3://bucket/", "/mnt").prefix == ""


def test_flags_go_before_the_environment_before_the_file_before_the_defaults(tmp_path: Path) -> None:
    file = (
        'source = "s3://bucket"\nmountpoint = "/mnt"\nmemory = "64MiB"\nlog_level = "error"\nregion = "file"'
    )
    environment = {"FUSECACHE_LOG_LEVEL": "debug", "FUSECACHE_REGION": "variable"}
    options = load("--region=flag", environment=environment, file=file, folder=tmp_path)
    assert (options.region, options.monitoring.log_level, options.memory, options.umask) == (
        "flag",
        "debug",
        64 * MIB,
        0o022,
    )


def test_every_option_can_come_from_a_file_a_variable_and_a_flag(tmp_path: Path) -> None:
    texts = {
        "source": "s3://b/p",
        "mountpoint": "/m",
        "endpoint_url": "http://localhost:9000",
        "region": "auto",
        "profile": "reader",
        "write_profile": "writer",
        "credentials_file": "/etc/keys",
        "unsigned": "true",
        "requester_pays": "true",
        "sse": "aws:kms:arn:aws:kms:eu-west-1:123456789012:key/1",
        "storage_class": "STANDARD_IA",
        "upload_rate": "200MB/s",
        "download_rate": "1GiB/s",
        "read_timeout": "10m",
        "cache_dir": "/var/tmp/c",
        "cache_size": "50GiB",
        "memory": "128MiB",
        "read_only": "true",
        "start_without": "keys",
        "fuse_library": "own",
        "keep_mounted": "false",
        "movers": "2",
        "allow_other": "true",
        "uid": "1000",
        "gid": "100",
        "umask": "027",
        "log_level": "warning",
        "log_format": "json",
        "http_address": "127.0.0.1:9469",
        "http_token_file": "/etc/fusecache/token",
        "settle_seconds": "0.5",
        "attribute_seconds": "2",
        "immutable": "train/,*.mds",
        "posix_metadata": "true",
        "temp_names": "*.tmp",
        "order_last": "DONE",
        "delete_delay": "30",
        "drain_timeout": "60",
        "conflict": "last-wins",
        "fsync": "remote",
        "local_only": "tmp/",
        "pin": "last/,*.ckpt",
        "whole_files": "*.safetensors,*.ot",
        "symlinks": "none",
        "peers": "gpu1:9470,gpu2:9470",
        "peers_key_file": "/etc/fusecache/peers.key",
        "peer_address": "gpu1:9470",
    }
    # It needs other variables: `test_bucket_options.py`.
    assert {*texts, "credentials_from"} == set(FIELDS)
    from_file = load(file="\n".join(f'{name} = "{text}"' for name, text in texts.items()), folder=tmp_path)
    from_variables = load(environment={f"FUSECACHE_{name.upper()}": text for name, text in texts.items()})
    flags = [
        ("--no-" if text == "false" else "--")
        + name.replace("_", "-")
        + ("" if text in ("true", "false") else f"={text}")
        for name, text in texts.items()
        if name not in ("source", "mountpoint")
    ]
    from_flags = load(texts["source"], texts["mountpoint"], *flags)
    assert from_file == from_variables == from_flags
    defaults, found = (_values(options) for options in (load("s3://b/p", "/m"), from_file))
    assert {name for name in FIELDS if defaults[name] == found[name]} == {
        "source",
        "mountpoint",
        "credentials_from",
    }


def test_a_file_may_use_the_types_of_toml(tmp_path: Path) -> None:
    file = 'read_only = true\nuid = 5\nsettle_seconds = 2\nmemory = 134217728\nimmutable = ["a/", "*.bin"]'
    options = load(*MOUNT, file=file, folder=tmp_path)
    assert (options.read_only, options.uid, options.writeback.settle_seconds, options.memory) == (
        True,
        5,
        2.0,
        128 * MIB,
    )
    assert options.immutable == ("a/", "*.bin")


def test_a_flag_can_switch_off_what_the_file_switches_on(tmp_path: Path) -> None:
    assert not load(*MOUNT, "--no-read-only", file="read_only = true", folder=tmp_path).read_only


def test_a_list_may_be_empty() -> None:
    assert load(*MOUNT, "--temp-names=").writeback.temp_names == ()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("500", 500),
        ("1KiB", 1024),
        ("50GiB", 50 * GIB),
        ("500G", 500 * 10**9),
        ("1.5 TB", 1500 * 10**9),
        ("2m", 2 * 10**6),
        ("64 mib", 64 * MIB),
        ("500e9", 500 * 10**9),
        (".5KB", 500),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "-1", "1.5.2", "5 apples", "7iB", "1e999", f"{'9' * 400}G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="50GiB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("0.5", 0.5), ("500ms", 0.5), ("10m", 600), ("1.5 h", 5400), ("7d", 604800)],
)
def test_durations_are_read_as_people_write_them(text: str, seconds: float, tmp_path: Path) -> None:
    assert load(*MOUNT, f"--delete-delay={text}").writeback.delete_delay == seconds
    assert load(*MOUNT, file=f'delete_delay = "{text}"', folder=tmp_path).writeback.delete_delay == seconds


def test_a_list_s_flag_may_be_given_again_for_more_of_it(tmp_path: Path) -> None:
    words = ("--local-only", "tmp/", "--local-only", "scratch/, *.lock", "--pin=last/")
    options = load(*MOUNT, *words, file='local_only = ["other/"]', folder=tmp_path)
    assert (options.writeback.local_only, options.pin) == (("tmp/", "scratch/", "*.lock"), ("last/",))


def test_the_help_says_what_a_value_looks_like_and_what_range_it_has() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    shown = " ".join(parser.format_help().split())
    for words in (
        "--local-only NAME,... ",
        "--order-last NAME,... ",
        "--temp-names NAME,... ",
        "--memory SIZE ",
        "--delete-delay DURATION delay of deletions",
        "[0s; 0 to 7d]",
        "--fsync ordered|remote ",
    ):
        assert words in shown
    said = FLAG_VALUES_TEXT.replace(",...", "")
    assert {action.metavar.removesuffix(",...") for action in parser._actions if action.metavar} >= {
        word.rstrip(":") for word in said.split() if word.endswith(":")
    }


def test_a_share_is_of_the_free_space() -> None:
    assert load(*MOUNT, "--cache-size=50%").cache_size == FREE // 2


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9469", "127.0.0.1:9469"),
        ("localhost:9469", "127.0.0.1:9469"),
        ("127.0.0.2:9469", "127.0.0.2:9469"),
        ("[0:0::1]:9469", "[::1]:9469"),
    ],
)
def test_an_address_has_an_ip_and_a_port(text: str, address: str) -> None:
    assert load(*MOUNT, f"--http-address={text}").monitoring.http_address == address


# ---- refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cache-size=lots",), "--cache-size = 'lots': allowed is bytes, like 50GiB"),
        (("--cache-size=101%",), "at most 100 %"),
        (("--cache-size=0%",), "above 0 %"),
        (("--memory=-5",), "--memory = '-5'"),
        (("--memory=5iB",), "--memory = '5iB'"),
        (("--umask=888",), "octal"),
        (("--umask=1777",), "octal"),
        (("--uid=-1",), "--uid = '-1': allowed is a whole number"),
        (("--uid=4294967295",), "4294967294"),
        (("--settle-seconds=nan",), "--settle-seconds = 'nan': allowed is 0 to 1h"),
        (("--settle-seconds=-1",), "0 to 1h, in seconds or with a unit"),
        (("--settle-seconds=61m",), "0 to 1h"),
        (("--delete-delay=8d",), "0 to 7d"),
        (("--delete-delay=10 weeks",), "like 90, 90s, 10m or 2h"),
        (("--log-level=loud",), "one of debug, info, warning, error"),
        (("--endpoint-url=localhost:9000",), "http://host:port"),
        (("--endpoint-url=https://host/bucket",), "without a path"),
        (("--region=",), "--region = ''"),
        (("--http-address=:9469",), "--http-address = ':9469': allowed is an IP address and a port"),
        (("--http-address=host:9469",), "like 127.0.0.1:9469 or [::1]:9469"),
        (("--http-address=127.0.0.1:0",), "an IP address and a port"),
        (("--http-address=0.0.0.0:9469",), "other machines can reach it: set http_token_file"),
        (("--peers=gpu1:9470",), "peers: set peers_key_file too"),
        (("--peer-address=gpu1",), "allowed is HOST:PORT, like gpu1:9470"),
        (("--peer-address=gpu1:65536",), "allowed is HOST:PORT"),
        (
            ("--peers=gpu1:9470", "--peers-key-file=/k", "--sse=customer:/c"),
            "nodes send each other plain bytes",
        ),
        (("--http-address=[::]:9469",), "http_address = [::]:9469: other machines can reach it"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_allowed(
    words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load(*MOUNT, *words)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "source", ["bucket", "ftp://bucket", "s3://", "gs:///x", "s3://b//x", "az://b/../c", "s3://b/./c"]
)
def test_a_source_is_a_bucket_and_a_plain_prefix(source: str) -> None:
    with pytest.raises(ConfigError, match="source"):
        load(source, "/mnt")


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="source is missing"):
        load()
    with pytest.raises(ConfigError, match="mountpoint is missing"):
        load("s3://bucket")


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'cachesize': did you mean 'cache_size'"):
        load(*MOUNT, file="cachesize = 1", folder=tmp_path)


def test_a_table_in_the_file_is_refused_with_where_options_stand(tmp_path: Path) -> None:
    path = tmp_path / "data.toml"
    path.write_text('[mount]\nsource = "s3://b"\n')
    with pytest.raises(ConfigError, match=r"\[mount\] is a table; write the options at the top level"):
        load_options({}, {}, config_path=path)


def test_a_status_shows_the_options_in_force_and_which_are_no_defaults(tmp_path: Path) -> None:
    flags = {"source": "s3://b", "mountpoint": "/m", "cache_dir": str(tmp_path), "cache_size": "1GiB"}
    plain = shown_options(load_options(flags, {}))
    assert changed_options(plain) == {}
    assert {name: plain[name] for name in ("fsync", "umask", "read_only", "cache_size")} == {
        "fsync": "ordered",
        "umask": "022",
        "read_only": False,
        "cache_size": 1 << 30,
    }
    assert plain["order_last"] == list(ORDER_LAST)
    other = {**flags, "fsync": "remote", "local_only": "tmp/", "read_only": True, "profile": "mine"}
    shown = shown_options(load_options(other, {}))
    assert changed_options(shown) == {"fsync": "remote", "local_only": ["tmp/"]}
    assert "profile" not in shown
    for given, kind in (("customer:/k", "customer"), ("aws:kms:id", "aws:kms"), ("AES256", "AES256")):
        assert shown_options(load_options({**flags, "sse": given}, {}))["sse"] == kind
    json.dumps(shown)


def test_a_number_as_umask_is_refused_because_its_base_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="umask = 22: allowed is octal digits"):
        load(*MOUNT, file="umask = 22", folder=tmp_path)


@pytest.mark.parametrize(
    "line", ["read_only = 1", "uid = true", "immutable = [1]", "memory = 1.5", "source = 5"]
)
def test_a_wrong_type_in_the_file_is_refused_with_file_and_key(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match=rf"fusecache.toml: {line.split(' ')[0]} = "):
        load("--region=x", file='mountpoint = "/mnt"\n' + line, folder=tmp_path)


def test_a_file_that_is_not_there_or_not_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load(file="= 1", folder=tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_options({}, {}, config_path=tmp_path / "none.toml")


def test_an_unknown_variable_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="unknown variable FUSECACHE_MEMROY: did you mean 'FUSECACHE_MEMORY'"
    ):
        load(*MOUNT, environment={"FUSECACHE_MEMROY": "1"})


def test_variables_that_are_no_options_are_left_alone() -> None:
    load(
        *MOUNT,
        environment={"FUSECACHE_SOCKET": "/x", "FUSECACHE_TEST_ENDPOINT": "y", "FUSE": "z", "HOME": "/"},
    )


def test_a_cache_smaller_than_its_buffers_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError) as refusal:
        load(*MOUNT, "--cache-size=100MB")
    assert str(refusal.value) == (
        "cache_size = 95.4 MiB is below the minimum of 256.0 MiB, the larger of 64 MiB and memory (256.0 MiB): "
        "choose a larger cache_size, or choose a smaller memory"
    )
    assert load(*MOUNT, "--cache-size=100MiB", "--memory=64MiB").cache_size == 100 * MIB
    with pytest.raises(ConfigError, match=r"below the minimum of 64\.0 MiB.*: choose a larger cache_size$"):
        load(*MOUNT, "--cache-size=63MiB", "--memory=32MiB")
    with pytest.raises(ConfigError, match=r"memory = 1 B: "):
        load(*MOUNT, "--memory=1")


def test_only_a_share_of_a_full_disk_is_said_to_need_free_space() -> None:
    with pytest.raises(
        ConfigError, match=r"102\.4 MiB \(0\.1% of the free space\) is below .*: free space on the disk"
    ):
        load(*MOUNT, "--cache-size=0.1%")


def test_the_cache_cannot_live_inside_its_own_mount() -> None:
    with pytest.raises(ConfigError, match="inside the mountpoint"):
        load("s3://bucket", "/mnt", "--cache-dir=/mnt/x/../cache")


# ---- the cache directory


def test_every_bucket_prefix_and_endpoint_has_a_cache_of_its_own() -> None:
    def where(source: str, endpoint: str = "") -> Path:
        return default_cache_dir(source, endpoint, environment={}, home=Path("/h"), user_id=1)

    different = [where("s3://b"), where("s3://b/p"), where("s3://c"), where("s3://b", "http://e")]
    assert len(set(different)) == 4
    assert where("s3://b/p/", "http://e/") == where("s3://b/p", "http://e")
    assert where("s3://b").name.startswith("b-")


def test_the_environment_s_endpoint_counts_for_the_cache_too() -> None:
    plain = load(*MOUNT).cache_dir
    assert load(*MOUNT, environment={"S3_ENDPOINT_URL": "http://e"}).cache_dir != plain
    assert load(*MOUNT, environment={"R2_ACCOUNT_ID": "abc"}).cache_dir != plain


def test_caches_live_where_the_system_keeps_them() -> None:
    environment = {"XDG_CACHE_HOME": "/xdg"}
    user = default_cache_dir("s3://b", "", environment=environment, home=Path("/h"), user_id=1)
    root = default_cache_dir("s3://b", "", environment=environment, home=Path("/h"), user_id=0)
    assert (user.parent, root.parent) == (Path("/xdg/fusecache"), Path("/var/cache/fusecache"))


def test_a_limit_by_default_does_not_shrink_as_the_cache_fills(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert free_bytes_at(cache / "not" / "there") > 0
    with StateDirectory(cache, "one"):
        pass
    when_made = free_bytes_at(cache)
    (cache / "file").write_bytes(b"x" * 64 * MIB)
    assert free_bytes_at(cache) == when_made


def test_a_cache_directory_that_may_not_be_looked_at_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(ConfigError, match="choose another directory"):
        free_bytes_at(tmp_path / "file" / "cache")


# ---- other stores than S3


@pytest.mark.parametrize("source", ["gs://bucket/a/b", "az://bucket/a/b"])
def test_other_stores_have_a_bucket_and_a_prefix(source: str) -> None:
    options = load(source, "/mnt", environment={"AZURE_STORAGE_ACCOUNT_NAME": "account"})
    assert (options.kind.value, options.bucket, options.prefix) == (source[:2], "bucket", "a/b/")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--region=eu",), "region: only for s3:// sources; remove it to mount gs://b"),
        (("--sse=AES256", "--profile=x"), "profile, sse: only for s3://"),
        (("--credentials-file=/keys",), "credentials_file: only"),
    ],
)
def test_options_of_s3_are_refused_elsewhere(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load("gs://b", "/mnt", *words)
    assert message in str(refusal.value)


def test_endpoints_are_of_s3_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[\[endpoint\]\]: only for s3:// sources.*gs://b"):
        load("gs://b", "/mnt", file='[[endpoint]]\nurl = "https://host"\n', folder=tmp_path)


def test_a_directory_bucket_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--x-s3'?.* a general purpose bucket: a directory bucket"):
        load("s3://name--euw1-az1--x-s3/below", "/mnt")
    assert load("gs://name--euw1-az1--x-s3", "/mnt").bucket.endswith("--x-s3")


def test_variables_of_s3_do_not_move_other_stores() -> None:
    elsewhere = {"S3_ENDPOINT_URL": "http://127.0.0.1:9", "R2_ACCOUNT_ID": "abc"}
    there = load("gs://b", "/mnt", environment=elsewhere)
    assert there.cache_dir == load("gs://b", "/mnt").cache_dir
    assert there.cache_dir != load("s3://b", "/mnt").cache_dir
