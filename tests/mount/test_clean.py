"""`fusecache clean`: what it lists, what it removes, and what it leaves alone."""

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tests.s3server import Account, Fault, FaultAction
from tests.support.mounts import FUSECACHE, Mount, run, wait_until
from tests.support.s3_buckets import Bucket

pytestmark = pytest.mark.s3server_only

DAY_SECONDS = 86_400


@dataclass
class Cleaned:
    """A bucket of its own, and the command on it."""

    bucket: Bucket
    log: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def put(self, *names: str, days_ago: float = 10) -> None:
        """Store objects as another client did some days ago."""
        self.bucket.control.advance_clock(-days_ago * DAY_SECONDS)
        for name in names:
            self.bucket.put(name, b"0123456789")
        self.bucket.control.advance_clock(days_ago * DAY_SECONDS)

    def checkpoint(self, name: str, *markers: str, days_ago: float = 10) -> None:
        """Store a checkpoint of two files and its commit markers."""
        self.put(f"{name}/a.pt", f"{name}/b.pt", *(f"{name}/{each}" for each in markers), days_ago=days_ago)

    @property
    def name(self) -> str:
        """The bucket and prefix, as --yes-wipe takes them."""
        return f"{self.bucket.service.bucket}/run"

    @property
    def environment(self) -> dict[str, str]:
        service = self.bucket.service
        return {**service.environment(), "S3_ENDPOINT_URL": service.endpoint_url}

    def words(self, *flags: str | Path, place: str | Path | None = None) -> list[str]:
        words = [FUSECACHE, "clean", place or self.bucket.source, "--log", self.log, *flags]
        return [str(each) for each in words]

    def clean(
        self, *flags: str | Path, place: str | Path | None = None, status: int = 0
    ) -> "subprocess.CompletedProcess[str]":
        """Run the command, which ends with a status."""
        done = run(*self.words(*flags, place=place), env=self.environment, check=False, seconds=200)
        assert done.returncode == status, done.stdout + done.stderr
        return done

    def begin(self, *flags: str) -> "subprocess.Popen[str]":
        """Start the command."""
        process = subprocess.Popen(
            self.words(*flags),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.processes.append(process)
        return process

    def logged(self) -> list[tuple[str, str]]:
        """Return (result, name) of each line of the log."""
        rows = [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []
        return [(row["result"], row["key"].removeprefix(self.bucket.prefix)) for row in rows]

    def deletes(self) -> int:
        counts = self.bucket.control.counts()
        return counts.get("DeleteObjects", 0) + counts.get("DeleteObject", 0)


@pytest.fixture
def old(tmp_path: Path, lone_bucket: Bucket) -> Iterator[Cleaned]:
    """A bucket with a clock of its own."""
    cleaned = Cleaned(lone_bucket, tmp_path / "log" / "clean.log")
    yield cleaned
    for process in cleaned.processes:
        process.kill()
        process.communicate()


# ---- what is selected


def test_without_delete_it_only_lists(old: Cleaned) -> None:
    old.put("old.log", "older\u202e.log", days_ago=8.01)
    old.put("young.log", days_ago=6)
    done = old.clean("--older-than", "7d", "--price-per-gb", "1000000")
    assert done.stdout.splitlines() == [
        "run/old.log  10 B  8 d 0 h old",
        "run/older\\u202e.log  10 B  8 d 0 h old",
        "2 objects, 20 B, $0.02 a month would go; nothing was removed: add --delete",
    ]
    assert "cannot be seen from here" in done.stderr
    assert (len(old.bucket.names()), old.deletes(), old.logged()) == (3, 0, [])


def test_json_has_plan_and_result(old: Cleaned) -> None:
    old.put("old.log", "refused.log", days_ago=8)
    old.put("young.log", days_ago=6)
    old.checkpoint("step-1", "_SUCCESS", days_ago=8)
    listed = json.loads(old.clean("--older-than", "7d", "--json").stdout)
    rows = {row.get("key") or row["folder"]: row["result"] for row in listed.pop("rows")}
    assert rows == dict.fromkeys(("run/step-1/", "run/old.log", "run/refused.log"), "would-go")
    assert listed == {
        "result": "ok",
        "objects": 5,
        "bytes": 50,
        "dollars_a_month": None,
        "too_young_objects": 1,
    }
    for operation, key, status in (("DeleteObjects", "*", 501), ("DeleteObject", "*/refused.log", 500)):
        code = "NotImplemented" if status == 501 else "InternalError"
        fault = Fault(FaultAction.ANSWER, operation=operation, key=key, status=status, code=code)
        old.bucket.control.faults(fault)
    removed = json.loads(old.clean("--older-than", "7d", "--delete", "--json", status=1).stdout)
    assert (removed["result"], removed["objects"], removed["bytes"]) == ("stays", 4, 40)
    (stays,) = [row for row in removed["rows"] if row["result"] != "removed"]
    assert (stays["key"], stays["result"]) == ("run/refused.log", "stays")
    assert "500" in stays["error"]
    nothing = json.loads(old.clean("--glob", "none", "--json").stdout)
    assert (nothing["rows"], nothing["result"]) == ([], "ok")


def test_json_is_whole_after_errors(old: Cleaned) -> None:
    old.put("old.log")
    old.bucket.control.faults(
        Fault(FaultAction.ANSWER, operation="ListObjectsV2", nth=3, status=403, code="AccessDenied")
    )
    found = json.loads(old.clean("--older-than", "7d", "--delete", "--json", status=1).stdout)
    assert (found["rows"], found["result"], found["objects"]) == ([], "error", 0)


def test_old_objects_go_young_ones_stay(old: Cleaned) -> None:
    old.put("old.log", "a/old.log", days_ago=8)
    old.put("young.log", "a/young.log", days_ago=6)
    replace(old, bucket=replace(old.bucket, prefix="run2/")).put("old.log", days_ago=8)
    done = old.clean("--older-than", "7d", "--delete")
    assert done.stdout.endswith("2 objects, 20 B removed\n")
    assert old.bucket.names() == ["a/young.log", "young.log"]
    assert "run2/old.log" in old.bucket.control.objects()
    assert sorted(old.logged()) == [("removed", "a/old.log"), ("removed", "old.log")]
    assert (old.log.stat().st_mode & 0o777, old.deletes()) == (0o600, 1)


@pytest.mark.parametrize(
    ("flags", "gone"),
    [
        (["--prefix", "logs/"], ["logs/a.txt", "logs/deep/b.tmp"]),
        (["--suffix", ".tmp"], ["c.tmp", "logs/deep/b.tmp"]),
        (["--glob", "*.t?p"], ["c.tmp", "logs/deep/b.tmp"]),
        (["--glob", "logs/*"], ["logs/a.txt", "logs/deep/b.tmp"]),
        (["--prefix", "logs/", "--suffix", ".tmp", "--older-than", "20d"], []),
    ],
)
def test_names_select_objects(old: Cleaned, flags: list[str], gone: list[str]) -> None:
    names = ["c.tmp", "keep", "logs/a.txt", "logs/deep/b.tmp"]
    old.put(*names)
    old.clean(*flags, "--delete")
    assert old.bucket.names() == [name for name in names if name not in gone]


def test_last_hour_stays_unless_asked(old: Cleaned) -> None:
    old.put("minutes ago.tmp", days_ago=0.02)
    done = old.clean("--suffix", ".tmp", "--delete")
    assert "1 object of the last hour stay: add --even-recent" in done.stderr
    assert old.bucket.names() == ["minutes ago.tmp"]
    old.clean("--suffix", ".tmp", "--delete", "--even-recent")
    assert old.bucket.names() == []


def test_what_is_just_written_stays_and_is_named(old: Cleaned) -> None:
    old.put("just now.tmp", days_ago=-1 / 24)  # an hour later than the clock of the store
    done = old.clean("--suffix", ".tmp", "--delete", "--even-recent")
    assert "1 object of the last second stay: they were written as this command began" in done.stderr
    assert old.bucket.names() == ["just now.tmp"]


def test_directories_stay_unless_wiped(old: Cleaned) -> None:
    old.put("", "empty/", "file")
    old.clean("--older-than", "1d", "--delete")
    assert sorted(old.bucket.control.objects()) == ["run/", "run/empty/"]
    old.clean("--wipe", "--delete", "--yes-wipe", old.name)
    assert sorted(old.bucket.control.objects()) == []


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--delete"],
        ["--wipe", "--older-than", "1d"],
        ["--wipe", "--uploads"],
        ["--keep-checkpoints", "0"],
        ["--keep-checkpoints", "2", "--suffix", "x"],
        ["--incomplete", "--older-than", "1d"],
        ["--uploads", "--older-than", "59m"],
        ["--older-than", "week"],
        ["--older-than", "-1d"],
    ],
)
def test_unclear_arguments_are_refused(old: Cleaned, flags: list[str]) -> None:
    done = old.clean(*flags, status=2)
    assert old.bucket.control.counts() == {}
    if flags[:1] == ["--older-than"]:
        assert f"{flags[1]!r}: allowed is 0 or more, in seconds or with a unit, like 90" in done.stderr


