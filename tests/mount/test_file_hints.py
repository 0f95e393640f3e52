"""Hints for any files, on a real mount: a DataLoader with workers, tars of WebDataset, parts of files, wrong lists."""

import io
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fusecache.model.hints import encode_plan
from fusecache.model.objects import KIB, MIB, SYMLINK_TARGET
from loader import FileHints
from loader.hints import file_hints
from loader.hints import file_hints as module
from tests.mount.conftest import FLAGS
from tests.support import ROOT
from tests.support.mounts import Mount, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only
IMAGES = 48
IMAGE_BYTES = 300 * KIB

# An ImageFolder whose samples wait for a file: so it is known that all was fetched before the first read.
TRAIN = """
import itertools, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from loader import FileHints
root, gate, kind = sys.argv[1:]

class Folder(Dataset):
    def __init__(self, root):
        classes = sorted(os.listdir(root))
        self.samples = [
            (os.path.join(root, name, file), number)
            for number, name in enumerate(classes)
            for file in sorted(os.listdir(os.path.join(root, name)))
        ]
    def __getitem__(self, index):
        path, label = self.samples[index]
        while not os.path.exists(gate):
            time.sleep(0.01)
        with open(path, "rb") as file:
            return file.read()[:1], label
    def __len__(self):
        return len(self.samples)

folder = Folder(root)
files = [path for path, _ in folder.samples]

def order():
    return RandomSampler(folder, generator=torch.Generator().manual_seed(7))

if kind == "batches":
    batches = torch.utils.data.BatchSampler(order(), 4, drop_last=False)
    loader = DataLoader(folder, batch_sampler=FileHints(files, batches), num_workers=2, collate_fn=list)
else:
    loader = DataLoader(folder, batch_size=4, sampler=FileHints(files, order()), num_workers=2, collate_fn=list)
seen = [sample for batch in loader for sample in batch]
plain = [(bytes([index]), folder.samples[index][1]) for index in order()]
assert seen == plain, (seen, plain)
print(len(seen), len(loader))
"""


def jobs(mount: Mount) -> list[dict[str, Any]]:
    """Return what the daemon says of its jobs."""
    found: list[dict[str, Any]] = json.loads((mount.path / ".fusecache/stats.json").read_text())["hints"][
        "jobs"
    ]
    return found


def fetched(mount: Mount, cause: str) -> int:
    """Return how many bytes were fetched for a cause."""
    return int(mount.status()["cache"]["bytes_by_cause"][cause])


def refuse_more_jobs(mount: Mount) -> None:
    """Send the plans of as many jobs as a daemon takes."""
    plan = encode_plan(window=0, step=0, paths=["x"], path=[0], start=[0], length=[5], first=[0], span=[0])
    for number in range(64):
        (mount.path / f".fusecache/hints/other{number}.plan").write_bytes(plan)


@pytest.fixture
def images(bucket: Bucket) -> list[str]:
    """Files of an ImageFolder; the first byte of each is its number."""
    names = [f"train/class{number % 3}/{number:03}.jpg" for number in range(IMAGES)]
    for number, name in enumerate(sorted(names)):
        bucket.put(name, bytes([number]) + os.urandom(IMAGE_BYTES - 1))
    return sorted(names)


@contextmanager
def hinted(one: Mount, images: list[str]) -> Iterator[list[Path]]:
    """Give hints for all images in their order; yield their paths once the daemon has fetched them."""
    paths = [one.path / name for name in images]
    with FileHints(paths):
        wait_until(lambda: fetched(one, "hint") >= IMAGES * IMAGE_BYTES, "the hinted bytes")
        yield paths


