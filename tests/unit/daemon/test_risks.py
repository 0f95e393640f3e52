"""Which endpoints and cache directories a mount warns of."""

from pathlib import Path

import pytest

from fusecache.config.option_groups import MonitoringOptions, RequestOptions, SessionOptions, WritebackOptions
from fusecache.config.options import MountOptions
from fusecache.daemon import checkup
from fusecache.daemon.checkup import file_system_of, risk_texts
from fusecache.remote.endpoints import Endpoint

TABLE = b"""1 0 8:1 / / rw - ext4 /dev/sda rw
2 1 0:9 / /mnt/nfs rw - nfs4 server:/x rw
3 1 0:8 / /dev/shm rw - tmpfs tmpfs rw
"""


def _options(*, cache_dir: Path, mountpoint: Path = Path("/m"), read_only: bool = False) -> MountOptions:
    return MountOptions(
        source="s3://b",
        mountpoint=mountpoint,
        cache_dir=cache_dir,
        cache_size=1,
        memory=1,
        read_only=read_only,
        session=SessionOptions(),
        writeback=WritebackOptions(),
        requests=RequestOptions(),
        monitoring=MonitoringOptions(),
    )


@pytest.mark.parametrize(
    ("url", "warns"),
    [
        ("http://8.8.8.8:9000", True),
        ("http://[2606:4700::1111]", True),
        ("https://8.8.8.8", False),
        ("http://127.0.0.1:9000", False),
        ("http://localhost", False),
        ("http://10.1.2.3", False),
        ("http://[fe80::1]", False),
        (None, False),
    ],
)
def test_http_to_a_public_host_is_warned_of(tmp_path: Path, url: str | None, *, warns: bool) -> None:
    options = _options(cache_dir=Path("/proc"), mountpoint=tmp_path / "m")
    assert ["is not encrypted" in text for text in risk_texts(options, Endpoint(url))] == [True] * warns


def test_cache_in_memory_is_warned_of() -> None:
    """/dev/shm is a tmpfs on every Linux; a mount that writes nothing loses nothing there."""
    for read_only in (False, True):
        options = _options(cache_dir=Path("/dev/shm/not-there"), read_only=read_only)
        texts = risk_texts(options, Endpoint(None))
        assert ["in memory (tmpfs)" in text for text in texts] == [True] * (not read_only)


def test_a_cache_on_a_network_file_system_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "file_system_of", lambda path: "nfs4")
    texts = risk_texts(_options(cache_dir=Path("/mnt/nfs/cache")), Endpoint(None))
    assert [text for text in texts if "network" in text and "nfs4" in text]


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/mnt/nfs/cache", "nfs4"), ("/mnt/nfs2/cache", "ext4"), ("/dev/shm", "tmpfs"), ("/", "ext4")],
)
def test_file_system_is_that_of_the_nearest_mount(tmp_path: Path, path: str, kind: str) -> None:
    (table := tmp_path / "mountinfo").write_bytes(TABLE)
    assert file_system_of(Path(path), table) == kind