# ---- checkpoints


def test_newest_whole_checkpoints_are_kept(old: Cleaned) -> None:
    for step in (5, 10, 20, 100):
        old.checkpoint(f"step-{step}", ".metadata", days_ago=10 - step / 100)
    old.checkpoint("other/step-7", ".metadata")
    old.put("step-5.txt", "train.log")
    listed = old.clean("--keep-checkpoints", "2").stdout.splitlines()
    assert [line.split("  ")[:2] for line in listed[:-1]] == [
        ["run/step-10/", "3 objects, 30 B"],
        ["run/step-5/", "3 objects, 30 B"],
    ]
    removed = old.clean("--keep-checkpoints", "2", "--delete").stdout.splitlines()
    assert [line.split("  ")[0] for line in removed] == [
        "run/step-10/",
        "run/step-5/",
        "6 objects, 60 B removed",
    ]
    left = {name.rpartition("/")[0] for name in old.bucket.names()}
    assert left == {"", "other/step-7", "step-100", "step-20"}


def test_incomplete_checkpoints_are_told_apart(old: Cleaned) -> None:
    old.checkpoint("step-1", ".metadata", days_ago=9)
    old.checkpoint("step-2", days_ago=8)
    old.checkpoint("step-3", ".metadata", days_ago=7)
    old.checkpoint("step-4", days_ago=6)
    done = old.clean("--keep-checkpoints", "1", "--delete")
    assert "run/step-2/  stays: incomplete: add --incomplete" in done.stdout
    assert "run/step-4/  stays: incomplete and newer than the newest whole one" in done.stdout
    assert {name[:6] for name in old.bucket.names()} == {"step-2", "step-3", "step-4"}
    old.clean("--keep-checkpoints", "1", "--delete", "--incomplete")
    assert {name[:6] for name in old.bucket.names()} == {"step-3", "step-4"}


