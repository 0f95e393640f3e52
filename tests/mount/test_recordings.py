"""`fusecache record` and `replay` on real mounts: what one reads, another fetches before it is read."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusecache.daemon.control_server import REPORT_SECONDS
from fusecache.engine.prefetch.timeline import MOST_PLANS
from fusecache.model.hints import decode_plan
from fusecache.model.objects import KIB, MIB
from fusecache.model.recording import Recorder, Recording
from tests.mount.conftest import ExpectedLog
from tests.support.mounts import FUSECACHE, ON_PYFUSE3, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only
FILES = 24
FILE_BYTES = 300 * KIB
BIG_BYTES = 20 * MIB


@pytest.fixture
def files(bucket: Bucket) -> list[str]:
    """Names in the order of an epoch: small files in a random order, and parts of a large one between them."""
    names = [f"train/{number:02}.jpg" for number in range(FILES)]
    for name in names:
        bucket.put(name, os.urandom(FILE_BYTES))
    bucket.put("tokens.bin", os.urandom(BIG_BYTES))
    random.Random(3).shuffle(names)
    return names


def read_epoch(mount: Mount, names: list[str]) -> None:
    """Read an epoch."""
    with open(mount.path / "tokens.bin", "rb", buffering=0) as tokens:
        for number, name in enumerate(names):
            assert len((mount.path / name).read_bytes()) == FILE_BYTES
            os.pread(tokens.fileno(), 5000, (number * 7 % FILES) * (BIG_BYTES // FILES))


class Recordings:
    """Runs of `fusecache record`."""

    def __init__(self) -> None:
        self.living: list[subprocess.Popen[str]] = []

    def start(self, *words: str | Path) -> "subprocess.Popen[str]":
        """Return when the daemon records."""
        command = [str(word) for word in (FUSECACHE, "record", *words)]
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.living.append(process)
        assert process.stderr is not None
        assert "recording the reads of" in process.stderr.readline()
        return process


@pytest.fixture
def recordings() -> Iterator[Recordings]:
    """None is left."""
    found = Recordings()
    yield found
    for process in found.living:
        process.kill()
        process.communicate()


def ended(process: "subprocess.Popen[str]", number: int = signal.SIGTERM) -> str:
    """End a recording by a signal; return what it printed."""
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output


def paths_of(file: Path) -> list[str]:
    """Return the paths of a recording's extents, in their order."""
    plans = [decode_plan(message) for message in Recording(file.read_bytes()).plans]
    return [plan.paths[number] for plan in plans for number in plan.path]


def job_of(mount: Mount) -> dict[str, Any]:
    """Return what the daemon says of its only job."""
    (job,) = json.loads((mount.path / ".fusecache/stats.json").read_text())["hints"]["jobs"]
    found: dict[str, Any] = job
    return found


def fetched(mount: Mount, cause: str) -> int:
    """Return how many bytes were fetched for a cause."""
    return int(mount.status()["cache"]["bytes_by_cause"][cause])


def test_the_next_node_fetches_what_an_epoch_read_before_it_is_read(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path
) -> None:
    one, file = mount(), tmp_path / "epoch.rec"
    recording = recordings.start(file, one.path)
    read_epoch(one, files)
    assert "of 25 files" in ended(recording)
    order = [path for path in paths_of(file) if path != "tokens.bin"]
    assert list(dict.fromkeys(order)) == files

    two = mount()
    assert "as job replay-epoch.rec" in run(FUSECACHE, "replay", file, two.path).stdout
    wait_until(lambda: job_of(two)["fetched"] == [len(paths_of(file))], "the replay", seconds=60)
    nbytes = fetched(two, "hint")
    assert FILES * FILE_BYTES <= nbytes < FILES * FILE_BYTES + BIG_BYTES
    wait_until(lambda: job_of(two)["skipped"] == 0, "no file is missing")
    read_epoch(two, files)
    assert job_of(two)["missed_bytes"] == 0
    assert job_of(two)["hit_bytes"] >= FILES * FILE_BYTES
    assert fetched(two, "demand") + fetched(two, "readahead") == 0
    # The daemon follows the reads to the end of the recording.
    wait_until(lambda: job_of(two)["step"] >= len(paths_of(file)) - 10, "the last steps")