@pytest.fixture
def started() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start programs; none is left."""
    living: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", program, *map(str, arguments)]
        pipe = subprocess.PIPE
        living.append(subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe))
        return living[-1]

    yield start
    for process in living:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("kind", ["samples", "batches"])
def test_an_image_folder_read_by_workers_in_a_random_order_waits_for_nothing(
    mount: Callable[..., Mount], images: list[str], started, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("torch")
    one = mount()
    process = started(TRAIN, one.path / "train", tmp_path / "gate", kind)
    total = IMAGES * IMAGE_BYTES
    wait_until(lambda: fetched(one, "hint") >= total, "all images, fetched by hints", seconds=60)
    (tmp_path / "gate").touch()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output.split() == [str(IMAGES), str(IMAGES // 4)]
    assert fetched(one, "demand") == 0
    assert fetched(one, "readahead") == 0
    # The end of the process withdraws the hints.
    wait_until(lambda: jobs(one) == [], "the end of the job")


def test_the_daemon_follows_the_reads_over_passes(mount: Callable[..., Mount], images: list[str]) -> None:
    one = mount()
    paths = [one.path / name for name in images]
    with FileHints(paths, range(0, IMAGES, 2)) as hints:
        wait_until(lambda: fetched(one, "hint") >= IMAGES // 2 * IMAGE_BYTES, "the hinted bytes")
        for _ in range(2):
            for item in hints:
                assert paths[item].read_bytes()[0] == item
            (job,) = jobs(one)
            assert job["missed_bytes"] == 0
        # The kernel answers the second pass, so the daemon knows only that it began.
        wait_until(lambda: jobs(one)[0]["step"] == 0, "the second pass")
    wait_until(lambda: jobs(one) == [], "the end of the job")
    assert fetched(one, "demand") == 0


def test_the_step_is_that_of_the_last_reads(mount: Callable[..., Mount], images: list[str]) -> None:
    one = mount()
    with hinted(one, images) as paths:
        for path in paths[:30]:
            path.read_bytes()
        # It is the least of the last eight reads, and each file took one or two.
        wait_until(lambda: jobs(one)[0]["step"] >= 22, "the step")
        assert jobs(one)[0]["step"] < 30


def test_what_another_program_reads_moves_no_job(mount: Callable[..., Mount], images: list[str]) -> None:
    one = mount()
    with hinted(one, images) as paths:
        for path in paths[:10]:
            path.read_bytes()
        hit_bytes = jobs(one)[0]["hit_bytes"]
        copy = ["dd", f"if={paths[40]}", "of=/dev/null", "bs=12K", "iflag=direct"]
        subprocess.run(copy, stderr=subprocess.DEVNULL, check=True)
        wait_until(lambda: jobs(one)[0]["hit_bytes"] >= hit_bytes + IMAGE_BYTES, "the reads of dd")
        assert jobs(one)[0]["step"] < 10
        for path in paths[10:30]:
            path.read_bytes()
        wait_until(lambda: 22 <= jobs(one)[0]["step"] < 30, "the step")


def make_tar(names: list[str]) -> bytes:
    """Return a tar of samples, 40 KiB each."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in names:
            member = tarfile.TarInfo(f"{name}.bin")
            member.size = 40 * KIB
            tar.addfile(member, io.BytesIO(name.encode().ljust(40 * KIB, b".")))
    return packed.getvalue()


@pytest.fixture
def tars(bucket: Bucket) -> list[str]:
    """Six tars of 50 samples."""
    for number in range(6):
        bucket.put(f"tars/{number}.tar", make_tar([f"{number}-{sample:02}" for sample in range(50)]))
    return [f"tars/{number}.tar" for number in range(6)]


def test_tars_that_are_read_from_end_to_end_come_in_the_order_of_a_list(
    mount: Callable[..., Mount], tars: list[str]
) -> None:
    one = mount()
    paths = [one.path / name for name in (tars[4], tars[1], tars[5], tars[0])]
    with FileHints(paths) as hints:
        total = sum(path.stat().st_size for path in paths)
        wait_until(lambda: fetched(one, "hint") >= total, "the hinted tars")
        for number in hints:
            with tarfile.open(paths[number], "r|") as tar:
                assert sum(1 for _ in tar) == 50
    assert fetched(one, "demand") + fetched(one, "readahead") == 0
    assert fetched(one, "hint") < total + MIB  # and nothing of the others