def test_commit_marker_goes_first(old: Cleaned) -> None:
    """Killed at any moment, the command leaves no directory that only looks complete."""
    old.checkpoint("step-1", "zz.done", days_ago=9)
    old.checkpoint("step-2", "zz.done", days_ago=8)
    old.bucket.control.faults(Fault(FaultAction.HOLD, operation="DeleteObjects", nth=2))
    process = old.begin("--keep-checkpoints", "1", "--delete")
    old.bucket.control.wait_requests(2, "DeleteObjects", finished=False)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert old.bucket.names() == [
        "step-1/a.pt",
        "step-1/b.pt",
        "step-2/a.pt",
        "step-2/b.pt",
        "step-2/zz.done",
    ]
    old.bucket.control.pause("refuse")  # the request that is held never takes effect
    old.bucket.control.resume()
    old.bucket.control.clear_faults()
    old.clean("--older-than", "8.5d", "--delete")
    assert {name[:6] for name in old.bucket.names()} == {"step-2"}


def test_marker_that_stays_keeps_its_files(old: Cleaned) -> None:
    for step in (1, 2):
        old.checkpoint(f"step-{step}", ".metadata", days_ago=9 - step)
    old.put("final/index.json", "final/shard")
    control = old.bucket.control
    control.add_account(Account("scoped", "secret", prefix="run/", denied=frozenset()))
    control.faults(Fault(FaultAction.ANSWER, operation="DeleteObjects", status=501, code="NotImplemented"))
    control.faults(Fault(FaultAction.ANSWER, operation="DeleteObject", key="*/.metadata", status=500))
    control.faults(Fault(FaultAction.ANSWER, operation="DeleteObject", key="*/index.json", status=500))
    before = old.bucket.names()
    done = old.clean("--older-than", "1d", "--delete", status=1)
    assert "its commit marker stays, so its other files stay too" in done.stderr
    assert "run/final/shard stays: the commit marker of its directory stays" in done.stderr
    assert old.bucket.names() == before


