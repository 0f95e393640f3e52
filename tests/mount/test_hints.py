"""The hints' directory of a real mount: who may write there, what is refused, what the daemon does with the rest."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fusecache.engine.prefetch.timeline import MOST_EXTENTS
from fusecache.model.hints import LONGEST_MESSAGE_BYTES, TO_THE_END, encode_cursor, encode_plan
from fusecache.model.objects import KIB, MIB
from fusecache.mount.control_client import find_mount
from loader import ElasticBatchSampler, MDSDataset, MDSWriter, World
from loader.base.mount_endpoint import MountEndpoint, find_endpoint
from loader.hints import Hints
from loader.hints import client as module
from loader.world import Machine
from tests.support.mounts import Mount, open_to_other_users, wait_until
from tests.support.s3_buckets import Bucket

SHARDS = 6


def plan(*, window: int = 0, names: tuple[str, ...] = ()) -> bytes:
    """Each shard at a step of its own, as a whole."""
    paths = sorted(names or [f"data/{number}.mds" for number in range(SHARDS)])
    count = len(paths)
    return encode_plan(
        window=window,
        step=0,
        paths=paths,
        path=range(count),
        start=[0] * count,
        length=[TO_THE_END] * count,
        first=range(count),
        span=[0] * count,
    )


@pytest.fixture
def shards(bucket: Bucket) -> list[bytes]:
    contents = [os.urandom(MIB + number) for number in range(SHARDS)]
    for number, data in enumerate(contents):
        bucket.put(f"data/{number}.mds", data)
    return contents


def refused(path: Path, message: bytes) -> int:
    """Write a message that is refused by close(2); return the errno."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        while message:
            message = message[os.write(file, message) :]
    except BaseException:
        os.close(file)
        raise
    with pytest.raises(OSError) as refusal:  # noqa: PT011  # which one is what is asked
        os.close(file)
    assert refusal.value.errno is not None
    return refusal.value.errno


@pytest.mark.parametrize("flags", [(), ("--read-only",)])
@pytest.mark.s3server_only
def test_what_is_hinted_is_fetched_before_it_is_read(
    mount: Callable[..., Mount], bucket: Bucket, shards: list[bytes], flags: tuple[str, ...]
) -> None:
    one = mount(*flags)
    hints = one.path / ".fusecache" / "hints"
    assert list(hints.iterdir()) == []
    (hints / "run.plan").write_bytes(plan())
    (hints / "run.cursor").write_bytes(encode_cursor(1))
    assert sorted(os.listdir(hints)) == ["run.cursor", "run.plan"]
    total = sum(map(len, shards[1:]))
    wait_until(lambda: one.status()["cache"]["bytes_by_cause"]["hint"] >= total, "the hinted bytes")
    for number in range(1, SHARDS):
        assert (one.path / f"data/{number}.mds").read_bytes() == shards[number]
    assert one.status()["cache"]["bytes_by_cause"]["demand"] == 0
    (facts,) = json.loads((one.path / ".fusecache/stats.json").read_text())["hints"]["jobs"]
    assert (facts["job"], facts["step"], facts["missed_bytes"]) == ("run", 1, 0)
    assert json.loads((hints / "run.plan").read_text())["extents"] == SHARDS
    assert (hints / "run.cursor").read_bytes() == encode_cursor(1)
    (hints / "run.plan").unlink()
    assert list(hints.iterdir()) == []
    assert one.status()["hints"]["jobs"] == []
    assert [name for name in bucket.names() if not name.startswith("data/")] == []


