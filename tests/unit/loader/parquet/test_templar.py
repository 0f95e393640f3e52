"""Templar-style datasets: what a seed chooses, texts of pages, tokens kept on disk, and what contradicts itself."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Event, Thread, current_thread
from threading import enumerate as enumerate_threads
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loader import DatasetError, LoaderError, ParquetDataset, ShardError, TemplarDataset
from loader.base import single_flight
from loader.errors import ArgumentError
from loader.mds.shard_files import DecompressedCache
from loader.parquet.templar import METADATA_NAME, SIZES_NAME, Page
from tests.support import ROOT

BUCKET = "0123456789abcdef/web-text/"
# Rows of each shard of each config.
SHARDS = {"CC-1": (500, 70), "CC-2": (300, 260)}

METADATA = """
configs:
- config_name: default
  features: [{name: text, dtype: string}, {name: url, dtype: string}]
  data_files: [{split: train, path: "CC-1/*.parquet"}, {split: train, path: "CC-2/*.parquet"}]
- config_name: CC-2
  data_files: [{split: train, path: "CC-2/*.parquet"}]
- config_name: CC-1
  data_files: [{split: train, path: "CC-1/*.parquet"}]
- config_name: CC-3
  data_files: [{split: train, path: "CC-3/*.parquet"}]