def test_old_checkpoint_with_a_young_file_stays(old: Cleaned) -> None:
    """By age a checkpoint goes as a whole: it was written over the border of a week."""
    old.checkpoint("step-1", days_ago=7.1)
    old.put("step-1/.metadata", days_ago=6.9)
    done = old.clean("--older-than", "7d", "--delete")
    assert "run/step-1/  stays: not old enough" in done.stdout
    assert len(old.bucket.names()) == 3


def clean_while_a_file_changes(old: Cleaned, lists: int, name: str) -> tuple[int, str]:
    """Keep one of two checkpoints, and write `name` while that LIST is on its way; return exit status and output."""
    old.checkpoint("step-1", ".metadata", days_ago=9)
    old.checkpoint("step-2", ".metadata", days_ago=8)
    old.bucket.control.faults(Fault(FaultAction.HOLD, operation="ListObjectsV2", nth=lists))
    process = old.begin("--keep-checkpoints", "1", "--delete")
    old.bucket.control.wait_requests(lists, "ListObjectsV2", finished=False)
    old.bucket.put(name, b"new")
    old.bucket.control.clear_faults()
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def test_checkpoint_that_changed_since_stays(old: Cleaned) -> None:
    # LISTs: the clock, the survey, then the checkpoint once more.
    status, output = clean_while_a_file_changes(old, 3, "step-1/c.pt")
    assert (status, "run/step-1/ stays: it changed after the listing" in output) == (1, True)
    assert (len(old.bucket.names()), old.deletes()) == (7, 0)


def test_file_written_while_its_checkpoint_goes_stays(old: Cleaned) -> None:
    # LISTs: the clock, the survey, then of the checkpoint: all, its markers, its other files.
    status, output = clean_while_a_file_changes(old, 5, "step-1/a.pt")
    assert (status, "run/step-1/a.pt stays: it changed after the listing" in output) == (1, True)
    assert [name for name in old.bucket.names() if name.startswith("step-1")] == ["step-1/a.pt"]


# ---- races, errors, ends


def test_overwritten_object_stays(old: Cleaned) -> None:
    """It is overwritten between the survey and the page that is deleted."""
    old.put("a", "b")
    old.bucket.control.faults(Fault(FaultAction.HOLD, operation="ListObjectsV2", nth=3))
    process = old.begin("--older-than", "7d", "--delete")
    old.bucket.control.wait_requests(3, "ListObjectsV2", finished=False)
    old.bucket.put("a", b"new")
    old.bucket.control.clear_faults()
    process.communicate(timeout=60)
    assert (process.returncode, old.bucket.sizes()) == (0, {"a": 3})


def test_store_that_compares_keeps_what_changed(old: Cleaned) -> None:
    """As AWS does: an object is overwritten after its page was listed."""
    old.bucket.control.set_rules(conditional_deletes=True)
    old.put("a", "b")
    old.bucket.control.faults(Fault(FaultAction.HOLD, operation="DeleteObjects"))
    process = old.begin("--older-than", "7d", "--delete", "--json")
    old.bucket.control.wait_requests(1, "DeleteObjects", finished=False)
    old.bucket.put("a", b"new")
    old.bucket.control.clear_faults()
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, "run/a stays: it changed after the listing" in output) == (1, True)
    assert output.count('"key": "run/a"') == 1
    assert old.bucket.sizes() == {"a": 3}
    assert old.logged() == [("stays", "a"), ("removed", "b")]