def test_what_is_not_understood_is_refused_by_close_and_changes_nothing(
    mount: Callable[..., Mount], bucket: Bucket, shards: list[bytes]
) -> None:
    one = mount()
    hints = one.path / ".fusecache" / "hints"
    (hints / "run.plan").write_bytes(plan())
    before = one.status()["hints"]["jobs"][0]["extents"]
    honest = plan()
    for message in (
        b"nonsense",
        honest[:-1],
        honest.replace(b"data/0.mds", b"../0/x.mds"),
        honest.replace(b"data/0.mds", b"/ata/0.mds"),
        bytes(LONGEST_MESSAGE_BYTES + 1),
        encode_cursor(2),
    ):
        assert refused(hints / "run.plan", message) == errno.EINVAL
    assert refused(hints / "run.cursor", b"-1\n") == errno.EINVAL
    assert refused(hints / "nobody.cursor", encode_cursor(1)) == errno.ENOENT
    for name in ("run.txt", ".run.plan", "plan"):
        with pytest.raises(OSError, match="Invalid argument"):
            (hints / name).write_bytes(honest)
    for call in (
        lambda: (hints / "folder").mkdir(),
        lambda: (hints / "run.plan").rename(hints / "other.plan"),
        lambda: (hints / "run.plan").rename(one.path / "taken.plan"),
        lambda: (one.path / "data").rename(hints / "other.plan"),
        lambda: hints.rmdir(),
    ):
        with pytest.raises(OSError, match=r"denied|permitted|cross-device|Invalid"):
            call()
    with pytest.raises(FileNotFoundError):
        (hints / "other.plan").unlink()
    assert one.status()["hints"]["jobs"][0]["extents"] == before
    assert one.status()["hints"]["jobs"][0]["step"] == 0
    # An empty file says nothing, as that of a shell that has only opened it.
    (hints / "other.plan").write_bytes(b"")
    assert [job["job"] for job in one.status()["hints"]["jobs"]] == ["run"]


def test_what_others_have_not_finished_writing_is_no_fault_of_a_message(
    mount: Callable[..., Mount], bucket: Bucket, shards: list[bytes]
) -> None:
    """It may be taken the next time: so close does not say that it is not understood."""
    one = mount()
    hints = one.path / ".fusecache" / "hints"
    idle = [os.open(hints / f"idle{number}.plan", os.O_WRONLY | os.O_CREAT, 0o644) for number in range(4)]
    try:
        for file in idle:
            assert os.write(file, bytes(LONGEST_MESSAGE_BYTES)) == LONGEST_MESSAGE_BYTES
        assert refused(hints / "run.plan", plan()) == errno.EPERM
        # What is too large by itself will never be taken.
        assert refused(hints / "run.plan", bytes(LONGEST_MESSAGE_BYTES + 1)) == errno.EINVAL
    finally:
        for file in idle:
            with contextlib.suppress(OSError):
                os.close(file)
    (hints / "run.plan").write_bytes(plan())
    assert one.status()["hints"]["jobs"][0]["extents"] == SHARDS


def say(path: Path, file: str, message: bytes) -> dict:
    """Say over the control socket what a job would write into a file."""
    found, _ = find_mount(path, os.environ)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(found.socket_path))
        request = {"command": "hint", "file": file, "bytes": len(message)}
        connection.sendall(json.dumps(request).encode() + b"\n" + message)
        with connection.makefile("rb") as answers:
            return json.loads(answers.readline())


def test_the_socket_takes_hints_where_the_mount_cannot(
    mount: Callable[..., Mount], bucket: Bucket, shards: list[bytes]
) -> None:
    one = mount()
    many = tuple(f"data/{number:06d}" for number in range(20_000))
    assert say(one.path, "large.plan", plan(names=many))["result"] == "ok"
    assert one.status()["hints"]["jobs"][0]["extents"] == 20_000
    assert say(one.path, "large.plan", b"")["result"] == "ok"
    assert one.status()["hints"]["jobs"] == []
    for file, message in (("run.plan", b"nonsense"), ("../run", plan()), ("run.cursor", encode_cursor(1))):
        assert say(one.path, file, message)["result"] == "error"
    assert one.status()["hints"]["jobs"] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_whoever_sees_the_mount_may_hint(
    mount: Callable[..., Mount], bucket: Bucket, shards: list[bytes]
) -> None:
    one = mount("--allow-other", "--read-only")
    open_to_other_users(one.path)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            (one.path / ".fusecache/hints/other.plan").write_bytes(plan())
            (one.path / ".fusecache/hints/other.cursor").write_bytes(encode_cursor(2))
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert one.status()["hints"]["jobs"][0]["step"] == 2


SAMPLE = 8 * KIB
BATCH = 128