"""


def text_of(shard: str, row: int) -> str:
    return f"{shard} row {row}"


def write(root: Path) -> Path:
    sizes: dict[str, Any] = {"default": {"split": None, "shards": [], "total_rows": 0}}
    for config, counts in SHARDS.items():
        shards = []
        for number, rows in enumerate(counts):
            name = f"{config}/{number:03d}.parquet"
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = [text_of(name, row) for row in range(rows)]
            pq.write_table(pa.table({"text": texts, "url": ["u"] * rows}), path, row_group_size=120)
            shards.append({"path": BUCKET + name, "num_rows": rows, "byte_size": path.stat().st_size})
        sizes[config] = {"split": "train", "shards": shards, "total_rows": sum(counts)}
    (root / SIZES_NAME).write_text(json.dumps(sizes))
    (root / METADATA_NAME).write_text(METADATA)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "data")


def edit(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    sizes = json.loads((root / SIZES_NAME).read_text())
    change(sizes)
    (root / SIZES_NAME).write_text(json.dumps(sizes))


class Letters:
    """A tokenizer of the kind that transformers has; counts its calls."""

    name_or_path = "letters"
    eos_token_id = 0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        self.calls += 1
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_pages_are_a_function_of_the_seed_alone_in_any_process(root: Path) -> None:
    dataset = TemplarDataset(root)
    assert dataset.configs == {"CC-1": 570, "CC-2": 560}
    pages = dataset.pages("17:204", 40)
    assert pages[:3] == [  # pinned: who resumes, or checks another's pages, depends on them
        Page("CC-1/001.parquet", 0, 0),
        Page("CC-1/000.parquet", 4, 0),
        Page("CC-1/000.parquet", 0, 20),
    ]
    assert dataset.pages("17:204", 7) == pages[:7]
    assert dataset.pages("17:205", 40) != pages
    assert dataset.pages(7, 3) == dataset.pages("7", 3)
    program = (
        "import sys; from loader import TemplarDataset; print(TemplarDataset(sys.argv[1]).pages('17:204', 40) == "
        f"{[tuple(page) for page in pages]})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, root],
        env=os.environ | {"PYTHONHASHSEED": "5"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_a_page_is_rows_of_one_row_group_of_every_config_alike(root: Path) -> None:
    dataset = TemplarDataset(root, page_rows=10)
    pages = dataset.pages("seed", 400)
    shares = {config: sum(page.shard.startswith(config) for page in pages) for config in SHARDS}
    assert all(150 < share < 250 for share in shares.values())
    assert {page.shard for page in pages} == {
        f"{config}/{number:03d}.parquet" for config, counts in SHARDS.items() for number in range(len(counts))
    }
    for page in pages:
        first = page.row_group * 120 + page.offset
        assert dataset.texts(page) == [text_of(page.shard, row) for row in range(first, first + 10)]


def test_a_row_group_that_is_shorter_than_a_page_is_the_page(root: Path) -> None:
    dataset = TemplarDataset(root)
    last = next(page for page in dataset.pages(1, 200) if page.shard == "CC-1/001.parquet")
    assert last == Page("CC-1/001.parquet", 0, 0)
    assert len(dataset.texts(last)) == 70


def test_tokens_are_made_once_and_kept_for_every_process(root: Path, tmp_path: Path) -> None:
    first, second = Letters(), Letters()
    dataset = TemplarDataset(root, tokenizer=first, cache_folder=tmp_path / "pages")
    page = dataset.pages(1, 1)[0]
    tokens = dataset.tokens(page)
    assert ["".join(map(chr, row)) for row in tokens] == dataset.texts(page)
    assert all(row.dtype == np.int32 for row in tokens)
    copy = pickle.loads(pickle.dumps(dataset))
    other = TemplarDataset(root, tokenizer=second, cache_folder=tmp_path / "pages")
    for again in (dataset.tokens(page), copy.tokens(page), other.tokens(page)):
        assert [row.tolist() for row in again] == [row.tolist() for row in tokens]
        again[0][0] = -1  # its own memory
    assert (first.calls, second.calls) == (1, 0)
    renamed = TemplarDataset(root, tokenizer=second, tokenizer_name="else", cache_folder=tmp_path / "pages")
    renamed.tokens(page)
    assert second.calls == 1
    assert sorted(path.name for path in root.iterdir()) == ["CC-1", "CC-2", METADATA_NAME, SIZES_NAME]


@pytest.mark.parametrize("is_kept", [True, False])
def test_two_threads_that_want_a_page_tokenise_it_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    joined, letters = Event(), Letters()

    class Joined(Future[Any]):
        """What the first thread makes. A thread that asks for it while it is made waits for it."""

        def result(self, timeout: float | None = None) -> Any:
            joined.set()
            return super().result(timeout)

    monkeypatch.setattr(single_flight, "Future", Joined)

    def tokenizer(texts: list[str]) -> dict[str, list[list[int]]]:
        assert joined.wait(20), "the other thread does not wait for this one"
        return letters(texts)

    dataset = TemplarDataset(
        root,
        tokenizer=tokenizer,
        tokenizer_name="letters",
        cache_folder=tmp_path / "pages" if is_kept else None,
    )
    page = dataset.pages(1, 1)[0]
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(dataset.tokens, [page, page])
    assert letters.calls == 1
    assert [row.tolist() for row in one] == [row.tolist() for row in other]
    one[0][0] = -1
    assert other[0][0] != -1  # each has memory of its own


def test_threads_that_want_another_page_do_not_wait_for_it(root: Path) -> None:
    meeting, letters = Barrier(2), Letters()

    def tokenizer(texts: list[str]) -> dict[str, list[list[int]]]:
        meeting.wait(20)
        return letters(texts)

    dataset = TemplarDataset(root, tokenizer=tokenizer)
    pages = [Page("CC-1/000.parquet", 0, 0), Page("CC-1/000.parquet", 1, 0)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(dataset.tokens, pages))
    assert [len(page) for page in found] == [100, 100]


def test_a_tokenizer_that_fails_does_so_once_more_when_asked_again(root: Path, tmp_path: Path) -> None:
    letters, answers = Letters(), [[[1]], None]

    def tokenizer(texts: list[str]) -> Any:
        return answers.pop(0) or letters(texts)

    dataset = TemplarDataset(
        root, tokenizer=tokenizer, tokenizer_name="letters", cache_folder=tmp_path / "pages"
    )
    page = dataset.pages(1, 1)[0]
    with pytest.raises(LoaderError, match="1 lists of tokens"):
        dataset.tokens(page)
    assert len(dataset.tokens(page)) == len(dataset.texts(page))


@pytest.mark.parametrize(
    "harm", [lambda data: data[:-5], lambda data: data[:40] + b"?" + data[41:], lambda data: b""]
)
def test_a_cached_page_that_is_damaged_is_made_anew(
    root: Path, tmp_path: Path, harm: Callable[[bytes], bytes]
) -> None:
    tokenizer = Letters()
    dataset = TemplarDataset(root, tokenizer=tokenizer, cache_folder=tmp_path / "pages")
    page = dataset.pages(1, 1)[0]
    wanted = [row.tolist() for row in dataset.tokens(page)]
    (file,) = (tmp_path / "pages").iterdir()
    file.write_bytes(harm(file.read_bytes()))
    for _ in range(2):
        assert [row.tolist() for row in dataset.tokens(page)] == wanted
    assert tokenizer.calls == 2


def test_a_shard_that_was_written_anew_has_pages_of_its_own(root: Path, tmp_path: Path) -> None:
    page = Page("CC-1/001.parquet", 0, 0)
    TemplarDataset(root, tokenizer=Letters(), cache_folder=tmp_path / "pages").tokens(page)
    pq.write_table(pa.table({"text": ["new"] * 70}), root / page.shard)
    edit(root, lambda sizes: sizes["CC-1"]["shards"][1].pop("byte_size"))
    dataset = TemplarDataset(root, tokenizer=Letters(), cache_folder=tmp_path / "pages")
    assert dataset.tokens(page)[0].tolist() == [ord(letter) for letter in "new"]


def test_the_cache_folder_stays_within_its_limit(root: Path, tmp_path: Path) -> None:
    dataset = TemplarDataset(root, tokenizer=Letters(), cache_folder=tmp_path / "pages", cache_bytes=30_000)
    for page in dataset.pages(1, 60):
        assert dataset.tokens(page)
    sizes = [path.stat().st_size for path in (tmp_path / "pages").iterdir()]
    assert len(sizes) > 1
    assert sum(sizes) <= 30_000


def test_a_cache_folder_that_takes_nothing_costs_time_only(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Letters()
    dataset = TemplarDataset(root, tokenizer=tokenizer, cache_folder=tmp_path / "pages")
    (tmp_path / "pages").rmdir()
    (tmp_path / "pages").write_text("a file in its place")
    for page in dataset.pages(1, 3):
        assert len(dataset.tokens(page)) == len(dataset.texts(page))
    assert tokenizer.calls == 3
    (message,) = caplog.messages
    assert "takes no tokenised pages" in message


def test_threads_that_miss_the_same_file_at_once_all_get_it(tmp_path: Path) -> None:
    folder, barrier, found = DecompressedCache(tmp_path, 1 << 20), Barrier(8), []

    def make() -> bytes:
        barrier.wait()  # all are making it
        return b"content" * 1000

    threads = [Thread(target=lambda: found.append(folder.path("key", 0, make))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [str(tmp_path / "key.mds")] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["key.mds"]


def test_processes_of_the_same_number_do_not_write_into_each_others_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, names, replace = DecompressedCache(tmp_path, 1 << 20), set(), os.replace

    def note(source: Path, target: Path) -> None:
        names.add(source)
        replace(source, target)

    monkeypatch.setattr(os, "replace", note)
    for _ in range(2):
        Path(folder.path("key", 0, lambda: b"content")).unlink()
    assert len(names) == 2


# Batches


def cut(dataset: TemplarDataset, pages: list[Page], shape: tuple[int, int], end: list[int]) -> list[Any]:
    """What `batches` promises, in plain Python."""
    line = [token for page in pages for text in dataset.texts(page) for token in [*map(ord, text), *end]]
    rows, length = shape
    size = rows * length
    return [
        [line[start + row * length : start + (row + 1) * length] for row in range(rows)]
        for start in range(0, len(line) - size + 1, size)
    ]


@given(
    seed=st.integers(0, 1 << 40),
    n=st.integers(1, 12),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    threads=st.integers(1, 8),
    end_token=st.sampled_from([None, -1, 7]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_are_cut_from_the_joined_texts(
    root: Path, seed: int, n: int, shape: tuple[int, int], threads: int, end_token: int | None
) -> None:
    end = {None: [0], -1: [], 7: [7]}[end_token]
    dataset = TemplarDataset(root, tokenizer=Letters(), page_rows=9)
    found = list(dataset.batches(seed, n, *shape, end_token=end_token, threads=threads))
    assert {(batch.shape, batch.dtype) for batch in found} == {(shape, np.dtype(np.int32))}
    assert [batch.tolist() for batch in found] == cut(dataset, dataset.pages(seed, n), shape, end)


def test_another_process_cuts_the_same_batches(root: Path) -> None:
    program = (
        "import sys; from loader import TemplarDataset; "
        "dataset = TemplarDataset(sys.argv[1], tokenizer=lambda texts: [list(map(ord, text)) for text in texts]); "
        "print([batch.tolist() for batch in dataset.batches('17:204', 3, 4, 64, end_token=0, threads=2)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, root],
        env=os.environ | {"PYTHONHASHSEED": "5"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    dataset = TemplarDataset(root, tokenizer=Letters())
    assert json.loads(done.stdout) == [batch.tolist() for batch in dataset.batches("17:204", 3, 4, 64)]


def test_pages_are_read_ahead_by_a_bounded_number_of_threads(root: Path) -> None:
    letters, meeting = Letters(), Barrier(3)
    names: set[str] = set()

    def tokenizer(texts: list[str]) -> Any:
        if current_thread().name not in names:
            names.add(current_thread().name)
            meeting.wait(20)  # of three threads
        return letters(texts)

    dataset = TemplarDataset(root, tokenizer=tokenizer, page_rows=5)
    assert len(set(dataset.pages(1, 9))) == 9  # threads that want one page share its tokens
    batches = dataset.batches(1, 30, 1, 50, end_token=0, threads=3)
    next(batches)
    assert len(names) == 3
    assert letters.calls <= 1 + 2 * 3 + 3
    batches.close()
    assert not [thread for thread in enumerate_threads() if thread.name in names]


def test_pages_of_one_row_group_cause_no_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = TemplarDataset(root, tokenizer=Letters(), page_rows=1)
    for _ in range(80):  # a seed chooses any rows: each page decodes another row group
        for group in range(2):
            dataset.tokens(Page("CC-1/000.parquet", group, 0))
    assert caplog.messages == []


def test_a_column_of_token_ids_needs_no_tokenizer(root: Path) -> None:
    column, dataset = token_column(root, pa.list_(pa.uint16()), [[1, 2, 3]] * 69 + [[]])
    tokens = dataset.tokens(column)
    assert [row.tolist() for row in tokens] == [[1, 2, 3]] * 69 + [[]]
    assert {row.dtype for row in tokens} == {np.dtype(np.int32)}
    with pytest.raises(LoaderError, match="does not say which token ends a text: pass end_token"):
        dataset.batches(1, 1, 1, 1)


@pytest.mark.parametrize(
    ("kind", "bad"), [(pa.list_(pa.int64()), [1 << 31]), (pa.list_(pa.int64()), None), (pa.float32(), 1.5)]
)
def test_a_row_without_token_ids_is_named(root: Path, kind: Any, bad: Any) -> None:
    good = [[1], [2]] if pa.types.is_list(kind) else []
    page, dataset = token_column(root, kind, [*good, bad, *good])
    words = rf"CC-1/001.parquet, row group 0, row {len(good)}: tokens is no list of token ids"
    with pytest.raises(ShardError, match=words):
        dataset.tokens(page)


def token_column(root: Path, kind: Any, values: list[Any]) -> tuple[Page, TemplarDataset]:
    """Write a shard with a column of tokens; return its page."""
    pq.write_table(pa.table({"tokens": pa.array(values, kind)}), root / "CC-1/001.parquet")
    edit(root, lambda sizes: sizes["CC-1"].pop("total_rows"))
    shard = {"path": BUCKET + "CC-1/001.parquet", "num_rows": len(values)}
    edit(root, lambda sizes: sizes["CC-1"]["shards"].__setitem__(1, shard))
    return Page("CC-1/001.parquet", 0, 0), TemplarDataset(root, text_column="tokens")


def test_a_bad_page_is_an_error_at_its_turn(root: Path) -> None:
    dataset = TemplarDataset(root, tokenizer=Letters(), page_rows=20)
    pages = dataset.pages(3, 12)
    bad = next(number for number, page in enumerate(pages) if page.shard == "CC-1/001.parquet")
    assert bad > 0
    before = cut(dataset, pages[:bad], (1, 64), [0])
    batches = dataset.batches(3, 12, 1, 64, threads=2)
    path = root / "CC-1/001.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(len(content) // 2) + content[4 + len(content) // 2 :])
    found = []
    with pytest.raises(ShardError, match=r"CC-1/001.parquet, row group 0, samples 0 to 69: it is damaged"):
        found.extend(batch.tolist() for batch in batches)
    assert found == before


def test_batches_that_cannot_be_cut_are_refused(root: Path) -> None:
    dataset = TemplarDataset(root, tokenizer=Letters())
    with pytest.raises(LoaderError, match=r"1 pages have \d+ tokens, and a batch takes 4000000: choose more"):
        next(dataset.batches(1, 1, 4, 1_000_000))
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(ArgumentError, match="is 0: it is at least 1"):
            dataset.batches(1, 1, *wrong)
    with pytest.raises(ArgumentError, match="threads is 0"):
        dataset.batches(1, 1, 1, 1, threads=0)
    with pytest.raises(DatasetError, match=r"000.parquet has no column story; it has text, url"):
        TemplarDataset(root, tokenizer=Letters(), text_column="story").batches(1, 1, 1, 1)


def test_its_shards_are_a_parquet_dataset_too(root: Path) -> None:
    dataset = TemplarDataset(root)
    assert len(ParquetDataset(dataset.files)) == sum(dataset.configs.values()) == 1130


def remove_metadata(root: Path) -> None:
    (root / METADATA_NAME).unlink()


def break_metadata(root: Path) -> None:
    (root / METADATA_NAME).write_text("configs: [")


def no_configs(root: Path) -> None:
    (root / METADATA_NAME).write_text("config: 1")


def break_sizes(root: Path) -> None:
    (root / SIZES_NAME).write_text('{"CC-1"')


def another_total(root: Path) -> None:
    edit(root, lambda sizes: sizes["CC-1"].update(total_rows=571))


def outside(root: Path) -> None:
    edit(root, lambda sizes: sizes["CC-1"]["shards"][1].update(path="../../etc/passwd"))


def no_rows(root: Path) -> None:
    edit(root, lambda sizes: sizes["CC-1"]["shards"][1].pop("num_rows"))


def another_bucket(root: Path) -> None:
    edit(root, lambda sizes: sizes["CC-1"]["shards"][1].update(path="other/CC-1/001.parquet"))


def other_names(root: Path) -> None:
    (root / METADATA_NAME).write_text("configs: [{config_name: CC-9}]")


def no_shards_there(root: Path) -> None:
    for folder in SHARDS:
        (root / folder).rename(root / f"not-{folder}")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (remove_metadata, "_metadata.yaml does not exist"),
        (break_metadata, "_metadata.yaml is not YAML"),
        (no_configs, "_metadata.yaml has no list `configs`"),
        (break_sizes, "_shard_sizes.json is not JSON"),
        (another_total, "config CC-1: total_rows is 571, its shards have 570"),
        (outside, "config CC-1, shard 1: ../../etc/passwd leaves the dataset"),
        (no_rows, "config CC-1, shard 1: it has no `path` and `num_rows`"),
        (another_bucket, "config CC-1: other/CC-1/001.parquet lies outside"),
        (other_names, "no shards of the configs that .* names: CC-9"),
        (no_shards_there, "has none of the first shards that _shard_sizes.json names"),
    ],
)
def test_files_that_contradict_themselves_are_an_error(
    root: Path, harm: Callable[[Path], None], words: str
) -> None:
    harm(root)
    with pytest.raises(DatasetError, match=words):
        TemplarDataset(root)


def test_a_shard_that_is_not_as_the_sizes_say_is_named(root: Path) -> None:
    edit(root, lambda sizes: sizes["CC-2"]["shards"][1].update(byte_size=77))
    with pytest.raises(DatasetError, match=r"CC-2/001.parquet has \d+ bytes, _shard_sizes.json says 77"):
        TemplarDataset(root).pages(1, 40)
    pq.write_table(pa.table({"text": ["short"]}), root / "CC-1/000.parquet")
    with pytest.raises(DatasetError, match=r"CC-1/000.parquet has 1 rows, _shard_sizes.json says 500"):
        TemplarDataset(root).texts(Page("CC-1/000.parquet", 0, 0))
    (root / "CC-2/000.parquet").unlink()
    with pytest.raises(DatasetError, match=r"CC-2/000.parquet: the file is missing"):
        TemplarDataset(root).texts(Page("CC-2/000.parquet", 0, 0))


def test_what_cannot_work_is_said(root: Path, tmp_path: Path) -> None:
    dataset = TemplarDataset(root)
    page = dataset.pages(1, 1)[0]
    for wrong in (Page("CC-1/009.parquet", 0, 0), page._replace(row_group=9), page._replace(offset=120)):
        with pytest.raises(LoaderError, match=r"not a shard of|page of another dataset"):
            dataset.texts(wrong)
    with pytest.raises(LoaderError, match="need a tokenizer"):
        dataset.tokens(page)
    with pytest.raises(LoaderError, match="at least 1"):
        dataset.pages(1, 0)
    with pytest.raises(LoaderError, match="page_rows is 0"):
        TemplarDataset(root, page_rows=0)
    with pytest.raises(LoaderError, match="lies in the dataset"):
        TemplarDataset(root, tokenizer=Letters(), cache_folder=root / "pages")
    with pytest.raises(LoaderError, match="needs a tokenizer_name"):
        TemplarDataset(root, tokenizer=lambda texts: texts, cache_folder=tmp_path / "pages")
    for tokenizer in (lambda texts: [[1]], lambda texts: [[-1]] * len(texts), lambda texts: texts):
        with pytest.raises(LoaderError, match="the tokenizer return"):
            TemplarDataset(root, tokenizer=tokenizer).tokens(page)


def test_a_row_without_text_is_named(root: Path) -> None:
    pq.write_table(pa.table({"text": ["a", None] * 35}), root / "CC-1/001.parquet")
    edit(root, lambda sizes: sizes["CC-1"]["shards"][1].pop("byte_size"))
    with pytest.raises(ShardError, match=r"CC-1/001.parquet, row group 0, row 1: text is NoneType"):
        TemplarDataset(root).texts(Page("CC-1/001.parquet", 0, 0))
    with pytest.raises(DatasetError, match="no column story; it has text"):
        TemplarDataset(root, text_column="story").texts(Page("CC-1/001.parquet", 0, 0))
