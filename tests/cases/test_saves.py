"""Checkpoints that are large: saved, read back, seen by another node, replaced."""

import os
import sqlite3
import threading
from pathlib import Path

import numpy
import pytest

from tests.mount.conftest import Place
from tests.s3server import Fault, FaultAction
from tests.support.mounts import Mount, pattern, read_newest, wait_until
from tests.support.s3_buckets import WRITES

torch = pytest.importorskip("torch")

MIB, GIB = 2**20, 2**30
HOLD_COMPLETE = Fault(FaultAction.HOLD, operation="CompleteMultipartUpload")


@pytest.mark.case(1)
@pytest.mark.timeout(900)
def test_three_gibibytes_are_saved_without_an_answer_of_the_bucket_and_read_back_at_once(
    mount, bucket, expect_log
):
    node: Mount = mount("--cache-size", "8GiB")
    bucket.control.faults(Fault(FaultAction.HOLD, method="[PD]*", key=f"{bucket.prefix}*"))
    weights = torch.arange(3 * GIB // 4, dtype=torch.int32)
    torch.save({"weights": weights, "step": 7}, node.path / "model.pt")
    loaded = torch.load(node.path / "model.pt", mmap=True)
    assert loaded["step"] == 7
    assert torch.equal(loaded["weights"], weights)
    assert bucket.names() == []
    del loaded
    (node.path / "model.pt").unlink()
    bucket.control.clear_faults()
    node.sync()
    assert bucket.names() == []
    # A Create that is held for a minute is given up and sent anew: it begins an upload that nobody knows. So does the
    # last one, if the daemon paused after it.
    known = 0 if "upload failed, will retry" in node.log() else 1
    create = ("CreateMultipartUpload", "model.pt")
    wait_until(
        lambda: len(bucket.uploads()) <= bucket.operations().count(create) - known,
        "the end of the upload that nobody will complete",
    )
    for words in ("upload failed, will retry", "publish failed, will retry"):
        if words in node.log():  # held for longer than a request may take
            expect_log(words)


class Watch:
    """Another node's user, who looks for a file all the time. seen: what was there, by its size and first bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended = threading.Event()
        self.seen: set[tuple[int, bytes]] = set()
        self.turns = 0
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.02):
            data = read_newest(self._path)
            if data is not None:
                self.seen.add((len(data), data[:8]))
            self.turns += 1


@pytest.mark.case(2)
def test_another_node_sees_nothing_of_a_large_file_and_then_all_of_it(place: Place):
    place.bucket.control.faults(HOLD_COMPLETE)
    data = pattern(130 * MIB)
    with Watch(place.second / "model.pt") as watch:
        (place.path / "model.pt").write_bytes(data)
        place.bucket.control.wait_requests(
            1, "CompleteMultipartUpload", f"{place.bucket.prefix}model.pt", finished=False, timeout=60
        )
        turns = watch.turns
        wait_until(lambda: watch.turns >= turns + 3, "some looks while the last request is held")
        assert watch.seen == set()
        assert os.listdir(place.second) == []
        place.bucket.control.clear_faults()
        place.sync()
        wait_until(lambda: watch.seen, "the file on the other node")
    assert watch.seen == {(len(data), data[:8])}
    assert (place.second / "model.pt").read_bytes() == data


@pytest.mark.case(3)
def test_safetensors_over_a_published_file_leave_the_old_one_until_complete(place: Place):
    safetensors = pytest.importorskip("safetensors.torch")
    old, new = ({"weights": torch.full((70 * MIB // 4,), value)} for value in (1.0, 2.0))
    path = place.path / "model.safetensors"
    safetensors.save_file(old, path)
    place.sync()
    before = place.bucket.get(path.name)
    place.bucket.control.clear_log()
    place.bucket.control.faults(HOLD_COMPLETE)
    safetensors.save_file(new, path)
    assert torch.equal(safetensors.load_file(path)["weights"], new["weights"])
    key = place.bucket.prefix + path.name
    place.bucket.control.wait_requests(1, "CompleteMultipartUpload", key, finished=False, timeout=60)
    assert place.bucket.get(path.name) == before
    assert torch.equal(safetensors.load_file(place.second / path.name)["weights"], old["weights"])
    place.bucket.control.clear_faults()
    place.sync()
    assert {name for _, name in place.bucket.operations(*WRITES)} == {path.name}  # no temporary name
    assert not place.bucket.operations("CopyObject", "UploadPartCopy")
    assert place.bucket.get(path.name) == path.read_bytes() != before
    wait_until(
        lambda: read_newest(place.second / path.name) == path.read_bytes(), "the new file on the other node"
    )


@pytest.mark.case(14)
def test_arrays_tables_and_databases_changed_in_place_are_right_on_a_node_with_another_cache(mount, bucket):
    h5py = pytest.importorskip("h5py")
    arrays = {"a": numpy.arange(300_000).reshape(300, 1000), "b": numpy.linspace(0, 1, 5001)}
    first: Mount = mount()
    numpy.savez(first.path / "arrays.npz", **arrays)
    with h5py.File(first.path / "table.h5", "w") as table:
        table["kept"] = arrays["a"]
        table.create_dataset("grown", data=arrays["b"], maxshape=(None,), chunks=(512,))
    first.sync()
    with h5py.File(first.path / "table.h5", "r+") as table:
        table["kept"][7:9, 100:900] = -1
        table["grown"].resize((6000,))
        table["grown"][5500:] = 3.0
        table["new"] = arrays["b"][::2]
    _write_database(first.path / "numbers.db")
    first.unmount()

    other: Mount = mount()
    with numpy.load(other.path / "arrays.npz") as loaded:
        assert sorted(loaded) == ["a", "b"]
        assert all(numpy.array_equal(loaded[name], arrays[name]) for name in arrays)
    kept = arrays["a"].copy()
    kept[7:9, 100:900] = -1
    with h5py.File(other.path / "table.h5", "r") as table:
        assert numpy.array_equal(table["kept"][:], kept)
        assert numpy.array_equal(table["grown"][:5001], arrays["b"])
        assert (table["grown"][5001:5500] == 0).all()
        assert (table["grown"][5500:] == 3.0).all()
        assert numpy.array_equal(table["new"][:], arrays["b"][::2])
    with sqlite3.connect(other.path / "numbers.db") as database:
        assert database.execute("pragma journal_mode").fetchone() == ("wal",)
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        found = database.execute("select count(*), sum(square = -1), sum(square) from numbers").fetchone()
    database.close()
    assert found == (2000, 200, sum(n * n for n in range(2000) if n % 10) - 200)


def _write_database(path: Path) -> None:
    """Fill a database, with a checkpoint of its write-ahead log in the middle and one at the end."""
    with sqlite3.connect(path) as database:
        database.execute("pragma journal_mode=wal")
        database.execute("create table numbers (n integer primary key, square integer)")
        for start in range(0, 2000, 100):
            rows = [(n, n * n) for n in range(start, start + 100)]
            database.executemany("insert into numbers values (?, ?)", rows)
            database.commit()
            if start == 1000:
                database.execute("pragma wal_checkpoint(truncate)")
        database.execute("update numbers set square = -1 where n % 10 = 0")
        database.commit()
    database.close()
