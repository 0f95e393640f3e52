"""Several endpoints of one data set on a real mount: shares, failures in the middle of a read, copies that differ."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import ExpectedLog
from tests.s3server import Account, Fault, FaultAction, ServerProcess, boto_client, synthetic_bytes
from tests.support.mounts import FUSECACHE, Mount, pattern, run, wait_until
from tests.support.s3_buckets import Bucket, Service

pytestmark = pytest.mark.s3server_only

MIB = 1 << 20
BIG = 96 * MIB
SMALL = 64 << 10
# A pair of equal servers serves each object from either; so many objects make the shares even.
MANY = 200
FAILS = "endpoint fails, reads use the others"
STAND_IN = "names come from endpoint="


@dataclass
class DataSet:
    """Two servers with the same bucket, and mounts of both."""

    servers: tuple[ServerProcess, ServerProcess]
    mount: Callable[..., Mount]
    folder: Path
    expect_log: ExpectedLog

    def put(self, name: str, data: bytes) -> None:
        """Store an object at both."""
        for server in self.servers:
            server.control.put(name, data)

    def put_many(self, folder: str, count: int = MANY) -> list[str]:
        """Store many objects at both; return their names."""
        names = [f"{folder}/{index:04}" for index in range(count)]
        for index, name in enumerate(names):
            for server in self.servers:
                server.control.add_synthetic(name, SMALL, index)
        return names

    def mounted(self, *flags: str, keys: str = "", tables: str = "") -> Mount:
        """Mount the first server's bucket, with the second as another endpoint. keys: more keys of its table."""
        first, second = self.servers
        config = self.folder / "fusecache.toml"
        config.write_text(tables or f'[[endpoint]]\nurl = "{second.endpoint_url}"\n{keys}\n')
        service = Service(first.endpoint_url, first.access_key, first.secret_key, first.bucket, first.control)
        bucket = Bucket(service, None, "")  # type: ignore[arg-type]  # no test here needs its client
        return self.mount("--config", str(config), *flags, of=bucket)

    def gets(self, *, folder: str = "") -> list[int]:
        """Return how many GETs below a folder each server got."""
        return [
            sum(entry.key.startswith(folder) for entry in server.control.log("GetObject"))
            for server in self.servers
        ]

    def read(self, made: Mount, names: list[str]) -> None:
        """Read small objects and compare their bytes."""
        for name in names:
            seed = int(name.rpartition("/")[2])
            assert (made.path / name).read_bytes() == synthetic_bytes(seed, 0, SMALL), name

    def allow(self, made: Mount, *words: str) -> None:
        """Accept lines of the log, if they came."""
        log = made.log()
        for word in words:
            if word in log:
                self.expect_log(word)


def rows(made: Mount) -> list[dict[str, Any]]:
    """Return the status of each endpoint."""
    found: list[dict[str, Any]] = made.status()["endpoints"]
    return found


@pytest.fixture
def data_set(
    servers: tuple[ServerProcess, ServerProcess],
    mount: Callable[..., Mount],
    tmp_path: Path,
    expect_log: ExpectedLog,
) -> DataSet:
    """Two servers, and the way to mount them."""
    return DataSet(servers, mount, tmp_path, expect_log)