def test_what_the_page_cache_has_is_recorded_too(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path
) -> None:
    one, file = mount(), tmp_path / "epoch.rec"
    read_epoch(one, files)
    recording = recordings.start(file, one.path)
    read_epoch(one, files)
    ended(recording, signal.SIGINT)
    assert set(paths_of(file)) == {*files, "tokens.bin"}


def test_only_reads_below_a_path_are_recorded_and_the_file_is_replaced(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path
) -> None:
    one, file = mount(), tmp_path / "epoch.rec"
    file.write_text("old")
    recording = recordings.start(file, one.path / "train")
    read_epoch(one, files)
    ended(recording)
    assert set(paths_of(file)) == set(files)
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".")] == []


@pytest.mark.parametrize("way", ["terminal", "nohup"])
def test_the_end_of_its_terminal_ends_a_recording_unless_it_runs_below_nohup(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path, way: str
) -> None:
    one, file = mount(), tmp_path / "epoch.rec"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if way == "nohup" else signal.SIG_DFL)
    try:
        recording = recordings.start(file, one.path)
    finally:
        signal.signal(signal.SIGHUP, before)
    (one.path / files[0]).read_bytes()
    if way == "nohup":
        recording.send_signal(signal.SIGHUP)
        (one.path / files[1]).read_bytes()
        ended(recording)
    else:
        ended(recording, signal.SIGHUP)
    assert paths_of(file) == files[: 1 + (way == "nohup")]


def test_an_unmount_ends_a_recording_and_keeps_it(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path
) -> None:
    one, file = mount(), tmp_path / "epoch.rec"
    recording = recordings.start(file, one.path)
    read_epoch(one, files)
    one.unmount()
    _, errors = recording.communicate(timeout=60)
    assert recording.returncode == 0, errors
    assert set(paths_of(file)) == {*files, "tokens.bin"}


def test_a_killed_daemon_ends_a_recording_and_what_it_reported_is_kept(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path
) -> None:
    one, file = mount(), tmp_path / "epoch.rec"
    recording = recordings.start(file, one.path)
    os.kill(one.pid, signal.SIGKILL)
    _, errors = recording.communicate(timeout=60)
    assert recording.returncode == 1
    assert "the recording ends: " in errors
    assert f"{file} is not written: nothing was read" in errors
    assert not file.exists()


def test_a_killed_recording_leaves_nothing(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path
) -> None:
    one, file = mount(), tmp_path / "epoch.rec"
    recording = recordings.start(file, one.path)
    recording.kill()
    recording.wait()
    read_epoch(one, files)
    assert not file.exists()
    file.touch()
    recording = recordings.start(file, one.path)  # and the daemon records again
    (one.path / files[0]).read_bytes()
    ended(recording)
    assert paths_of(file) == [files[0]]


def test_files_that_are_gone_are_named_and_the_others_are_fetched(
    mount: Callable[..., Mount], files: list[str], tmp_path: Path
) -> None:
    recorder = Recorder()
    for name in ("train/gone.jpg", *files):
        recorder.add(name, 0, FILE_BYTES)
    (tmp_path / "half.rec").write_bytes(recorder.encode())
    one = mount()
    run(FUSECACHE, "replay", tmp_path / "half.rec", one.path)
    wait_until(lambda: fetched(one, "hint") >= FILES * FILE_BYTES, "the files that are there", seconds=60)
    wait_until(lambda: job_of(one)["skipped"] == 1, "the one that is gone")
    assert job_of(one)["skipped_path"] == "train/gone.jpg"
    assert one.log().count("skipped a hinted file") == 1