WORKERS = """
import os, sys
from functools import partial
from operator import itemgetter
import torch
import webdataset as wds
from loader import FileHints
from tests.support.patience import after_first_hint

root = os.path.dirname(os.path.dirname(sys.argv[2]))
pipeline = wds.DataPipeline(
    wds.SimpleShardList([f"file:{path}" for path in sys.argv[2:]]),
    wds.split_by_worker,
    wds.shuffle(10),
    FileHints(itemgetter("url")).follow,
    partial(after_first_hint, root) if sys.argv[1] != "alone" else iter,
    wds.tarfile_to_samples(),
)
if sys.argv[1] == "alone":
    samples = iter(pipeline)
    keys = {next(samples)["__key__"]}
    print("first", flush=True)
    sys.stdin.readline()
    keys |= {sample["__key__"] for sample in samples}
else:
    loader = torch.utils.data.DataLoader(
        pipeline, batch_size=None, num_workers=2, multiprocessing_context=sys.argv[1]
    )
    keys = {sample["__key__"] for sample in loader}
print(len(keys))
"""


def test_a_shuffled_list_of_webdataset_is_looked_at_in_advance(
    mount: Callable[..., Mount], tars: list[str], started
) -> None:
    pytest.importorskip("webdataset")
    one = mount()
    sizes = [(one.path / name).stat().st_size for name in tars]
    process = started(WORKERS, "alone", *(one.path / name for name in tars))
    assert process.stdout.readline() == "first\n"
    # All but the first tar, which was asked for at once.
    causes = ("hint", "demand", "readahead")
    wait_until(lambda: sum(fetched(one, cause) for cause in causes) >= sum(sizes), "all tars")
    before = fetched(one, "demand") + fetched(one, "readahead")
    assert before <= max(sizes)
    output, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, output) == (0, "300\n"), errors
    assert fetched(one, "demand") + fetched(one, "readahead") == before


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_send_for_themselves_and_their_jobs_end_with_them(
    mount: Callable[..., Mount], tars: list[str], started, context: str
) -> None:
    pytest.importorskip("webdataset")
    pytest.importorskip("torch")
    one = mount()
    process = started(WORKERS, context, *(one.path / name for name in tars))
    output, errors = process.communicate(timeout=100)
    assert (process.returncode, output) == (0, "300\n"), errors
    # Forked workers run no handlers at their end: the daemon sees that they are gone.
    wait_until(lambda: all(job["ended_seconds"] for job in jobs(one)), "the end of the workers' jobs")
    assert fetched(one, "hint") > 0


def test_parts_of_a_file_are_fetched_without_the_rest(mount: Callable[..., Mount], bucket: Bucket) -> None:
    bucket.put("tokens.bin", bytes(40 * MIB))
    one = mount()
    path = one.path / "tokens.bin"
    documents = {"a": (path, 0, 5000), "b": [(path, 20 * MIB, 5000), (path, 30 * MIB, 5000)], "none": None}
    with FileHints(documents, ["b", "none", "a"]) as hints:
        wait_until(lambda: jobs(one) and jobs(one)[0]["fetched"] == [3], "three parts")
        assert list(hints) == ["b", "none", "a"]
    assert 3 * 5000 <= fetched(one, "hint") < 4 * MIB


def test_files_that_are_not_there_are_named_once_and_the_others_come(
    mount: Callable[..., Mount],
    images: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.1)
    caplog.set_level(logging.INFO, module.__name__)
    one = mount()
    paths = [
        one.path / "train/none/1.jpg",
        "/no/mount/2.jpg",
        *(one.path / name for name in images),
        one.path / "3",
    ]
    with FileHints(paths):
        wait_until(lambda: fetched(one, "hint") >= IMAGES * IMAGE_BYTES, "the files that are there")
        wait_until(lambda: jobs(one)[0]["skipped"] == 2, "what was skipped")
        wait_until(lambda: "cannot be fetched" in caplog.text, "the warning")
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert len(said) == 2
    assert "no hint for /no/mount/2.jpg: it is in no mount of fusecache" in said[0]
    assert "train/none/1.jpg" in said[1]
    assert one.log().count("skipped a hinted file") == 1


def test_what_the_daemon_skips_is_said_while_items_come_without_a_pause(
    mount: Callable[..., Mount],
    images: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.5)
    caplog.set_level(logging.INFO, module.__name__)
    one = mount()
    paths = [one.path / "train/none/1.jpg", *(one.path / name for name in images)]
    with FileHints(paths, itertools.cycle(range(len(paths))), ahead=20) as hints:
        deadline = time.monotonic() + 20
        for item in hints:
            if item:
                paths[item].read_bytes()
            if "cannot be fetched" in caplog.text:
                break
            assert time.monotonic() < deadline, "not said within 20 s"


