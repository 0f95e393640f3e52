"""Real mounts of Google Cloud Storage (a fake of its XML API) and Azure Blob Storage (Azurite)."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fusecache.model.objects import MIB, Extent
from fusecache.remote.clouds.azure import AzureStore
from fusecache.remote.clouds.gcs import GcsStore
from tests.s3server import ServerProcess
from tests.support.azurite import Azurite
from tests.support.clouds import (
    CONTAINER,
    azure_store,
    azure_variables,
    gcs_store,
    running_azurite,
)
from tests.support.gcs_server import GcsServer
from tests.support.mounts import FUSECACHE, Mount, pattern, run, tree_of, wait_until

# What a daemon says while a bucket is away.
AWAY = ("publish failed", "upload failed", "request failed call=", "DEGRADED")
PROMISE = "Google Cloud Storage takes no precondition for a file over 64 MiB"


@dataclass(frozen=True)
class CloudService:
    """A server of this machine, and what a process needs to use it."""

    endpoint_url: str
    variables: dict[str, str]
    control: None = None

    def environment(self) -> dict[str, str]:
        """Return the variables of a process that uses it: none of S3."""
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(("FUSECACHE_", "AWS_"))
        }
        return {
            "FUSECACHE_KEEP_MOUNTED": "no",
            **kept,
            **self.variables,
            "S3_ENDPOINT_URL": "http://127.0.0.1:1",
        }


@dataclass(frozen=True)
class Cloud:
    """A bucket below a prefix of one test, to be mounted, and a store that looks at it from outside."""

    service: CloudService
    source: str
    prefix: str
    store: GcsStore | AzureStore

    def contents(self) -> dict[str, bytes]:
        """Return the bytes of every object by its name below the prefix."""
        return {each.key.removeprefix(self.prefix): self._read(each.key) for each in self._objects()}

    def _objects(self) -> Any:
        return self.store.list_page(self.prefix).objects

    def _read(self, key: str) -> bytes:
        info = self.store.head(key)
        buffer = bytearray(info.size)
        if info.size:
            self.store.get_into(info.object_id, Extent(0, info.size), memoryview(buffer), lambda _: None)
        return bytes(buffer)


@pytest.fixture(scope="module")
def gcs_server() -> Iterator[GcsServer]:
    """A fake of Google Cloud Storage."""
    with GcsServer() as server:
        yield server
        assert server.offences == []


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    """Azurite with a container."""
    with running_azurite() as server:
        yield server


@pytest.fixture(params=["gcs", "azure"])
def server(request: pytest.FixtureRequest) -> Any:
    """Each server in turn."""
    return request.getfixturevalue({"gcs": "gcs_server", "azure": "azurite"}[request.param])


@pytest.fixture
def kept_by_the_session(server: Any) -> None:
    """Start the servers before the first look: they outlive the test."""


@pytest.fixture
def cloud(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect_log: Any) -> Iterator[Cloud]:
    """A prefix of this test's own in each cloud."""
    prefix = f"{uuid.uuid4().hex}/"
    if isinstance(server, GcsServer):
        expect_log(PROMISE)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(server.key_file(tmp_path / "key.json")))
        service = CloudService(server.endpoint_url, {})
        made = Cloud(service, f"gs://{server.bucket}/{prefix}", prefix, gcs_store(server))
    else:
        service = CloudService(server.endpoint_url, azure_variables(server))
        made = Cloud(service, f"az://{CONTAINER}/{prefix}", prefix, azure_store(server))
    yield made
    made.store.close()


@pytest.fixture
def mount_cloud(cloud: Cloud, mount: Callable[..., Mount]) -> Callable[..., Mount]:
    """Make mounts of the test's prefix."""
    return lambda *flags, **more: mount(*flags, of=cloud, **more)


def test_another_mount_reads_what_one_wrote(cloud, mount_cloud):
    one = mount_cloud()
    (one.path / "step").mkdir()
    (one.path / "step" / "model").write_bytes(pattern(3 * MIB))
    (one.path / "empty folder").mkdir()
    (one.path / "latest").symlink_to("step/model")
    one.sync()
    assert cloud.contents().keys() - {"step/"} == {"empty folder/", "latest", "step/model"}
    other = mount_cloud()
    assert tree_of(other.path) == {
        "empty folder": None,
        "latest": "step/model",
        "step": None,
        "step/model": pattern(3 * MIB),
    }
    text = run(FUSECACHE, "status", other.path).stdout
    assert cloud.source.rstrip("/") in text
    assert "R2's prices" not in text
    promise = "kept" if cloud.source.startswith("az") else "not-of-parts"
    assert other.status()["conditional_writes"] == promise
    assert ("takes no If-Match for a file over 64 MiB" in text) == (promise == "not-of-parts")


