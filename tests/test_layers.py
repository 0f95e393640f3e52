"""The rooms keep to their imports, and names tell things apart. The rules are in tests/support/rooms.py."""

import pytest

from tests.support.rooms import (
    ROOMS,
    complaints,
    field_counts,
    outside_wiring,
    project_files,
    repeated_class_names,
    repeated_file_names,
    report,
    room_of,
    rooms,
    table,
    table_in_document,
)

FILES = project_files()


def test_rooms_keep_to_their_imports() -> None:
    assert complaints(FILES) == []


def test_every_module_is_in_a_room() -> None:
    assert {room_of(file) for file in FILES} == set(ROOMS)


def test_every_room_says_what_it_is() -> None:
    assert [room.name for room in rooms(FILES) if not room.purpose] == []


def test_class_names_are_unique_in_a_package() -> None:
    assert repeated_class_names(FILES) == {}


def test_file_names_tell_modules_apart() -> None:
    assert repeated_file_names(FILES) == {}


def test_the_report_names_what_is_largest() -> None:
    longest = max(FILES, key=lambda file: FILES[file].count("\n"))
    assert f"{longest} {FILES[longest].count(chr(10))}" in report(FILES)


def test_no_callback_is_assigned_from_outside() -> None:
    assert outside_wiring(FILES) == []


def test_the_document_shows_the_rooms_as_they_are() -> None:
    assert table_in_document() == table(FILES), "run: python -m tests.support.rooms"


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("fusecache/model/a.py", "import_module('fusecache.disk.files')", "fusecache.disk.files"),
        ("fusecache/policy/a.py", "import fusecache.disk.files", "fusecache.disk.files"),
        ("fusecache/remote/store.py", "from fusecache import engine", "fusecache.engine"),
        ("fusecache/remote/store.py", "from fusecache.remote.s3 import store", "fusecache.remote.s3.store"),
        ("fusecache/engine/write/a.py", "import fusecache.remote.s3.store", "fusecache.remote.s3.store"),
        ("fusecache/engine/write/a.py", "import fusecache.engine.publish.b", "fusecache.engine.publish.b"),
        (
            "fusecache/engine/cache/a.py",
            "from fusecache.remote import storehouse",
            "fusecache.remote.storehouse",
        ),
        ("fusecache/fs/a.py", "def f():\n    import boto3", "boto3"),
        ("fusecache/daemon/main.py", "import requests", "requests"),
        ("fusecache/daemon/main.py", "import loader.order", "loader.order"),
        ("fusecache/cli/main.py", "import fusecache.engine.cache.a", "fusecache.engine.cache.a"),
        ("fusecache/model/a.py", "import time", "time"),
        ("fusecache/policy/cache/a.py", "import os.path", "os.path"),
        ("fusecache/policy/a.py", "async def f(): ...", "await"),
        ("fusecache/disk/a.py", "from . import files", "..files"),
        ("loader/order/a.py", "import torch", "torch"),
        ("loader/order/a.py", "import loader.mds.index", "loader.mds.index"),
        ("loader/hints/a.py", "import fusecache.model.objects", "fusecache.model.objects"),
        ("loader/base/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import trio", "trio"),
    ],
)
def test_a_forbidden_import_is_named(file: str, source: str, complaint: str) -> None:
    (found,) = complaints({file: source})
    assert found.startswith(f"{file} may not ")
    assert found.endswith(complaint)


def test_a_cycle_is_named() -> None:
    files = {"loader/mds/a.py": "import loader.mds.b", "loader/mds/b.py": "from loader.mds.a import thing"}
    assert complaints(files) == ["import cycle: loader/mds/a.py <- loader/mds/b.py <- loader/mds/a.py"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("loader/hints/a.py", "from fusecache.model.hints import encode\nimport numpy"),
        ("fusecache/engine/write/a.py", "import trio\nfrom fusecache.remote.store import Store"),
        ("fusecache/cli/a.py", "from fusecache.engine.recovery.offline import OfflineCache"),
    ],
)
def test_an_allowed_import_passes(file: str, source: str) -> None:
    assert complaints({file: source}) == []


@pytest.mark.parametrize(
    ("statement", "target"),
    [
        ("queue.on_change = self.wake", "queue.on_change"),
        ("self.queue.on_change = self.wake", "self.queue.on_change"),
        ("queue.on_added, queue.on_gone = self.a, self.b", "queue.on_gone"),
        ("cache.is_pinned = self.a", "cache.is_pinned"),
        ("cache.next_use: Callable[[], int] = self.a", "cache.next_use"),
    ],
)
def test_a_callback_assigned_from_outside_is_named(statement: str, target: str) -> None:
    files = {
        "fusecache/engine/cache/a.py": "class Cache:\n    is_pinned: Callable[[], bool] | None",
        "fusecache/engine/publish/b.py": f"class B:\n    def __init__(self, queue, cache):\n        {statement}",
    }
    assert f"fusecache/engine/publish/b.py: {target}" in outside_wiring(files)


@pytest.mark.parametrize(
    "statement", ["self.on_change = change", "targets.queue = queue", "queue.on_change()", "self.next = next"]
)
def test_other_assignments_pass(statement: str) -> None:
    source = f"class A:\n    def __init__(self, change: Callable[[], None]):\n        {statement}"
    assert outside_wiring({"fusecache/engine/cache/a.py": source}) == []


def test_a_class_name_used_twice_is_named() -> None:
    files = {
        "loader/mds/a.py": "class Part: ...",
        "loader/hints/b.py": "class _Part: ...",
        "fusecache/c.py": "class Part: ...",
    }
    assert repeated_class_names(files) == {"Part": ["loader/hints/b.py", "loader/mds/a.py"]}


def test_a_file_name_used_too_often_is_named() -> None:
    of_a_package = [f"loader/{folder}part.py" for folder in ("a/", "b/", "c/", "")]
    files = dict.fromkeys([*of_a_package, "fusecache/part.py"], "")
    assert repeated_file_names(files) == {"part.py": of_a_package}


def test_fields_are_counted_where_they_are_declared_or_set() -> None:
    source = "class A:\n    b: int\n    def __init__(self):\n        self.c = self.b = 1\n        d.e = 2"
    assert field_counts({"loader/a.py": source}) == {"A": 2}