def test_an_endless_order_holds_no_more_memory_the_longer_it_lasts(
    mount: Callable[..., Mount], images: list[str]
) -> None:
    path, drawn = mount().path / images[0], 0

    def part_of(item: int) -> tuple[Path, int, int]:
        nonlocal drawn
        drawn = item
        return path, item % 64 * 4096, 4096

    def held() -> int:
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, module.__file__)])  # noqa: FBT003
        return sum(each.size for each in snapshot.statistics("filename"))

    tracemalloc.start()
    try:
        with FileHints(part_of, itertools.count(), ahead=1000) as hints:
            order, sizes = iter(hints), []
            for count in (3000, 30_000):
                for item in order:
                    # The thread comes along.
                    if item % 1000 == 0:
                        wait_until(lambda item=item: drawn >= item, "the items ahead")  # type: ignore[misc]
                    if item == count:
                        break
                wait_until(lambda count=count: drawn >= count + 500, "the items ahead")  # type: ignore[misc]
                sizes.append(held())
        assert sizes[1] < 2 * sizes[0]
    finally:
        tracemalloc.stop()


def test_a_job_whose_reads_the_kernel_answers_keeps_few_extents_in_the_daemon(
    mount: Callable[..., Mount], images: list[str]
) -> None:
    one, drawn = mount(), 0

    def path_of(item: int) -> Path:
        nonlocal drawn
        drawn = item
        return one.path / images[item % IMAGES]

    with FileHints(path_of, itertools.count(), ahead=500) as hints:
        for item in hints:  # what it reads is in the page cache: the daemon sees no read
            if item % 100 == 0:
                wait_until(lambda item=item: drawn >= item, "the items ahead")  # type: ignore[misc]
            if item == 5000:
                break
        wait_until(lambda: jobs(one)[0]["step"] >= 4000, "the last plans")
        (job,) = jobs(one)
        assert job["step"] <= 5000
        assert job["extents"] <= 3 * 500


def test_a_slow_order_takes_few_plans_of_the_daemon(
    mount: Callable[..., Mount], images: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_hints, "DRAW_SECONDS", 0.0)  # each draw gives one item
    one = mount()
    paths = [one.path / images[item % IMAGES] for item in range(1000)]
    with FileHints(paths) as hints:
        for item in hints:
            if item % 10 == 0:
                wait_until(lambda: not hints._senders[os.getpid()]._new, "the look at what was drawn")
        wait_until(lambda: jobs(one)[0]["extents"] == 1000, "all items")
        assert len(jobs(one)[0]["windows"]) <= 12  # each has as many as all before


def test_what_waits_for_a_daemon_that_refuses_is_bounded_in_samples_not_in_batches(
    mount: Callable[..., Mount],
) -> None:
    one, drawn = mount(), 0
    refuse_more_jobs(one)

    def path_of(item: int) -> str:
        nonlocal drawn
        drawn = item
        return f"{one.path}/{item:0100}"

    tracemalloc.start()
    try:
        with FileHints(path_of, ([number] * 100 for number in itertools.count()), ahead=1000) as hints:
            for number, *_ in hints:
                wait_until(lambda number=number: drawn >= number, "the batches ahead")  # type: ignore[misc]
                if number == 300:
                    break
            assert tracemalloc.get_traced_memory()[0] < 2 * MIB  # 300 batches have 30 000 paths
    finally:
        tracemalloc.stop()


