"""The rooms of both packages: what each may import, which library lives where, and what grows.

Works on source text, so imports inside functions, under TYPE_CHECKING and by `import_module` count as well.
`python -m tests.support.rooms` writes the table of rooms into docs/architecture.md; `--report` prints the longest
modules, the fullest rooms and the widest classes, which no check limits: a module is one noun, long or short.
"""

import ast
import graphlib
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.support import ROOT

# A name of a file that more modules of a package have says too little.
SAME_FILE_NAME_MAX = 2
_REPORTED = 8

# What lies below the engine and outside it.
_STORAGE = (
    "fusecache.disk",
    "fusecache.index",
    "fusecache.model",
    "fusecache.policy",
    "fusecache.remote.store",
)
_ENGINE = "fusecache.engine"


def _engine(*rooms: str) -> tuple[str, ...]:
    return (*(f"{_ENGINE}.{room}" for room in rooms), *_STORAGE)


# room -> the rooms, or single modules, that its modules may import besides each other. A room is one folder: what may
# import `fusecache.remote` may not import `fusecache.remote.s3` for that.
ROOMS: dict[str, tuple[str, ...]] = {
    "fusecache": ("fusecache.cli", "fusecache.config", "fusecache.model"),
    "fusecache.model": (),
    "fusecache.policy": ("fusecache.model",),
    "fusecache.policy.cache": ("fusecache.policy", "fusecache.model"),
    "fusecache.policy.writeback": ("fusecache.policy", "fusecache.model"),
    "fusecache.disk": ("fusecache.model",),
    "fusecache.index": ("fusecache.disk.native", "fusecache.model"),
    "fusecache.remote": (
        "fusecache.policy.endpoint_choice",
        "fusecache.policy.backoff",
        "fusecache.policy.bucket_health",
        "fusecache.model",
    ),
    "fusecache.remote.protocol": ("fusecache.remote", "fusecache.model"),
    "fusecache.remote.http": (
        "fusecache.policy.peer_choice",
        "fusecache.remote.protocol",
        "fusecache.remote",
        "fusecache.model",
    ),
    "fusecache.remote.s3": (
        "fusecache.remote.http",
        "fusecache.remote.protocol",
        "fusecache.remote",
        "fusecache.policy.backoff",
        "fusecache.model",
    ),
    "fusecache.remote.clouds": (
        "fusecache.installation",
        "fusecache.remote.http",
        "fusecache.remote.protocol",
        "fusecache.remote",
        "fusecache.model",
    ),
    "fusecache.engine.runtime": _engine(),
    "fusecache.engine.cache": (*_engine("runtime"), "fusecache.policy.cache"),
    "fusecache.engine.namespace": (*_engine("cache", "runtime"), "fusecache.policy.writeback"),
    "fusecache.engine.writeback": (*_engine("namespace", "runtime"), "fusecache.policy.writeback"),
    "fusecache.engine.prefetch": (
        *_engine("cache", "namespace", "runtime"),
        "fusecache.policy.cache",
        "fusecache.child",
    ),
    "fusecache.engine.admin": (*_engine("cache", "namespace", "runtime"), "fusecache.policy.cache"),
    "fusecache.engine.write": (
        *_engine("cache", "namespace", "writeback", "runtime"),
        "fusecache.policy.writeback",
    ),
    "fusecache.engine.publish": (
        *_engine("cache", "namespace", "writeback", "write", "runtime"),
        "fusecache.policy.writeback",
    ),
    "fusecache.engine.namespace_ops": _engine("namespace", "writeback", "write", "runtime"),
    "fusecache.engine.durability": _engine("cache", "namespace", "writeback", "write", "publish", "runtime"),
    "fusecache.engine.recovery": _engine(
        "cache", "namespace", "writeback", "write", "publish", "namespace_ops", "runtime"
    ),
    "fusecache.engine": _engine(
        "runtime",
        "cache",
        "namespace",
        "writeback",
        "prefetch",
        "admin",
        "write",
        "publish",
        "namespace_ops",
        "durability",
        "recovery",
    ),
    "fusecache.movers": (
        "fusecache.remote.http",
        "fusecache.remote.store",
        "fusecache.disk",
        "fusecache.model",
    ),
    "fusecache.fuse": (
        "fusecache.child",
        "fusecache.keeper",
        "fusecache.installation",
        "fusecache.movers.orders",
    ),
    "fusecache.fs": (
        "fusecache.fuse",
        "fusecache.engine",
        "fusecache.engine.namespace",
        "fusecache.engine.prefetch",
        "fusecache.engine.runtime.procfs",
        "fusecache.model",
    ),
    "fusecache.config": ("fusecache.remote.endpoints", "fusecache.model"),
    "fusecache.mount": ("fusecache.keeper", "fusecache.model"),
    "fusecache.page": ("fusecache.model",),
    "fusecache.serve": (
        "fusecache.config.values",
        "fusecache.disk.cache_files",
        "fusecache.mount",
        "fusecache.remote.endpoints",
        "fusecache.remote.protocol.headers",
        "fusecache.remote.protocol.signing",
        "fusecache.model",
    ),
    "fusecache.bucket": (
        "fusecache.engine.admin.upload_survey",
        "fusecache.policy",
        "fusecache.remote",
        "fusecache.remote.s3",
        "fusecache.model",
    ),
    "fusecache.daemon": (
        "fusecache",
        "fusecache.config",
        "fusecache.installation",
        "fusecache.mount",
        "fusecache.page",
        "fusecache.engine",
        "fusecache.engine.admin",
        "fusecache.engine.cache",
        "fusecache.engine.durability",
        "fusecache.engine.namespace",
        "fusecache.engine.prefetch",
        "fusecache.engine.runtime",
        "fusecache.fs",
        "fusecache.fuse",
        "fusecache.movers",
        "fusecache.policy",
        "fusecache.disk",
        "fusecache.remote",
        "fusecache.remote.http.peers",
        "fusecache.remote.protocol.signing",
        "fusecache.remote.s3",
        "fusecache.remote.clouds",
        "fusecache.model",
    ),
    "fusecache.folder": (
        "fusecache.cli.extras",
        "fusecache.cli.say",
        "fusecache.config",
        "fusecache.daemon.bucket_link",
        "fusecache.daemon.connect",
        "fusecache.daemon.checkup",
        "fusecache.disk.beneath",
        "fusecache.disk.native",
        "fusecache.disk.state_directory",
        "fusecache.engine",
        "fusecache.engine.durability",
        "fusecache.engine.namespace",
        "fusecache.engine.runtime",
        "fusecache.mount",
        "fusecache.policy",
        "fusecache.remote",
        "fusecache.model",
    ),
    "fusecache.cli": (
        "fusecache",
        "fusecache.config",
        "fusecache.daemon",
        "fusecache.folder.arguments",
        "fusecache.bucket",
        "fusecache.mount",
        "fusecache.policy",
        "fusecache.serve.door",
        "fusecache.model",
        "fusecache.engine.recovery.offline",
    ),
    # The loader talks to the daemon through files; both share the format of the hints, and know the node's memory.
    "loader": (
        "fusecache.__version__",
        "loader.base",
        "loader.mds",
        "loader.writing",
        "loader.parquet",
        "loader.sampling",
        "loader.hints",
        "loader.torch",
        "loader.tools",
    ),
    "loader.base": (
        "loader.errors",
        "fusecache.config.values",
        "fusecache.installation",
        "fusecache.model.hints",
        "fusecache.model.mount_rows",
    ),
    "loader.order": ("loader.base", "loader.errors", "loader.world"),
    "loader.mds": ("loader.order", "loader.base", "loader.errors"),
    "loader.writing": (
        "loader.mds",
        "loader.base",
        "loader.errors",
        "loader.waiting",
        "fusecache.disk.beneath",
    ),
    "loader.sampling": ("loader.order", "loader.base", "loader.errors", "loader.world"),
    "loader.parquet": ("loader.hints", "loader.mds", "loader.base", "loader.errors"),
    "loader.hints": (
        "loader.mds",
        "loader.sampling",
        "loader.base",
        "loader.errors",
        "loader.world",
        "fusecache.config.node_limits",
        "fusecache.model.hints",
    ),
    "loader.torch": (
        "loader.hints",
        "loader.mds",
        "loader.sampling",
        "loader.order",
        "loader.base",
        "loader.errors",
        "loader.world",
    ),
    "loader.tools": (
        "loader",
        "loader.hints",
        "loader.mds",
        "loader.writing",
        "loader.parquet",
        "loader.sampling",
        "loader.order",
        "loader.base",
        "fusecache.disk.beneath",
        "fusecache.model.prices",
    ),
}