def test_keys_that_xml_cannot_hold_go_too(old: Cleaned) -> None:
    old.put("bell\a", "line\r\nbreak", "<&>+%2B größe", "plain")
    done = old.clean("--older-than", "7d", "--delete")
    assert old.bucket.names() == []
    assert "run/bell\\x07  10 B" in done.stdout
    assert "\a" not in done.stdout + done.stderr


def test_store_without_batches_gets_single_deletes(old: Cleaned) -> None:
    old.bucket.control.faults(
        Fault(FaultAction.ANSWER, operation="DeleteObjects", status=501, code="NotImplemented")
    )
    old.put("a", "b", "c")
    old.clean("--older-than", "7d", "--delete")
    assert (old.bucket.names(), old.bucket.control.counts()["DeleteObject"]) == ([], 3)


def test_single_refused_objects_are_named(old: Cleaned) -> None:
    old.bucket.control.faults(
        Fault(FaultAction.ANSWER, operation="DeleteObjects", status=501, code="NotImplemented"),
        Fault(FaultAction.ANSWER, operation="DeleteObject", key="run/b", status=403, code="AccessDenied"),
    )
    old.put("a", "b")
    done = old.clean("--older-than", "7d", "--delete", status=1)
    assert f"DELETE s3://{old.name}/b: AccessDenied" in done.stderr
    assert (old.bucket.names(), old.logged()) == (["b"], [("removed", "a"), ("stays", "b")])


def test_key_that_may_not_delete_stops(old: Cleaned) -> None:
    old.bucket.control.add_account(
        Account(
            old.bucket.service.access_key, old.bucket.service.secret_key, denied=frozenset({"DeleteObject"})
        )
    )
    old.bucket.control.advance_clock(-10 * DAY_SECONDS)
    old.bucket.control.add_many("run/{:04}", 1001)
    old.bucket.control.advance_clock(10 * DAY_SECONDS)
    done = old.clean("--older-than", "7d", "--delete", status=1)
    assert "AccessDenied" in done.stderr
    assert (len(old.bucket.names()), old.deletes()) == (1001, 1)  # the second page is not tried


def test_interrupted_removal_can_be_repeated(old: Cleaned) -> None:
    old.bucket.control.advance_clock(-10 * DAY_SECONDS)
    old.bucket.control.add_many("run/{:05}", 3000)
    old.bucket.control.advance_clock(10 * DAY_SECONDS)
    old.bucket.control.faults(Fault(FaultAction.HOLD, operation="DeleteObjects", nth=2))
    process = old.begin("--older-than", "7d", "--delete")
    old.bucket.control.wait_requests(2, "DeleteObjects", finished=False)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    old.bucket.control.pause("refuse")  # the request that is held never takes effect
    old.bucket.control.resume()
    old.bucket.control.clear_faults()
    assert (process.returncode, len(old.bucket.names())) == (130, 2000)
    assert len(old.logged()) == 1000
    old.clean("--older-than", "7d", "--delete")
    assert (old.bucket.names(), len(old.logged())) == ([], 3000)


