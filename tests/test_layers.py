"""The rooms, executed: who may import whom, which library lives where, and no import cycles.

The rules read source, not modules, so imports hidden in functions or under TYPE_CHECKING count as well.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LONG_FILE_LINES = 400

# room -> the rooms it may import, besides itself. What is not a room (daemon.py, config.py, cli.py) sees all.
ROOMS: dict[str, tuple[str, ...]] = {
    "model": (),
    "policy": ("model",),
    "remote": ("model",),
    "disk": ("model",),
    "index": ("model",),
    "engine": ("policy", "remote.store", "disk", "index", "model"),
    "fs": ("engine", "model"),
}
# The loader talks to the daemon through files; all it shares is the hints' format.
LOADER_SHARES = ("model.hint",)

# s3.py asks by the client, s3_access.py makes it, s3_copies.py copies with it, s3_errors.py names what it raises.
_S3_CLIENT = ("fusecache/remote/s3",)
_LOOP = (
    "fusecache/engine/",
    "fusecache/fs/",
    "fusecache/daemon/main.py",
    "fusecache/daemon/control_server.py",
)
# library -> the files or folders that may import it. A library with no line here may be imported nowhere.
OWNERS: dict[str, tuple[str, ...]] = {
    "boto3": _S3_CLIENT,
    "botocore": _S3_CLIENT,
    "mypy_boto3_s3": _S3_CLIENT,
    "lmdb": ("fusecache/index/",),
    "msgspec": ("loader/mds/index_parser.py",),
    "numpy": ("loader/",),
    "pyfuse3": ("fusecache/fs/", "fusecache/daemon/main.py"),
    "torch": ("loader/torch/collate.py", "loader/torch/loader.py", "loader/torch/streaming.py"),
    "tqdm": ("fusecache/mount/progress.py", "loader/"),
    "trio": _LOOP,
    "urllib3": _S3_CLIENT,
    "xxhash": ("fusecache/disk/", "fusecache/engine/", "loader/"),
    "zstandard": ("loader/",),
}
# Rooms of values and decisions: no I/O, no clock, no log; time and randomness are arguments.
PURE_ROOMS = ("model", "policy")
IMPURE_MODULES = frozenset(
    [
        "asyncio",
        "fcntl",
        "io",
        "logging",
        "mmap",
        "os",
        "shutil",
        "socket",
        "subprocess",
        "tempfile",
        "threading",
        "time",
    ]
)


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports; `from a import b` is `a.b`, a relative import begins with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def room_of(file: str) -> str:
    """The room a file is in: `loader`, one of ROOMS, or "" for what sits on top."""
    package, *inner = file.split("/")
    if package == "loader":
        return "loader"
    return inner[0] if len(inner) > 1 and inner[0] in ROOMS else ""


def is_allowed(file: str, name: str) -> bool:
    """Whether a file of this project may import a dotted name."""
    package = name.split(".")[0]
    if package in sys.stdlib_module_names:
        return not (room_of(file) in PURE_ROOMS and package in IMPURE_MODULES)
    if package == "loader":
        return file.startswith("loader/")
    if package != "fusecache":
        return file.startswith(OWNERS.get(package, ()))
    room = room_of(file)
    if not room:
        return True
    shares = LOADER_SHARES if room == "loader" else (room, *ROOMS[room])
    return f"{name}.".startswith(tuple(f"fusecache.{share}." for share in shares))


def target_file(name: str, files: Mapping[str, str]) -> str | None:
    """The project's file that a dotted name leads to, if any: a module, or the module that holds the name."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        stem = "/".join(parts[:length])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in files:
                return file
    return None


def complaints(files: Mapping[str, str]) -> list[str]:
    """What is wrong with the imports of these files. files: path from the root -> source text."""
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for file, source in sorted(files.items()):
        tree = ast.parse(source, file)
        names = set(imported_names(tree))
        found += [f"{file} may not import {name}" for name in sorted(names) if not is_allowed(file, name)]
        if room_of(file) in PURE_ROOMS and any(
            isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(tree)
        ):
            found.append(f"{file} may not await")
        graph[file] = {target for name in names if (target := target_file(name, files))} - {file}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append("import cycle: " + " <- ".join(error.args[1]))
    return found


def project_files() -> dict[str, str]:
    """Source text of both packages by path from the root."""
    paths = [path for package in ("fusecache", "loader") for path in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def test_rooms_keep_to_their_imports() -> None:
    files = project_files()
    assert any(file.startswith("loader/") for file in files)
    assert {room_of(file) for file in files} >= set(ROOMS)
    assert complaints(files) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("fusecache/policy/a.py", "import fusecache.disk.files", "fusecache.disk.files"),
        ("fusecache/remote/store.py", "from fusecache import engine", "fusecache.engine"),
        (
            "fusecache/engine/a.py",
            "from fusecache.remote.s3.store import S3Store",
            "fusecache.remote.s3.store.S3Store",
        ),
        ("fusecache/engine/a.py", "from fusecache.remote import storehouse", "fusecache.remote.storehouse"),
        ("fusecache/fs/a.py", "def f():\n    import boto3", "boto3"),
        ("fusecache/daemon/main.py", "import requests", "requests"),
        ("fusecache/daemon/main.py", "import loader.order", "loader.order"),
        ("fusecache/model/a.py", "import time", "time"),
        ("fusecache/policy/a.py", "async def f(): ...", "await"),
        ("fusecache/disk/a.py", "from . import files", "..files"),
        ("loader/order.py", "import torch", "torch"),
        ("loader/order.py", "from fusecache.model.objects import Extent", "fusecache.model.objects.Extent"),
        ("loader/order.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import trio", "trio"),
    ],
)
def test_a_forbidden_import_is_named(file: str, source: str, complaint: str) -> None:
    (found,) = complaints({file: source})
    assert found.startswith(f"{file} may not ")
    assert found.endswith(complaint)


def test_a_cycle_is_named() -> None:
    files = {"loader/a.py": "import loader.b", "loader/b.py": "from loader.a import thing"}
    assert complaints(files) == ["import cycle: loader/a.py <- loader/b.py <- loader/a.py"]


def test_what_rooms_share_is_allowed() -> None:
    assert (
        complaints({"loader/hints/client.py": "from fusecache.model.hints import encode\nimport numpy"}) == []
    )
    assert (
        complaints({"fusecache/engine/a.py": "import trio\nfrom fusecache.remote.store import Store"}) == []
    )


def test_long_files_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A report, not a gate: splitting a file to please a number helps nobody."""
    lines = {file: source.count("\n") for file, source in project_files().items()}
    with capsys.disabled():
        for file, count in sorted(lines.items(), key=lambda item: -item[1]):
            if count > LONG_FILE_LINES:
                sys.stdout.write(f"\nlong file: {file} has {count} lines\n")
    assert lines