def test_renames_and_removals_reach_the_bucket(cloud, mount_cloud):
    one = mount_cloud()
    (one.path / "a").write_bytes(b"first")
    (one.path / "b").write_bytes(b"second")
    (one.path / "c").write_bytes(b"third")
    one.sync()
    (one.path / "a").rename(one.path / "moved")
    (one.path / "b").replace(one.path / "c")
    (one.path / "moved").chmod(0o600)
    one.sync()
    assert cloud.contents() == {"c": b"second", "moved": b"first"}
    (one.path / "c").unlink()
    one.sync()
    assert cloud.contents() == {"moved": b"first"}
    assert cloud.store.head(f"{cloud.prefix}moved").metadata["fusecache-generation"]


def test_of_two_writers_none_is_lost(cloud, mount_cloud, expect_log):
    expect_log("conflict key=")
    one, two = mount_cloud(), mount_cloud("--settle-seconds", "3600")
    assert not (two.path / "model").exists()
    (one.path / "model").write_bytes(b"from one")
    (two.path / "model").write_bytes(b"from two")
    one.sync()
    two.unmount()  # only now it publishes
    assert len(cloud.contents()) == 2
    first, second = sorted(cloud.contents().items())
    assert first == ("model", b"from one")
    assert second[0].startswith("model.conflict-")
    assert second[1] == b"from two"


def test_a_killed_daemons_files_are_uploaded_later(cloud, mount_cloud, server, expect_log):
    expect_log("recovered files=2")
    one = mount_cloud("--settle-seconds", "60")
    (one.path / "small").write_bytes(b"closed")
    (one.path / "large").write_bytes(pattern(140 * MIB))
    # A part is on its way, or stored, before the file is published.
    wait_until(lambda: one.status()["written_bytes"] >= 64 * MIB, "the first part")
    assert cloud.contents() == {}
    one.kill()
    one.start("--settle-seconds", "0.2", "--memory", "64MiB", "--cache-size", "4GiB")
    one.sync()
    found = cloud.contents()
    assert found == {"small": b"closed", "large": pattern(140 * MIB)}
    if isinstance(server, GcsServer):
        assert [each for each in server.requests if "uploads=" in each] == [
            f"POST /{server.bucket}/{cloud.prefix}large?uploads="
        ]


@pytest.mark.parametrize("server", ["azure"], indirect=True)
def test_an_azure_bucket_beside_one_of_s3(server, mount_several, tmp_path, expect_log):
    """Each folder's changes reach its own bucket. While that of S3 is away, Azure's is read and written as ever."""
    prefix = f"{uuid.uuid4().hex}/"
    keys = tmp_path / "keys"
    config = tmp_path / "two.toml"
    with ServerProcess() as s3, closing(azure_store(server)) as store:
        keys.write_text(f"AWS_ACCESS_KEY_ID={s3.access_key}\nAWS_SECRET_ACCESS_KEY={s3.secret_key}\n")
        keys.chmod(0o600)
        config.write_text(
            f'[[bucket]]\nname = "archive"\nsource = "az://{CONTAINER}/{prefix[:-1]}"\n'
            f'endpoint_url = "{server.endpoint_url}"\n'
            f'[[bucket]]\nname = "gradients"\nsource = "s3://{s3.bucket}/run"\nendpoint_url = "{s3.endpoint_url}"\n'
            f'credentials_file = "{keys}"\n'
        )
        azure = Cloud(CloudService("", azure_variables(server)), "", prefix, store)
        made = mount_several("--config", str(config), of=azure)
        for name in ("archive", "gradients"):
            (made.path / name / "large").write_bytes(pattern(70 * MIB))
            (made.path / name / "old").write_bytes(name.encode())
            (made.path / name / "gone").write_bytes(b"x")
        made.sync()
        (made.path / "archive/old").rename(made.path / "archive/new")
        for name in ("archive", "gradients"):
            (made.path / name / "gone").unlink()
        made.sync()
        assert azure.contents() == {"large": pattern(70 * MIB), "new": b"archive"}
        assert sorted(s3.control.objects()) == ["run/large", "run/old"]
        assert s3.control.read("run/large") == pattern(70 * MIB)
        assert [each.status()["source"] for each in made.of.values()] == [
            f"az://{CONTAINER}/{prefix[:-1]}",
            f"s3://{s3.bucket}/run",
        ]
        s3.control.pause("refuse")
        for name in ("archive", "gradients"):
            (made.path / name / "late").write_bytes(name.encode())
        made.sync("archive")
        assert azure.contents()["late"] == b"archive"
        run(FUSECACHE, "evict", made.path / "archive")
        assert (made.path / "archive/large").read_bytes() == pattern(70 * MIB)
        wait_until(lambda: made.of["gradients"].status()["reasons"], "the reason")
        assert made.of["archive"].status()["reasons"] == []
        s3.control.resume()
        made.sync()
        assert s3.control.read("run/late") == b"gradients"
        made.unmount()
        expect_log.patterns += [each for each in AWAY if each in made.log()]
        assert s3.control.offences() == []