def test_100_000_objects_take_no_more_memory(old: Cleaned) -> None:
    def peak_kib(count: int) -> int:
        old.bucket.control.advance_clock(-10 * DAY_SECONDS)
        old.bucket.control.add_many("run/data/part-{:06}", count)
        old.bucket.control.advance_clock(10 * DAY_SECONDS)
        with open(os.devnull, "wb") as nothing:
            process = subprocess.Popen(
                old.words("--older-than", "7d", "--delete"), env=old.environment, stdout=nothing
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_maxrss

    few = peak_kib(1000)
    many = peak_kib(100_000)
    assert len(old.log.read_text().splitlines()) == 101_000
    assert many < few + 16 * 1024, (few, many)
    assert old.bucket.control.objects() == {}


@pytest.mark.parametrize(
    ("skew", "words"),
    [
        (400, "is 6 min behind the store's"),
        (-400, "is 6 min ahead of the store's"),
        (40 * DAY_SECONDS, "differs from the store's: set it"),  # says the store, which refuses the signature
    ],
)
@pytest.mark.parametrize("flags", [["--older-than", "7d"], ["--uploads"]])
def test_wrong_clock_is_refused(old: Cleaned, skew: float, words: str, flags: list[str]) -> None:
    old.put("a")
    old.bucket.control.set(clock_skew=skew)
    done = old.clean(*flags, "--delete", status=1)
    assert f"the clock of this machine {words}" in done.stderr
    old.bucket.control.set(clock_skew=0.0)
    assert old.bucket.names() == ["a"]


def test_log_is_in_the_state_directory(old: Cleaned, tmp_path: Path) -> None:
    old.put("a")
    words = [FUSECACHE, "clean", old.bucket.source, "--older-than", "7d", "--delete"]
    run(*words, env={**old.environment, "XDG_STATE_HOME": str(tmp_path)})
    (row,) = map(json.loads, (tmp_path / "fusecache" / "clean.log").read_text().splitlines())
    assert (row["key"], row["bytes"], row["result"], row["error"]) == ("run/a", 10, "removed", "")
    assert (tmp_path / "fusecache").stat().st_mode & 0o777 == 0o700


def test_log_that_cannot_be_written_is_refused(old: Cleaned, tmp_path: Path) -> None:
    old.put("a")
    (tmp_path / "file").write_text("")
    done = old.clean("--older-than", "7d", "--delete", "--log", tmp_path / "file" / "log", status=1)
    assert "name another one with --log" in done.stderr
    assert old.bucket.names() == ["a"]


# ---- wiping


def test_wipe_needs_the_name_twice(old: Cleaned) -> None:
    old.put("a", "b/c")
    old.checkpoint("step-1", ".metadata")
    for flags in (["--wipe"], ["--wipe", "--yes-wipe", old.name]):
        assert "nothing was removed: add --delete" in old.clean(*flags).stdout
    done = old.clean("--wipe", "--delete", status=1)
    assert f"confirm with --yes-wipe {old.name}" in done.stderr
    done = old.clean("--wipe", "--delete", "--yes-wipe", "run", status=1)
    assert f"'run' is not {old.name!r}" in done.stderr
    assert (len(old.bucket.names()), old.deletes()) == (5, 0)
    old.clean("--wipe", "--delete", "--yes-wipe", f"s3://{old.name}/")  # as the bucket is written elsewhere
    assert old.bucket.names() == []


@pytest.mark.parametrize(("typed", "left"), [("", 0), ("yes", 1)])
def test_wipe_asks_at_a_terminal(old: Cleaned, typed: str, left: int) -> None:
    old.put("a")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        old.words("--wipe", "--delete"), env=old.environment, stdin=theirs, stderr=subprocess.PIPE, text=True
    )
    old.processes.append(process)
    os.write(ours, f"{typed or old.name}\n".encode())
    _, errors = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert f"this removes 1 object, 10 B: everything in {old.name}" in errors
    assert (process.returncode, len(old.bucket.names())) == (left, left)


# ---- unfinished uploads


def test_unfinished_uploads_go_when_old(old: Cleaned) -> None:
    old.bucket.control.advance_clock(-2 * DAY_SECONDS)
    key = f"{old.bucket.prefix}lost"
    old.bucket.client.create_multipart_upload(Bucket=old.bucket.service.bucket, Key=key)
    old.bucket.control.advance_clock(2 * DAY_SECONDS)
    old.bucket.control.advance_clock(-DAY_SECONDS / 2)
    old.bucket.client.create_multipart_upload(
        Bucket=old.bucket.service.bucket, Key=f"{old.bucket.prefix}young"
    )
    old.bucket.control.advance_clock(DAY_SECONDS / 2)
    assert old.clean("--uploads").stdout.endswith("; nothing was aborted: add --delete\n")
    assert old.bucket.uploads() == ["lost", "young"]
    assert old.clean("--uploads", "--delete", "--older-than", "3d").stdout.endswith("not in use\n")
    assert old.clean("--uploads", "--delete").stdout.endswith("; 1 aborted\n")
    assert old.bucket.uploads() == ["young"]


# ---- mounts of this node


