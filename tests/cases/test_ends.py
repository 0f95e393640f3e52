"""A daemon that is told to stop with much still to upload, and the next one on its cache directory."""

import signal
from collections.abc import Callable

import pytest

from tests.crash.test_kill import answered_parts, published, shows, wait_until_journaled
from tests.s3server import Fault, FaultAction, ServerProcess
from tests.support.daemons import MIB, Daemon, some_bytes
from tests.support.mounts import wait_until

SIZES = {"a": 66 * MIB, "b": MIB, "c": 66 * MIB, "d": 0}
PARTS_OF_A = 2
FIRST_FLAGS = ("--cache-size", "2GiB")
OTHER_FLAGS = (
    *("--cache-size", "1GiB", "--memory", "96MiB"),
    *("--settle-seconds", "2", "--attribute-seconds", "7", "--log-level", "debug"),
)


@pytest.mark.case(47)
def test_a_long_queue_is_drained_with_progress_and_gone_on_with_by_a_mount_with_other_flags(
    server: ServerProcess, make_daemon: Callable[..., Daemon]
):
    daemon = make_daemon(*FIRST_FLAGS)
    daemon.mount()
    files = {f"run/{name}": some_bytes(size, seed) for seed, (name, size) in enumerate(SIZES.items(), 1)}
    server.control.set(upload_bandwidth=50e6)  # each connection
    server.control.faults(
        Fault(FaultAction.HOLD, operation="UploadPart", key="run/c"),
        Fault(FaultAction.HOLD, operation="CompleteMultipartUpload", key="run/a"),
    )
    (daemon.path / "run").mkdir()
    for name, data in files.items():
        (daemon.path / name).write_bytes(data)
    daemon.signal(signal.SIGTERM)
    wait_until(lambda: len(answered_parts(server)) >= PARTS_OF_A, "the parts of the first file")
    wait_until(lambda: daemon.log().count("draining files=") >= 3, "progress, said again and again")
    answered = answered_parts(server)
    wait_until_journaled(server, daemon, answered)
    assert daemon.is_running()
    daemon.signal(signal.SIGTERM)
    server.control.clear_faults()  # a request that is on its way is waited for
    assert daemon.wait(90) == 1  # the bucket does not have everything
    assert "the next mount resumes them" in daemon.log()
    assert server.control.uploads()

    server.control.set(upload_bandwidth=None)
    daemon.mount(*OTHER_FLAGS)
    for name, data in files.items():
        assert (daemon.path / name).read_bytes() == data
    assert daemon.sync() == 0
    assert shows(server) == {"run/": b"", **files}
    assert server.control.uploads() == []
    assert sorted(key for _, key in published(server)) == ["run/", *files]  # each once
    sent = answered_parts(server)
    assert all(sent.count(part) == 1 for part in answered)
    assert len(sent) > len(answered)