# library -> the rooms or modules that may import it. A library with no line here may be imported nowhere.
OWNERS: dict[str, tuple[str, ...]] = {
    "botocore": ("fusecache.remote.s3",),
    "h11": ("fusecache.serve.server",),
    "lmdb": ("fusecache.index",),
    "msgspec": ("loader.mds.index_parser",),
    "numpy": ("loader",),
    "prometheus_client": ("fusecache.mount.metrics", "fusecache.daemon.http_server"),
    "pyfuse3": ("fusecache.fuse.pyfuse3_session",),
    "torch": ("loader.torch",),
    "torchtitan": ("loader.torchtitan",),
    "tqdm": ("fusecache.mount.progress", "loader"),
    "trio": (
        "fusecache.engine",
        "fusecache.fuse",
        "fusecache.fs",
        "fusecache.daemon",
        "fusecache.folder",
        "fusecache.serve",
    ),
    "urllib3": ("fusecache.remote.clouds.opening",),
    "xxhash": ("fusecache.disk", "fusecache.engine", "loader"),
    "zstandard": ("loader",),
}

# Rooms of values and decisions: no I/O, no clock, no log; time and randomness are arguments.
PURE = ("fusecache.model", "fusecache.policy")
IMPURE_MODULES = frozenset(
    "asyncio fcntl io logging mmap os shutil socket subprocess tempfile threading time".split()  # noqa: SIM905
)