def test_open_file_of_a_mount_stays(old: Cleaned, mount: Callable[..., Mount]) -> None:
    old.put("open", "closed")
    old.checkpoint("step-1", ".metadata")
    one = mount(of=old.bucket)
    with open(one.path / "open", "rb"), open(one.path / "step-1" / "b.pt", "rb"):
        done = old.clean("--older-than", "7d", "--delete", status=1)
        assert "run/open stays: it is open on this node" in done.stderr
        assert "run/step-1/ stays: run/step-1/b.pt is open on this node" in done.stderr
        assert old.bucket.names() == ["open", "step-1/.metadata", "step-1/a.pt", "step-1/b.pt"]

    def is_cleaned() -> bool:
        """Clean again: a daemon hears of a close a moment later, and until then the file is open."""
        done = run(*old.words("--older-than", "7d", "--delete"), env=old.environment, check=False)
        return done.returncode == 0

    wait_until(is_cleaned, "release")
    assert old.bucket.names() == []


def test_pending_change_of_a_mount_stays(old: Cleaned, mount: Callable[..., Mount]) -> None:
    old.put("changed", "renamed", "untouched")
    old.checkpoint("step-1", ".metadata")
    # A mount of another prefix: keys are compared, not paths.
    one = mount("--settle-seconds", "3600", of=Bucket(old.bucket.service, old.bucket.client, ""))
    (one.path / "run" / "changed").write_bytes(b"new")
    (one.path / "run" / "step-1" / "c.pt").write_bytes(b"new")
    done = old.clean("--older-than", "7d", "--delete", status=1)
    assert "run/changed stays: it has a change that is not uploaded yet" in done.stderr
    assert "run/step-1/ stays: run/step-1/c.pt has a change" in done.stderr
    assert old.bucket.names() == ["changed", "step-1/.metadata", "step-1/a.pt", "step-1/b.pt"]
    one.unmount()
    assert old.bucket.get("changed") == b"new"


def test_path_in_a_mount_names_its_prefix(old: Cleaned, mount: Callable[..., Mount]) -> None:
    """Endpoint, keys and prices are the mount's: the environment of the command has none."""
    old.put("a", "deep/b", "deep/c")
    one = mount(of=old.bucket.as_r2())
    environment = {**one.bucket.service.environment(), "S3_ENDPOINT_URL": "http://127.0.0.1:1"}
    done = run(*old.words("--older-than", "7d", "--delete", place=one.path / "deep"), env=environment)
    assert done.stdout.endswith("2 objects, 20 B, $0 a month removed\n")
    assert old.bucket.names() == ["a"]


def test_keys_of_a_page_that_are_long_are_all_asked(old: Cleaned, mount: Callable[..., Mount]) -> None:
    """A page of 1 000 such keys is more than a mount accepts in one question."""
    folder = "/".join("d" * 250 for _ in range(3))
    old.bucket.control.advance_clock(-10 * DAY_SECONDS)
    old.bucket.control.add_many(f"run/{folder}/{{:03}}", 1000)
    old.bucket.control.advance_clock(10 * DAY_SECONDS)
    one = mount(of=old.bucket)
    with open(one.path / folder / "000", "rb"), open(one.path / folder / "999", "rb"):
        old.clean("--older-than", "7d", "--delete", status=1)
        assert old.bucket.names() == [f"{folder}/000", f"{folder}/999"]


def test_mount_that_does_not_tell_stops_removal(old: Cleaned, mount: Callable[..., Mount]) -> None:
    old.put("a")
    one = mount(of=old.bucket)
    os.kill(one.pid, signal.SIGKILL)
    wait_until(lambda: not one.is_alive(), "the end of the daemon")
    done = old.clean("--older-than", "7d", "--delete", status=1)
    assert f"the mount at {one.path} does not tell what it needs" in done.stderr
    assert old.bucket.names() == ["a"]
    old.clean("--older-than", "7d")
    one.detach()


def test_dead_mount_of_another_prefix_does_not_stop_removal(
    old: Cleaned, mount: Callable[..., Mount]
) -> None:
    old.put("a")
    one = mount(of=Bucket(old.bucket.service, old.bucket.client, "run-2/"))
    os.kill(one.pid, signal.SIGKILL)
    wait_until(lambda: not one.is_alive(), "the end of the daemon")
    old.clean("--older-than", "7d", "--delete")
    assert old.bucket.names() == []
    one.detach()