@pytest.fixture
def servers() -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers with empty buckets of the same name."""
    with ServerProcess() as first, ServerProcess() as second:
        yield first, second
        for server in (first, second):
            assert server.control.offences() == []


def test_equal_servers_serve_equal_shares(data_set: DataSet) -> None:
    names = data_set.put_many("a")
    made = data_set.mounted()
    data_set.read(made, names)
    gets = data_set.gets()
    assert sum(gets) == MANY
    assert 0.35 * MANY <= gets[1] <= 0.65 * MANY, gets
    first, second = rows(made)
    assert (first["primary"], second["primary"]) == (True, False)
    assert [row["gets"] for row in (first, second)] == gets
    assert second["bytes_read"] == gets[1] * SMALL
    assert (first["errors"], second["errors"]) == (0, 0)
    assert 0 < second["latency_seconds"] < 5
    assert data_set.servers[1].control.counts().get("ListObjectsV2", 0) == 0
    text = run(FUSECACHE, "status", made.path).stdout
    assert f"{data_set.servers[1].endpoint_url} s3://bucket/: " in text


def test_weights_set_the_shares(data_set: DataSet) -> None:
    names = data_set.put_many("a")
    made = data_set.mounted(keys="weight = 4")
    data_set.read(made, names)
    # 160 on average, with a standard deviation of 6: which endpoint serves an object is a hash of both.
    assert 0.66 * MANY <= data_set.gets()[1] <= 0.92 * MANY


def _stop(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGSTOP)


def _kill(server: ServerProcess) -> None:
    server.kill()


@pytest.mark.parametrize("end", [_stop, _kill])
@pytest.mark.parametrize("flags", [(), ("--read-only",)])
def test_an_endpoint_that_ends_mid_read_costs_no_error(
    data_set: DataSet, tmp_path: Path, end: Callable[[ServerProcess], None], flags: tuple[str, ...]
) -> None:
    """The server that serves the file stops answering, or dies, in the middle of it: `cmp` finds no difference."""
    for server in data_set.servers:
        server.control.add_synthetic("big", BIG, 7)
        # A few pieces come; the others wait until one server has ended, however long that takes.
        server.control.faults(
            *(Fault(FaultAction.HOLD, operation="GetObject", nth=number) for number in range(4, 20))
        )
    expected = tmp_path / "expected"
    expected.write_bytes(synthetic_bytes(7, 0, BIG))
    made = data_set.mounted(*flags)
    with subprocess.Popen(["cmp", made.path / "big", expected]) as reader:
        wait_until(lambda: max(data_set.gets()) > 4, "GETs")
        index = 0 if data_set.gets()[0] else 1
        end(data_set.servers[index])
        data_set.servers[1 - index].control.clear_faults()
        try:
            assert reader.wait(50) == 0
        finally:
            if end is _stop:
                os.kill(data_set.servers[index].pid, signal.SIGCONT)
            else:
                data_set.servers[index].start()
    assert data_set.gets()[1 - index] > 4
    data_set.allow(made, FAILS, STAND_IN)


def test_an_endpoint_that_is_back_gets_its_share_again(data_set: DataSet) -> None:
    before, during, after, probes = (data_set.put_many(folder, 100) for folder in "abcd")
    made = data_set.mounted()
    data_set.read(made, before)
    data_set.servers[1].kill()
    data_set.read(made, during)
    assert rows(made)[1]["state"] == "failing"
    data_set.servers[1].start()
    left = iter(probes)

    def is_back() -> bool:
        data_set.read(made, [next(left)])
        return bool(rows(made)[1]["state"] == "ok")

    # Each look reads an object, as probes are sent while objects are read.
    wait_until(lambda: time.sleep(0.2) or is_back(), "the second endpoint")
    data_set.read(made, after)
    assert 25 <= data_set.gets(folder="c/")[1] <= 75
    data_set.allow(made, FAILS)


def test_refused_keys_cost_no_error_and_heal(data_set: DataSet) -> None:
    first, second, third = (data_set.put_many(folder, 60) for folder in "abc")
    made = data_set.mounted()
    server = data_set.servers[1]
    data_set.read(made, first)
    server.control.revoke(server.access_key)
    data_set.read(made, second)
    row = rows(made)[1]
    assert (row["state"], "403" in row["error"]) == ("failing", True)
    server.control.add_account(Account(server.access_key, server.secret_key))
    left = iter(data_set.put_many("d", 100))

    def is_back() -> bool:
        data_set.read(made, [next(left)])
        return bool(rows(made)[1]["state"] == "ok")

    wait_until(lambda: time.sleep(0.2) or is_back(), "the second endpoint")
    data_set.read(made, third)
    assert data_set.gets(folder="c/")[1] >= 15
    data_set.allow(made, FAILS)


def test_a_slow_endpoint_serves_fewer_objects(data_set: DataSet) -> None:
    warm, measured = data_set.put_many("a", 40), data_set.put_many("b", 100)
    made = data_set.mounted()
    data_set.servers[1].control.set(latency=0.6)
    data_set.read(made, warm)
    assert rows(made)[1]["state"] == "slow"
    data_set.read(made, measured)
    # 20 on average, with a standard deviation of 4; an endpoint that is not slow serves 50, give or take 5.
    assert data_set.gets(folder="b/")[1] <= 40


# ---- copies


def test_other_bytes_are_never_read_and_are_named(data_set: DataSet) -> None:
    names = data_set.put_many("a", 40)
    for name in names[:20]:
        data_set.servers[1].control.put(name, pattern(SMALL, seed=99))
    data_set.expect_log("copy is not used cause=other bytes endpoint=http.*key=a/00")
    made = data_set.mounted()
    data_set.read(made, names)
    row = rows(made)[1]
    assert 0 < row["unused_copies"]["other bytes"] <= 20
    assert row["unused_keys"][0]["key"] in names[:20]
    assert row["state"] != "failing"
    told = run(FUSECACHE, "status", made.path).stdout
    assert "has other bytes under" in told
    assert "copies not used: " in told


def test_missing_objects_are_read_where_they_are(data_set: DataSet) -> None:
    names = data_set.put_many("a", 40)
    for name in names[::2]:
        data_set.servers[1].control.delete(name)
    made = data_set.mounted()
    data_set.read(made, names)
    row = rows(made)[1]
    assert row["state"] != "failing"
    assert list(row["unused_copies"]) == ["missing"]


@pytest.mark.parametrize("has_checksums", [True, False])
def test_copies_in_other_parts_need_a_checksum(data_set: DataSet, *, has_checksums: bool) -> None:
    data = {f"a/{index:04}": pattern(3 * SMALL, seed=index) for index in range(20)}
    for name, content in data.items():
        data_set.servers[0].control.put(name, content, part_bytes=SMALL)
        data_set.servers[1].control.put(name, content, part_bytes=2 * SMALL)
    for server in data_set.servers:
        server.control.set_rules(full_checksums=has_checksums)
    if not has_checksums:
        data_set.expect_log("copy is not used cause=not comparable")
    made = data_set.mounted()
    for name, content in data.items():
        assert (made.path / name).read_bytes() == content
    row = rows(made)[1]
    assert (row["bytes_read"] > 0) is has_checksums
    assert list(row["unused_copies"]) == ([] if has_checksums else ["not comparable"])


def test_an_endpoint_may_have_another_bucket_and_prefix(data_set: DataSet) -> None:
    second = data_set.servers[1]
    client = boto_client(second)
    client.create_bucket(Bucket="copies")
    client.close()
    for index in range(40):
        data_set.servers[0].control.add_synthetic(f"a/{index:04}", SMALL, index)
        second.control.add_synthetic(f"of/data/a/{index:04}", SMALL, index, bucket="copies")
    made = data_set.mounted(keys='bucket = "copies"\nprefix = "of/data"')
    data_set.read(made, [f"a/{index:04}" for index in range(40)])
    assert data_set.gets(folder="of/data/")[1] >= 8
    assert rows(made)[1]["errors"] == 0


# ---- names and writes


def test_names_come_from_the_next_while_the_primary_is_away(data_set: DataSet) -> None:
    names = data_set.put_many("a", 10)
    data_set.put("b/file", b"bytes")
    made = data_set.mounted()
    data_set.read(made, names[:1])
    data_set.servers[0].kill()
    data_set.expect_log(STAND_IN)
    assert os.listdir(made.path / "b") == ["file"]
    assert (made.path / "b" / "file").read_bytes() == b"bytes"
    data_set.read(made, names)
    status = made.status()
    assert [row["gives_names"] for row in status["endpoints"]] == [False, True]
    assert any("names come from" in reason for reason in status["reasons"])
    data_set.servers[0].start()

    def is_back() -> bool:
        os.listdir(made.path)
        return bool(rows(made)[0]["gives_names"])

    wait_until(lambda: time.sleep(0.5) or is_back(), "names of the primary", seconds=90)
    data_set.allow(made, FAILS)


def test_writes_go_to_the_primary_and_are_read_there(data_set: DataSet) -> None:
    """The other endpoint has old versions, or none, of what this mount wrote."""
    names = data_set.put_many("a", 30)
    # Times are of whole seconds: what is written in the same second is no older version.
    data_set.servers[0].control.advance_clock(2)
    made, other = data_set.mounted(), data_set.mounted()
    for name in names:
        (made.path / name).write_bytes(b"new " + name.encode())
        (made.path / f"{name}.new").write_bytes(b"added")
    made.sync()
    run(FUSECACHE, "evict", made.path)
    for each in (made, other):
        for name in names:
            assert (each.path / name).read_bytes() == b"new " + name.encode()
            assert (each.path / f"{name}.new").read_bytes() == b"added"
    first, second = data_set.servers
    assert first.control.read(names[0]) == b"new a/0000"
    assert not set(second.control.counts()) - {"GetObject", "HeadObject"}
    assert rows(other)[1]["unused_copies"].keys() <= {"older version", "missing"}


def test_a_table_may_be_the_primary(data_set: DataSet) -> None:
    data_set.servers[1].control.put("only-second", b"bytes")
    made = data_set.mounted(keys="primary = true")
    assert os.listdir(made.path) == ["only-second"]
    (made.path / "written").write_bytes(b"here")
    made.sync()
    assert data_set.servers[1].control.read("written") == b"here"
    assert "written" not in data_set.servers[0].control.objects()


def test_a_bucket_list_of_the_environment_is_read(data_set: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    names = data_set.put_many("a", 40)
    buckets = [
        {
            "endpoint_url": server.endpoint_url,
            "name": server.bucket,
            "credentials": {
                "read": {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
            },
        }
        for server in data_set.servers
    ]
    monkeypatch.setenv("R2_DATASET_BUCKET_LIST", json.dumps(buckets))
    made = data_set.mounted(tables='[[endpoint]]\ncredentials_from = "R2_DATASET"')
    data_set.read(made, names)
    assert min(data_set.gets()) >= 8


def test_a_read_only_mount_starts_while_the_primary_is_away(data_set: DataSet) -> None:
    names = data_set.put_many("a", 20)
    data_set.servers[0].kill()
    data_set.expect_log(STAND_IN)
    made = data_set.mounted("--read-only")
    data_set.read(made, names)
    data_set.servers[0].start()
    data_set.allow(made, FAILS)


def test_wrong_tables_are_named_by_the_command(data_set: DataSet) -> None:
    config, path = data_set.folder / "wrong.toml", data_set.folder / "mnt"
    config.write_text('[[endpoint]]\nbucket = "b"')
    path.mkdir()
    done = run(FUSECACHE, "mount", "s3://bucket", path, "--config", config, check=False)
    assert done.returncode == 1
    assert "[[endpoint]] 1: url is missing" in done.stderr
