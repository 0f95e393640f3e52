"""Recordings: which reads become which extents, and which files are refused."""

import gzip
import json
import random

import pytest

from fusecache.engine.prefetch import timeline
from fusecache.engine.prefetch.plan_index import index_plan
from fusecache.model import recording as module
from fusecache.model.hints import HintError, decode_plan
from fusecache.model.objects import KIB, MIB
from fusecache.model.recording import Recorder, Recording


def rows(recorder: Recorder) -> list[tuple[str, int, int]]:
    """Return the extents of a recording that was encoded and decoded, in their order."""
    found = []
    plans = [decode_plan(message) for message in Recording(recorder.encode()).plans]
    assert [plan.window for plan in plans] == list(range(len(plans)))
    assert [step for plan in plans for step in plan.first] == list(range(len(recorder)))
    for plan in plans:
        found += [
            (plan.paths[number], start, length)
            for number, start, length in zip(plan.path, plan.start, plan.length, strict=True)
        ]
    return found


def test_extents_stand_in_the_order_of_their_first_reads() -> None:
    recorder = Recorder()
    for path in ("b", "a", "c/d"):
        recorder.add(path, 0, 100)
    assert rows(recorder) == [("b", 0, 100), ("a", 0, 100), ("c/d", 0, 100)]
    assert (recorder.files, recorder.nbytes) == (3, 300)


def test_sequential_reads_side_by_side_become_pieces_side_by_side() -> None:
    recorder = Recorder()
    for start in range(0, 20 * MIB, 128 * KIB):
        for path in ("one.tar", "two.tar"):
            recorder.add(path, start, 128 * KIB)
    pieces = [(0, 8), (8, 8), (16, 4)]
    expected = [(path, start * MIB, size * MIB) for start, size in pieces for path in ("one.tar", "two.tar")]
    assert rows(recorder) == expected


def test_random_reads_are_extents_of_their_own_and_each_byte_is_named() -> None:
    recorder, choice = Recorder(), random.Random(7)
    reads = [(choice.randrange(0, 64 * MIB), choice.randrange(1, 300 * KIB)) for _ in range(300)]
    for start, nbytes in reads:
        recorder.add("tokens.bin", start, nbytes)
    found = rows(recorder)
    assert 8 < len(found) <= 600
    for start, nbytes in reads:
        covered = start
        while covered < start + nbytes:
            covered = max(begin + length for _, begin, length in found if begin <= covered < begin + length)


def test_a_piece_that_is_read_again_stands_once() -> None:
    recorder = Recorder()
    for _ in range(3):
        for path in ("a", "b"):
            recorder.add(path, 0, 100)
            recorder.add(path, 100, 50)
    assert rows(recorder) == [("a", 0, 150), ("b", 0, 150)]


def test_many_extents_become_several_plans_and_no_more_than_a_daemon_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_PLAN_EXTENTS", 10)
    monkeypatch.setattr(module, "_PLAN_PATH_BYTES", 40)
    monkeypatch.setattr(module, "MOST_EXTENTS", 25)
    recorder = Recorder()
    names = [f"{number:03}{'x' * (number % 3)}" for number in range(30)]
    for name in names:
        recorder.add(name, 0, 1)
    assert [path for path, _, _ in rows(recorder)] == names[:25]
    assert recorder.left_out == 5
    assert len(Recording(recorder.encode()).plans) > 2


@pytest.mark.parametrize("length", [10, 101, 102, 500])
def test_a_daemon_takes_all_of_a_recording_however_long_its_paths_are(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    for limited in (module, timeline):
        monkeypatch.setattr(limited, "MOST_EXTENTS", 1000)
    monkeypatch.setattr(module, "_PLAN_EXTENTS", 300)
    recorder = Recorder()
    for number in range(1200):
        recorder.add(f"{number:0{length}}", 0, 1)
    assert len(recorder) + recorder.left_out == 1200
    assert len(recorder) >= 1000 * 150 // (150 + max(0, length - 100))
    daemon = timeline.Timeline()
    for message in Recording(recorder.encode()).plans:
        daemon.add("replay", index_plan(decode_plan(message)), 0.0)
    assert daemon.jobs["replay"].extents == len(recorder)


def test_a_recording_is_small() -> None:
    recorder, choice = Recorder(), random.Random(7)
    names = [f"train/n{number % 1000:08}/n{number % 1000:08}_{number}.JPEG" for number in range(20_000)]
    choice.shuffle(names)
    for name in names:
        recorder.add(name, 0, 110_000)
    assert len(recorder.encode()) < 20 * len(names)


def test_the_same_reads_make_the_same_bytes_and_each_spelling_of_a_path_is_a_path() -> None:
    one, two = Recorder(), Recorder()
    for recorder in (one, two):
        recorder.add("cafe\u0301", 0, 10)
        recorder.add("caf\u00e9", 0, 20)
    assert one.encode() == two.encode()
    assert rows(one) == [("cafe\u0301", 0, 10), ("caf\u00e9", 0, 20)]


def changed(**fields: object) -> bytes:
    """Return a recording of one read with other fields in its header."""
    recorder = Recorder()
    recorder.add("a", 0, 10)
    line, _, rest = gzip.decompress(recorder.encode()).partition(b"\n")
    return gzip.compress(json.dumps({**json.loads(line), **fields}).encode() + b"\n" + rest)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a recording"),
        (b"hello", "not a recording"),
        (changed()[:-20], "not a recording, or damaged"),
        (gzip.compress(b"[1]\n"), "not a recording"),
        (gzip.compress(b"{}\n"), "not a recording"),
        (changed(version=2), "version 2; this fusecache reads version 1"),
        (changed(plans=[10**6]), "damaged: its plans have"),
        (changed(plans=None), "damaged"),
        (changed(plans=[-1]), "damaged"),
        (changed(files="many"), "damaged"),
    ],
)
def test_other_files_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(HintError, match=words):
        Recording(content)