@dataclass(frozen=True, slots=True)
class Room:
    """One folder of modules. purpose: the first line of its docstring; may_import: rooms and single modules."""

    name: str
    purpose: str
    modules: int
    lines: int
    may_import: tuple[str, ...]


def project_files() -> dict[str, str]:
    """Source text of both packages by path from the root."""
    paths = [path for package in ("fusecache", "loader") for path in (ROOT / package).rglob("*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def rooms(files: Mapping[str, str]) -> list[Room]:
    """Every room with what it holds, from the top down as ROOMS has them."""
    found = []
    for name, may_import in ROOMS.items():
        folder = name.replace(".", "/")
        modules = [file for file in files if room_of(file) == name and not file.endswith("/__init__.py")]
        docstring = ast.get_docstring(ast.parse(files[f"{folder}/__init__.py"])) or ""
        lines = sum(files[file].count("\n") for file in modules)
        found.append(Room(name, docstring.partition("\n")[0], len(modules), lines, may_import))
    return found


def room_of(file: str) -> str:
    """The room of a file, as a dotted name."""
    return file.rpartition("/")[0].replace("/", ".")


def complaints(files: Mapping[str, str]) -> list[str]:
    """What is wrong with the imports of these files. files: path from the root -> source text."""
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for file, source in sorted(files.items()):
        tree = ast.parse(source, file)
        names = set(_imported_names(tree))
        found += [f"{file} may not import {name}" for name in sorted(names) if not _is_allowed(file, name)]
        if _is_pure(file) and any(isinstance(node, ast.AsyncFunctionDef) for node in ast.walk(tree)):
            found.append(f"{file} may not await")
        graph[file] = {target for name in names if (target := _target_file(name, files))} - {file}
    return found + _cycles(graph)


def repeated_class_names(files: Mapping[str, str]) -> dict[str, list[str]]:
    """Class names that a package has more than once: name -> files. A leading underscore does not count."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file, source in sorted(files.items()):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[file.split("/")[0], node.name.lstrip("_")].append(file)
    return {name: where for (_, name), where in places.items() if len(where) > 1}


def repeated_file_names(files: Mapping[str, str]) -> dict[str, list[str]]:
    """File names that too many modules of a package have: name -> files."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file in sorted(files):
        name = file.rpartition("/")[2]
        if name != "__init__.py":
            places[file.split("/")[0], name].append(file)
    return {name: where for (_, name), where in places.items() if len(where) > SAME_FILE_NAME_MAX}


def field_counts(files: Mapping[str, str]) -> dict[str, int]:
    """Fields of each class: what it declares, and what it sets on `self`. Class -> count."""
    counts = {}
    for source in files.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                counts[node.name] = len(_fields_of(node))
    return counts


def outside_wiring(files: Mapping[str, str]) -> list[str]:
    """Assignments in the engine to a callback of another object than `self`, as "file: target".

    A callback is an attribute `on_…`, or one that the engine annotates as a Callable. Such wiring hides who hears of
    what. The `Events` that a constructor receives show it (`fusecache/engine/events.py`).
    """
    trees = {file: ast.parse(text) for file, text in sorted(files.items()) if _is_engine(file)}
    callbacks = {name for tree in trees.values() for name in _callable_attributes(tree)}
    return [
        f"{file}: {ast.unparse(node)}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and (node.attr.startswith("on_") or node.attr in callbacks)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]


def table(files: Mapping[str, str]) -> str:
    """The rooms as a table in Markdown. Lines are rounded to hundreds, so that small changes leave it as it is."""
    storage = ", ".join(f"`{_short(each, 'fusecache')}`" for each in _STORAGE)
    note = f"`storage` stands for {storage}.\n\n"
    rows = ["| room | what it is | modules | lines | may import |", "|---|---|---|---|---|"]
    for room in rooms(files):
        may_import = ", ".join(_short(each, room.name) for each in room.may_import) or "nothing"
        may_import = may_import.replace(", ".join(_short(each, room.name) for each in _STORAGE), "storage")
        lines = max(100, round(room.lines, -2)) if room.modules else 0
        rows.append(f"| `{room.name}` | {room.purpose} | {room.modules} | {lines} | {may_import} |")
    return note + "\n".join(rows) + "\n"


def _short(name: str, room: str) -> str:
    package = room.split(".")[0]
    return name.removeprefix(f"{package}.")


def _imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that a module imports; `from a import b` is `a.b`, a relative import begins with a dot."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = (each.value for each in node.args if isinstance(each, ast.Constant))
            yield from (str(name) for name in names if str(name).startswith(("fusecache.", "loader.")))


def _is_allowed(file: str, name: str) -> bool:
    package = name.split(".")[0]
    if package in sys.stdlib_module_names:
        return not (_is_pure(file) and package in IMPURE_MODULES)
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    if package not in ("fusecache", "loader"):
        return f"{module}.".startswith(tuple(f"{owner}." for owner in OWNERS.get(package, ())))
    room = room_of(file)
    return any(_leads_into(name, target) for target in (room, *ROOMS[room]))


def _leads_into(name: str, target: str) -> bool:
    """Whether a dotted name lies in a room, not in a room below it, or is, or lies in, a single module."""
    if target not in ROOMS:
        return f"{name}.".startswith(f"{target}.")
    return name.startswith(f"{target}.") and not any(
        f"{name}.".startswith(f"{room}.") for room in ROOMS if room.startswith(f"{target}.")
    )


def _is_pure(file: str) -> bool:
    return f"{room_of(file)}.".startswith(tuple(f"{room}." for room in PURE))


def _is_engine(file: str) -> bool:
    return f"{room_of(file)}.".startswith(f"{_ENGINE}.")


def _callable_attributes(tree: ast.AST) -> Iterator[str]:
    """Attributes that a module annotates as a Callable, in a class's body or on `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and "Callable[" in ast.unparse(node.annotation):
            if isinstance(node.target, ast.Attribute):
                yield node.target.attr
            elif isinstance(node.target, ast.Name):
                yield node.target.id


def _target_file(name: str, files: Mapping[str, str]) -> str | None:
    """The project's file that a dotted name leads to, if any: a module, or the module that holds the name."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        stem = "/".join(parts[:length])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in files:
                return file
    return None


def _cycles(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["import cycle: " + " <- ".join(error.args[1])]
    return []


def _fields_of(node: ast.ClassDef) -> set[str]:
    declared = {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return declared | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == "self"
    }


BEGIN, END = "<!-- rooms: written by `python -m tests.support.rooms` -->\n", "<!-- end of rooms -->\n"
DOCUMENT = ROOT / "docs" / "architecture.md"


def table_in_document() -> str:
    """The table of rooms as docs/architecture.md has it now."""
    return DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]


def report(files: Mapping[str, str]) -> str:
    """The longest modules, the fullest rooms and the widest classes."""
    lines = {file: source.count("\n") for file, source in files.items()}
    counts = {
        f"lines, {len(files)} modules, {sum(lines.values())} in all": lines,
        "modules of a room": {room.name: room.modules for room in rooms(files)},
        "fields of a class": field_counts(files),
    }
    rows = []
    for title, each in counts.items():
        most = sorted(each.items(), key=lambda item: -item[1])[:_REPORTED]
        rows.append(f"{title}: " + ", ".join(f"{name} {count}" for name, count in most))
    return "".join(f"{row}\n" for row in rows)


def main() -> None:
    """Print the report, or write the table."""
    if sys.argv[1:] == ["--report"]:
        sys.stdout.write(report(project_files()))
        return
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table(project_files()) + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