def test_a_replay_that_is_refused_in_part_leaves_nothing(
    mount: Callable[..., Mount], files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fusecache.model.recording._PLAN_EXTENTS", 1)
    recorder = Recorder()
    for number in range(MOST_PLANS + 1):
        recorder.add(files[0] if not number else f"train/{number}.gone", 0, 100)
    (tmp_path / "long.rec").write_bytes(recorder.encode())
    one = mount()
    done = run(FUSECACHE, "replay", tmp_path / "long.rec", one.path, check=False)
    assert (done.returncode, f"may have {MOST_PLANS} plans" in done.stderr) == (1, True), done.stderr
    assert os.listdir(one.path / ".fusecache/hints") == []


def test_a_recording_of_other_files_or_another_version_is_refused_in_one_line(
    mount: Callable[..., Mount], files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, file = mount(), tmp_path / "epoch.rec"
    recorder = Recorder()
    recorder.add("other/1.jpg", 0, 100)

    def refusal() -> str:
        done = run(FUSECACHE, "replay", file, one.path, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
        return done.stderr

    file.write_bytes(recorder.encode())
    assert "has none of its files, such as other/1.jpg" in refusal()
    monkeypatch.setattr("fusecache.model.recording.VERSION", 2)
    file.write_bytes(recorder.encode())
    assert "a recording of version 2" in refusal()
    file.write_bytes(b"text")
    assert f"{file}: not a recording" in refusal()
    file.unlink()
    assert "No such file" in refusal()


def test_a_place_that_cannot_be_written_is_named_before_the_epoch(
    mount: Callable[..., Mount], tmp_path: Path
) -> None:
    one = mount()
    done = run(FUSECACHE, "record", tmp_path / "none/epoch.rec", one.path, check=False)
    assert done.returncode == 1
    assert "name a directory that you can write" in done.stderr


@pytest.mark.parametrize("way", ["kill", "upgrade"])
def test_a_recording_goes_on_with_the_next_daemon_of_the_mount(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path, way: str
) -> None:
    if ON_PYFUSE3:
        pytest.skip("on pyfuse3 a mount ends with its daemon")
    one, file = mount("--keep-mounted"), tmp_path / "epoch.rec"
    recording = recordings.start(file, one.path)
    first, later = files[:5], files[5:]
    for name in first:
        (one.path / name).read_bytes()
    time.sleep(2 * REPORT_SECONDS)  # what was reported is kept
    if way == "kill":
        os.kill(one.pid, signal.SIGKILL)
    else:
        run(FUSECACHE, "upgrade", one.path)
    assert recording.stderr is not None
    assert "another daemon serves" in recording.stderr.readline()
    one.pid = one.status()["pid"]
    for name in later:
        (one.path / name).read_bytes()
    ended(recording)
    assert list(dict.fromkeys(paths_of(file))) == files


def test_a_signal_ends_a_recording_that_waits_for_the_next_daemon(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path
) -> None:
    if ON_PYFUSE3:
        pytest.skip("on pyfuse3 a mount ends with its daemon")
    one, file = mount("--keep-mounted"), tmp_path / "epoch.rec"
    recording = recordings.start(file, one.path)
    for name in files:
        (one.path / name).read_bytes()
    time.sleep(2 * REPORT_SECONDS)  # what was reported is kept
    keeper = one.keeper()
    os.kill(keeper, signal.SIGSTOP)  # it starts no other daemon
    try:
        os.kill(one.pid, signal.SIGKILL)
        wait_until(Path(f"/proc/{recording.pid}/task/{recording.pid}/children").read_text, "its wait")
        ended(recording)
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert list(dict.fromkeys(paths_of(file))) == files
    one.pid = one.status()["pid"]


@pytest.mark.parametrize("way", ["unmount", "kill"])
def test_a_recording_ends_with_its_mount(
    mount: Callable[..., Mount], files: list[str], recordings: Recordings, tmp_path: Path, way: str
) -> None:
    one, file = mount(), tmp_path / "epoch.rec"
    recording = recordings.start(file, one.path)
    for name in files:
        (one.path / name).read_bytes()
    if way == "unmount":
        one.unmount()
    else:
        time.sleep(2 * REPORT_SECONDS)
        one.kill()
    output, errors = recording.communicate(timeout=60)
    assert (recording.returncode, f"of {FILES} files" in output) == (0, True), errors
    assert "the recording ends: " in errors


def test_what_cannot_be_recorded_or_written_is_refused_at_once(
    mount: Callable[..., Mount], files: list[str], expect_log: ExpectedLog, tmp_path: Path
) -> None:
    """An epoch later it would be too late."""
    expect_log("not created, as train/ is immutable")
    one = mount("--immutable", "train/")
    for words, text in (
        ((tmp_path, one.path), f"{tmp_path} is a directory: name the file"),
        ((one.path / "train" / "x.rec", one.path), "name a directory that you can write"),
        ((tmp_path / "no" / "x.rec", one.path), "name a directory that you can write"),
        (
            (tmp_path / "x.rec", one.path / "nope"),
            f"{one.path}/nope does not exist: name a file or a directory",
        ),
    ):
        done = run(FUSECACHE, "record", *words, check=False)
        assert (done.returncode, text in done.stderr) == (1, True), done.stderr
    assert not list(tmp_path.glob("*.rec*"))