@pytest.fixture(params=["ndarray:int32:2048", "ndarray:int32"], ids=["fixed", "variable"])
def tokens(bucket: Bucket, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A dataset of 24 MiB in the bucket; its directory here."""
    with MDSWriter(tmp_path / "tokens", {"tokens": request.param}, size_limit=MIB) as writer:
        for number in range(24 * MIB // SAMPLE):
            writer.write({"tokens": np.full(SAMPLE // 4, number, np.int32)})
    for path in (tmp_path / "tokens").iterdir():
        bucket.put(f"tokens/{path.name}", path.read_bytes())
    return tmp_path / "tokens"


@pytest.mark.s3server_only
def test_the_first_batch_comes_by_its_own_bytes_and_the_shards_before_they_are_needed(
    mount: Callable[..., Mount], bucket: Bucket, tokens: Path
) -> None:
    one = mount("--read-only")
    # A shard takes ten seconds, a sample a tenth of one.
    bucket.control.set(latency=0.03, bandwidth=1e5)
    try:
        dataset = MDSDataset(one.path / "tokens")
        sampler = ElasticBatchSampler(dataset, global_batch_size=BATCH, world=World())
        before = fetched(one)
        with Hints(dataset, sampler, job="run") as hints:
            assert hints.is_sending
            wait_until(lambda: one.status()["cache"]["bytes_by_cause"]["hint"] > 0, "the first bytes")
            batches = iter(sampler)
            first = next(batches)
            assert [int(sample["tokens"][0]) for sample in dataset[first]] == first
            # By now the exact bytes of the next two steps may be here, too. Of whole shards it would be 24 MiB.
            assert fetched(one) - before <= 6 * BATCH * SAMPLE, one.status()["cache"]["bytes_by_cause"]
            bucket.control.set(bandwidth=None)
            # Later batches find whole shards: nothing is left to ask for.
            size = sum(path.stat().st_size for path in tokens.glob("*.mds"))
            wait_until(lambda: one.status()["cache"]["used_bytes"] >= size, "all shards")
            demand = one.status()["cache"]["bytes_by_cause"]["demand"]
            for ids in batches:
                assert [int(sample["tokens"][0]) for sample in dataset[ids]] == ids
            wait_until(lambda: sampler_step(one) >= len(sampler) - 16, "the cursor")
            assert one.status()["cache"]["bytes_by_cause"]["demand"] == demand
        wait_until(lambda: one.status()["hints"]["jobs"] == [], "the end of the hints")
    finally:
        bucket.control.set(latency=0.0, bandwidth=None)


def fetched(one: Mount) -> int:
    return sum(one.status()["cache"]["bytes_by_cause"].values())


def sampler_step(one: Mount) -> int:
    return one.status()["hints"]["jobs"][0]["step"]


def test_without_a_mount_nothing_is_sent_and_nothing_written(tmp_path: Path) -> None:
    with MDSWriter(tmp_path / "data", {"number": "int"}) as writer:
        for number in range(16):
            writer.write({"number": number})
    # What only looks like a mount's is none.
    (tmp_path / ".fusecache" / "hints").mkdir(parents=True)
    (tmp_path / ".fusecache" / "socket").write_text("/nowhere")
    dataset = MDSDataset(tmp_path / "data")
    sampler = ElasticBatchSampler(dataset, global_batch_size=8, world=World())
    with Hints(dataset, sampler) as hints:
        assert not hints.is_sending
        assert [len(dataset[ids]) for ids in sampler] == [8, 8]
    assert find_endpoint(tmp_path / "data") is None
    assert list((tmp_path / ".fusecache" / "hints").iterdir()) == []


def test_only_the_first_rank_of_a_machine_sends(
    mount: Callable[..., Mount], bucket: Bucket, tmp_path: Path
) -> None:
    with MDSWriter(tmp_path / "data", {"number": "int"}) as writer:
        for number in range(64):
            writer.write({"number": number})
    for path in (tmp_path / "data").iterdir():
        bucket.put(f"data/{path.name}", path.read_bytes())
    one = mount()
    dataset = MDSDataset(one.path / "data")
    for rank, sends in ((0, True), (1, False), (2, True), (3, False)):
        sampler = ElasticBatchSampler(dataset, global_batch_size=8, world=World(rank, 4, 2))
        with Hints(dataset, sampler) as hints:
            assert hints.is_sending == sends
    peer = ElasticBatchSampler(dataset, global_batch_size=8, world=World(0, 4, 2, place=Machine(0, 1, [0])))
    with Hints(dataset, peer) as hints:
        assert not hints.is_sending


@pytest.fixture
def numbers(bucket: Bucket, tmp_path: Path) -> Path:
    """A dataset of 4 096 numbers in 64 shards in the bucket, below `numbers`."""
    with MDSWriter(tmp_path / "numbers", {"number": "int"}, size_limit=1024) as writer:
        for number in range(4096):
            writer.write({"number": number})
    for path in (tmp_path / "numbers").iterdir():
        bucket.put(f"numbers/{path.name}", path.read_bytes())
    return Path("numbers")


def test_a_run_that_is_resumed_is_planned_from_where_it_goes_on(
    mount: Callable[..., Mount], bucket: Bucket, numbers: Path
) -> None:
    one = mount()

    def shown() -> dict:
        return one.status()["hints"]["jobs"][0]

    dataset = MDSDataset(one.path / numbers)
    sampler = ElasticBatchSampler(dataset, global_batch_size=64, world=World())
    steps = len(sampler)
    with Hints(dataset, sampler, job="run"):
        wait_until(lambda: one.status()["hints"]["jobs"] and shown()["planned_steps"] >= steps, "an epoch")
        assert shown()["step"] == 0
        state = sampler.state_dict()
        sampler.load_state_dict({**state, "epoch": 5, "samples": 40 * 64})
        wait_until(lambda: shown()["step"] == 5 * steps + 40 - 16, "the later epoch")
        wait_until(lambda: shown()["planned_steps"] >= steps, "an epoch from there on")
        sampler.load_state_dict({**state, "epoch": 1, "samples": 0})
        wait_until(lambda: shown()["step"] == steps - 16, "the earlier epoch")
        assert min(shown()["windows"]) == 2 * steps


def test_hinted_shards_lie_in_the_kernels_pages_before_their_samples_are_read(
    mount: Callable[..., Mount], bucket: Bucket, numbers: Path
) -> None:
    one = mount()
    dataset = MDSDataset(one.path / numbers)
    sampler = ElasticBatchSampler(dataset, global_batch_size=64, world=World())
    total = int(dataset.index.raw_bytes.sum())

    def asked() -> int:
        return sum(one.status()["cache"]["bytes_from"].values())

    opened = asked()
    with Hints(dataset, sampler):
        wait_until(lambda: asked() >= opened + total, "all shards to be read by the kernel")
        before = asked()
        assert [sample["number"] for sample in dataset[:]] == list(range(4096))
        assert asked() == before


def test_exact_bytes_are_fetched_just_ahead_of_what_is_read(
    mount: Callable[..., Mount], bucket: Bucket, shards: list[bytes]
) -> None:
    """Beyond that whole files come first, which may hold them."""
    one = mount()
    steps, path = 16, "data/0.mds"  # each in a granule of its own
    (one.path / ".fusecache/hints/run.plan").write_bytes(
        encode_plan(
            window=0, step=0, is_exact=True, paths=[path], path=[0] * steps, start=range(0, MIB, 64 * KIB),
            length=[4096] * steps, first=range(steps), span=[0] * steps,
        )
    )  # fmt: skip
    wait_until(lambda: fetched(one) == 3 * 4096, "the first steps")
    with open(one.path / path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(file.fileno(), 4096, 8 * 64 * KIB) == shards[0][8 * 64 * KIB :][:4096]

    def by_cause() -> tuple[int, int]:
        causes = one.status()["cache"]["bytes_by_cause"]
        return causes["hint"] // 4096, causes["demand"] // 4096

    # Nor does who reads what was named exactly bring more than that.
    wait_until(lambda: by_cause() == (10, 1), "steps 3 to 7, 9, and 10")


def many(count: int) -> bytes:
    """So many extents of a file that nobody has; few of them are near enough to be looked for."""
    zeros = array("q", bytes(8 * count))
    return encode_plan(
        window=0, step=0, is_exact=True, paths=["none"], path=zeros, start=zeros, length=array("q", [1]) * count,
        first=range(count), span=zeros,
    )  # fmt: skip


@pytest.fixture
def closed_door(tmp_path: Path) -> MountEndpoint:
    """A door whose files cannot be written, by root neither: what is sent goes over the socket."""
    folder = tmp_path / "closed" / ".fusecache" / "hints"
    folder.mkdir(parents=True)
    (folder / "run.plan").symlink_to("/sys/devices/system/cpu/online")
    return MountEndpoint(tmp_path / "closed")


def test_where_others_have_named_all_that_may_be_named_the_loader_goes_on_when_they_end(
    mount: Callable[..., Mount],
    bucket: Bucket,
    numbers: Path,
    closed_door: MountEndpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "loader")
    monkeypatch.setattr("loader.hints.job.LIMIT_RETRY_SECONDS", 0.5)
    one = mount()
    hints = one.path / ".fusecache" / "hints"
    monkeypatch.setenv("FUSECACHE_SOCKET", (one.path / ".fusecache/socket").read_text().strip())
    dataset = MDSDataset(one.path / numbers)

    def shown() -> dict:
        return next((job for job in one.status()["hints"]["jobs"] if job["job"] == "run"), {})

    def planned() -> bool:
        return shown().get("planned_steps", 0) >= len(sampler)

    # Nothing at all is taken: neither by a file, nor by the socket.
    share = many(MOST_EXTENTS // 4)
    for job in range(4):
        (hints / f"others{job}.plan").write_bytes(share)
    assert refused(hints / "run.plan", plan()) == errno.EPERM
    with pytest.raises(PermissionError, match="all jobs together"):
        closed_door.send("run.plan", plan())
    sampler = ElasticBatchSampler(dataset, global_batch_size=64, world=World())
    with Hints(dataset, sampler, job="run"):
        wait_until(lambda: "takes no hints" in caplog.text, "the log line")
        (hints / "others0.plan").unlink()
        wait_until(planned, "an epoch")
    # The first windows are taken: they are followed until there is room for the others.
    caplog.clear()
    monkeypatch.setattr(module, "COLD_STEPS", 32)
    monkeypatch.setattr(module, "WINDOW_SAMPLES", 64)
    # Room for the exact bytes of 32 steps, 1 289 extents, and for some windows of 40.
    (hints / "others0.plan").write_bytes(many(MOST_EXTENTS // 4 - 1800))
    sampler = ElasticBatchSampler(dataset, global_batch_size=64, world=World())
    with Hints(dataset, sampler, job="run"):
        wait_until(lambda: "takes no hints" in caplog.text, "the log line")
        assert 32 <= shown()["planned_steps"] < len(sampler)
        batches = iter(sampler)
        for _ in range(24):
            next(batches)
        wait_until(lambda: shown()["step"] == 8, "the cursor")
        assert len(shown()["windows"]) > 1
        (hints / "others0.plan").unlink()
        wait_until(planned, "an epoch")
    assert caplog.text.count("takes no hints") == 1


KILLED = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "run.plan").write_bytes(bytes.fromhex(sys.argv[2]))
(folder / "run.cursor").write_bytes(bytes.fromhex(sys.argv[3]))
print("said", flush=True)
time.sleep(600)
"""


def test_a_job_whose_process_was_killed_is_fetched_for_no_more_until_it_is_started_again(
    mount: Callable[..., Mount], bucket: Bucket, shards: list[bytes]
) -> None:
    one = mount()
    folder = one.path / ".fusecache/hints"
    said = [plan().hex(), encode_cursor(2).hex()]

    def ended() -> bool:
        (job,) = one.status()["hints"]["jobs"]
        return bool(job["ended_seconds"])

    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder), *said], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"said\n"
        assert not ended()
        job.kill()
        wait_until(ended, "the end of the job")
    assert sorted(os.listdir(folder)) == ["run.cursor", "run.plan"]
    (folder / "run.plan").write_bytes(plan())  # by another process, as of a run that is started again
    assert not ended()


def test_a_daemon_that_is_gone_disturbs_nobody(
    mount: Callable[..., Mount], bucket: Bucket, numbers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "loader")
    one = mount()
    dataset = MDSDataset(one.path / numbers)
    sampler = ElasticBatchSampler(dataset, global_batch_size=64, world=World())
    with Hints(dataset, sampler, job="run") as hints:
        wait_until(lambda: one.status()["hints"]["jobs"], "a plan")
        one.kill()
        next(iter(sampler))
        wait_until(lambda: "takes no hints" in caplog.text, "the log line")
        assert hints.is_sending
    assert caplog.text.count("takes no hints") == 1