def test_parts_that_are_empty_cost_their_own_hints_only(
    mount: Callable[..., Mount], bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    bucket.put("tokens.bin", bytes(MIB))
    one = mount()
    lengths = [100, 0, 100, 0, -5, 100]
    starts = [0, 100, -100, 200, 300, 400]
    path = one.path / "tokens.bin"
    with FileHints(lambda item: (path, starts[item], lengths[item]), list(range(6))) as hints:
        wait_until(lambda: jobs(one) and jobs(one)[0]["extents"] == 2, "the other parts")
        assert list(hints) == list(range(6))
    assert [record.getMessage() for record in caplog.records] == [
        f"no hint for 1: offset 100 and length 0 name no bytes of {path}: give an offset of 0 or more and a length of "
        "1 or more, or None for no file"
    ]


def test_a_plan_that_is_refused_costs_its_own_hints_only(
    mount: Callable[..., Mount], images: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    one = mount()
    paths = [one.path / ("x" * (17 * MIB)), *(one.path / name for name in images)]
    with FileHints(paths) as hints:
        wait_until(lambda: fetched(one, "hint") >= IMAGES * IMAGE_BYTES, "the others")
        assert list(hints) == list(range(IMAGES + 1))
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "the hints of items 0 to 0 are left out; reading continues without them: the plan is longer than"
    )


def test_objects_and_processes_of_one_job_name_do_not_replace_each_others_hints(
    mount: Callable[..., Mount], images: list[str], started
) -> None:
    one = mount()
    paths = [str(one.path / name) for name in images]
    program = "import sys; from loader import FileHints; hints = FileHints(sys.argv[1:], job='train'); sys.stdin.read()"
    with FileHints(paths[:10], job="train"), FileHints(paths[10:30], job="train"):
        wait_until(lambda: len(jobs(one)) == 2, "two jobs")
        started(program, *paths[30:])
        wait_until(lambda: len(jobs(one)) == 3, "the job of the other process")
        extents = {job["job"]: job["extents"] for job in jobs(one)}
        assert extents == {"train.1": 10, "train.2": 20, "train.3": IMAGES - 30}


def test_a_mount_that_refuses_is_named_once_and_costs_its_own_hints_only(
    mount: Callable[..., Mount],
    images: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        module, "FIRST_SAMPLES", IMAGES // 2
    )  # the other mount's files are in the second part
    caplog.set_level(logging.INFO, module.__name__)
    full, other = mount(), mount()
    refuse_more_jobs(full)
    paths = [(full, other)[number >= IMAGES // 2].path / name for number, name in enumerate(images)]
    with FileHints(paths) as hints:
        wait_until(
            lambda: fetched(other, "hint") >= IMAGES // 2 * IMAGE_BYTES, "the files of the other mount"
        )
        assert list(hints) == list(range(IMAGES))
    assert len(caplog.records) == 1
    assert f"{full.path}: the daemon takes no hints; reading continues without them: [Errno 1]" in caplog.text


def test_a_list_of_very_long_paths_is_sent_in_several_messages(mount: Callable[..., Mount]) -> None:
    one, count = mount(), 16_000  # the first 512 in one message
    with FileHints([f"{one.path}/none/{number:01100}" for number in range(count)]):
        wait_until(lambda: jobs(one) and jobs(one)[0]["extents"] == count, "all paths", seconds=60)
        assert jobs(one)[0]["windows"] == [0, 1, 2]


def test_a_folder_behind_a_symlink_is_the_folder_that_it_names(
    mount: Callable[..., Mount], bucket: Bucket, images: list[str]
) -> None:
    bucket.put("latest", b"", {"mode": "120777", SYMLINK_TARGET: "train"})
    one, half = mount(), IMAGES // 2
    paths = [
        *(one.path / name for name in images[:half]),
        *(one.path / name.replace("train", "latest") for name in images[half:]),
    ]
    with FileHints(paths):
        wait_until(lambda: fetched(one, "hint") >= IMAGES * IMAGE_BYTES, "the hinted bytes")
        assert jobs(one)[0]["skipped"] == 0


def test_links_outside_the_mount_stand_for_the_files_that_they_name(
    mount: Callable[..., Mount], images: list[str], tmp_path: Path
) -> None:
    one = mount()
    (tmp_path / "real").mkdir()
    (tmp_path / "chosen").mkdir()
    for number, name in enumerate(images):
        (tmp_path / "real" / str(number)).symlink_to(one.path / name)
        (tmp_path / "chosen" / str(number)).symlink_to(f"../real/{number}")  # a link to a link
    with FileHints([tmp_path / "chosen" / str(number) for number in range(IMAGES)]):
        wait_until(lambda: fetched(one, "hint") >= IMAGES * IMAGE_BYTES, "the hinted bytes")
        assert jobs(one)[0]["skipped"] == 0


@pytest.mark.parametrize("when", ["before the first pass", "before the second"])
def test_a_mount_that_comes_later_gets_the_hints_of_the_next_pass(
    mount: Callable[..., Mount], images: list[str], tmp_path: Path, when: str
) -> None:
    (tmp_path / "later").mkdir()
    paths = [tmp_path / "later" / name for name in images]
    with FileHints(paths) as hints:
        wait_until(lambda: hints._senders[os.getpid()]._step == IMAGES, "the look at the empty folder")
        if when == "before the second":
            list(hints)
        one = mount(path=tmp_path / "later")
        assert list(hints) == list(range(IMAGES))
        wait_until(lambda: fetched(one, "hint") >= IMAGES * IMAGE_BYTES, "the hinted bytes")


def test_files_of_a_mount_below_another_are_fetched_by_their_own_daemon(
    mount: Callable[..., Mount], images: list[str]
) -> None:
    outer, half = mount(), IMAGES // 2
    (outer.path / "inner").mkdir()
    inner = mount(path=outer.path / "inner")
    # The command line asks the daemon of the outer mount.
    inner.pid = json.loads((inner.path / ".fusecache/stats.json").read_text())["pid"]
    paths = [
        *(outer.path / name for name in images[:half]),
        *(inner.path / name for name in images[half:]),
    ]
    try:
        with FileHints(paths):
            for one in (outer, inner):
                wait_until(lambda one=one: jobs(one), "its job")  # type: ignore[misc]
                wait_until(lambda one=one: jobs(one)[0]["fetched"] == [half], "its half")  # type: ignore[misc]
                assert jobs(one)[0]["extents"] == half
                assert jobs(one)[0]["skipped"] == 0
    finally:
        inner.detach()
        wait_until(lambda: not inner.is_alive(), "the end of the inner daemon")


def test_an_order_that_never_happens_costs_its_own_bytes_and_is_said_once(
    mount: Callable[..., Mount],
    bucket: Bucket,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is fetched for it is what it names, and what is read is right."""
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.1)
    caplog.set_level(logging.INFO, module.__name__)
    names = [f"{kind}/{number}.bin" for kind in ("planned", "read") for number in range(9)]
    for number, name in enumerate(names):
        bucket.put(name, bytes([number]) * (32 * MIB))
    one = mount()
    paths = [one.path / name for name in names]

    def read_others() -> None:
        for number, path in list(enumerate(paths))[9:]:
            with path.open("rb") as file:
                os.posix_fadvise(
                    file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED
                )  # the daemon is to see the reads
                assert file.read() == bytes([number]) * (32 * MIB)

    with FileHints(paths[:9]) as hints:
        planned = 9 * 32 * MIB
        wait_until(lambda: fetched(one, "hint") >= planned, "what is planned", seconds=60)
        read_others()
        assert not jobs(one)[0]["is_astray"]  # a program may read a checkpoint first
        assert paths[0].read_bytes()[0] == 0
        read_others()
        wait_until(lambda: "only files that no hint names are read" in caplog.text, "the words")
        read_others()
        assert list(hints) == list(range(9))
        assert jobs(one)[0]["is_astray"]
        assert fetched(one, "hint") == planned
    assert len(caplog.records) == 1


def test_a_function_that_fails_costs_its_own_hints_only(
    mount: Callable[..., Mount], images: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    one = mount()
    table = {number: one.path / name for number, name in enumerate(images) if number % 2}
    with FileHints(table.__getitem__, list(range(IMAGES))) as hints:
        wait_until(lambda: fetched(one, "hint") >= IMAGES // 2 * IMAGE_BYTES, "the others")
        assert list(hints) == list(range(IMAGES))
    assert [record.getMessage() for record in caplog.records] == [
        "no hint for item 0 of the order: `files` has no path for it (KeyError: 0)"
    ]


def test_the_first_files_are_fetched_while_the_list_is_still_looked_at(
    mount: Callable[..., Mount], images: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_SAMPLES", 8)
    one, gate = mount(), threading.Event()

    def path_of(item: int) -> Path:
        assert item < 8 or gate.wait(60)
        return one.path / images[item]

    with FileHints(path_of, list(range(IMAGES))) as hints:
        wait_until(lambda: fetched(one, "hint") >= 8 * IMAGE_BYTES, "the first files")
        assert fetched(one, "hint") == 8 * IMAGE_BYTES
        gate.set()
        wait_until(lambda: fetched(one, "hint") >= IMAGES * IMAGE_BYTES, "the others")
        assert list(hints) == list(range(IMAGES))


def test_a_daemon_that_was_started_again_gets_the_plans_again(
    mount: Callable[..., Mount], images: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.1)
    monkeypatch.setattr("loader.hints.job.RETRY_SECONDS", 0.1)
    one = mount()
    with FileHints([one.path / name for name in images]):
        wait_until(lambda: jobs(one), "the job")
        one.kill()  # an unmount may find the hint file open, which is looked at ten times a second here
        one.start(*FLAGS, "--cache-dir", str(tmp_path))
        wait_until(lambda: jobs(one), "the job, again")
        wait_until(lambda: fetched(one, "hint") >= IMAGES * IMAGE_BYTES, "the hinted bytes")


def test_a_restarted_daemon_gets_the_plans_again_before_new_ones(
    mount: Callable[..., Mount], images: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "CHECK_SECONDS", 3600.0)  # only a new plan leads to a message
    one = mount()
    with FileHints([one.path / name for name in images], ahead=20) as hints:
        order = iter(hints)
        for _ in range(6):
            next(order)
        wait_until(lambda: jobs(one) and jobs(one)[0]["windows"] == [0, 1], "two windows")
        one.unmount()
        one.start(*FLAGS, "--cache-dir", str(tmp_path))
        for _ in range(5):
            next(order)
        wait_until(lambda: jobs(one) and jobs(one)[0]["windows"][-1] in (1, 2), "a window after the start")
        wait_until(lambda: jobs(one)[0]["windows"] == [0, 1, 2], "all windows")
        assert jobs(one)[0]["extents"] == 30


def test_each_of_two_mounts_gets_the_hints_of_each_pass(
    mount: Callable[..., Mount], images: list[str]
) -> None:
    both = mount(), mount()
    paths = [both[number >= IMAGES // 2].path / name for number, name in enumerate(images)]
    with FileHints(paths) as hints:
        for item in hints:
            assert paths[item].read_bytes()[0] == item
        wait_until(lambda: jobs(both[1])[0]["step"] > 30, "the last steps of the pass")
        assert next(iter(hints)) == 0
        for one in both:
            wait_until(lambda one=one: jobs(one)[0]["step"] == 0, "the next pass")  # type: ignore[misc]
            assert jobs(one)[0]["windows"] == [0]
            assert jobs(one)[0]["extents"] == IMAGES // 2


KILLED = """
import sys, time
from loader import FileHints
from loader.base.mount_endpoint import MountEndpoint
send = MountEndpoint.send
def send_and_say(endpoint, file, message):
    send(endpoint, file, message)
    print(file, flush=True)
MountEndpoint.send = send_and_say
hints = FileHints(sys.argv[1:])
time.sleep(100)
"""


def test_a_killed_process_ends_its_job(mount: Callable[..., Mount], images: list[str], started) -> None:
    one = mount()
    process = started(KILLED, *(one.path / name for name in images))
    assert process.stdout.readline().endswith(".plan\n")
    # From then on the daemon knows which process the job is: one that sends a plan alone may be a shell that copies it.
    assert process.stdout.readline().endswith(".cursor\n")
    assert jobs(one)[0]["ended_seconds"] == 0
    process.send_signal(signal.SIGKILL)
    wait_until(lambda: jobs(one)[0]["ended_seconds"], "the end of the job")


def test_an_endless_order_is_looked_at_a_part_at_a_time(
    mount: Callable[..., Mount], images: list[str]
) -> None:
    one = mount()
    paths = [one.path / name for name in images]
    with FileHints(paths, itertools.cycle(range(IMAGES)), ahead=20) as hints:
        order = iter(hints)
        assert next(order) == 0
        wait_until(lambda: fetched(one, "hint") >= 20 * IMAGE_BYTES, "the first files")
        assert fetched(one, "hint") == 20 * IMAGE_BYTES
        assert [next(order) for _ in range(5)] == [1, 2, 3, 4, 5]
        wait_until(lambda: fetched(one, "hint") >= 25 * IMAGE_BYTES, "five more")
