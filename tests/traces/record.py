"""Records traces: `python -m tests.traces.record [NAME…]` runs programs under strace. `make traces` does all of them.

Needs strace, and the environments of `make test-trainers` and `make test-recipes`. A program whose library is missing
is left out, by name.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.recipes import runs
from tests.support import ROOT
from tests.traces.programs import PROGRAMS
from tests.traces.strace_log import WATCHED, read_calls
from tests.traces.trace import RECORDED, Call, Mark, Trace, dump
from tests.trainers.workers import ENVIRONMENT

# Another file system than /var/tmp: what libraries make below TMPDIR and move, they copy.
MEMORY = "/dev/shm"
# These make hard links, and rename instead where that is refused, as on a mount.
LINKS = ("git",)


def record(name: str) -> Trace:
    """Run a program in an empty directory; return what it did there."""
    with (
        tempfile.TemporaryDirectory(dir=MEMORY) as temporary,
        tempfile.TemporaryDirectory(dir="/var/tmp") as work,
    ):
        root, logs = Path(work) / "root", Path(work) / "logs"
        root.mkdir()
        logs.mkdir()
        words = ["strace", "-ff", "-ttt", "-y", "-s", "0", "--seccomp-bpf", "-e", "signal=none"]
        words += ["-e", f"trace={WATCHED}"]
        if name in LINKS:
            words += ["-e", "inject=link,linkat:error=EPERM"]
        words += [
            "-o",
            str(logs / "log"),
            str(PROGRAMS[name].python),
            "-m",
            "tests.traces.programs",
            name,
            str(root),
        ]
        environment = {
            **os.environ,
            **runs.ENVIRONMENT,
            **ENVIRONMENT,
            "TMPDIR": temporary,
            "HOME": temporary,
        }
        environment |= {
            "TORCH_EXTENSIONS_DIR": str(ROOT / "build/recipes/torch-extensions"),
            "PYTHONPATH": python_path(name),
        }
        subprocess.run(words, cwd=ROOT, env=environment, check=True, stdin=subprocess.DEVNULL)
        lines = [_mark(call) if call.name == "mark" else call for call in read_calls(logs, root)]
        return Trace(name, versions(name), tuple(lines), tree_sizes(root))


def python_path(name: str) -> str:
    """Return where a program finds what its interpreter does not have."""
    folders = {"tensorboard": "build/traces", "wandb": "build/traces"}
    more = "tests/recipes/site" if PROGRAMS[name].recipe else folders.get(name)
    return os.pathsep.join([str(ROOT), *([str(ROOT / more)] if more else [])])


def tree_sizes(root: Path) -> dict[str, int | str | None]:
    """Return everything below a directory as a trace's last line has it."""
    found: dict[str, int | str | None] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            if not (target := os.readlink(path)).startswith("/"):  # a mount would have refused it
                found[name] = f"-> {target}"
        else:
            found[name] = None if path.is_dir() else path.stat().st_size
    return found


def _mark(call: Call) -> Mark:
    name, files, shows = json.loads(call.arguments[0])
    return Mark(call.milliseconds, name, tuple(files), tuple(shows))


TOOLS = {"rsync": "rsync", "rsync-in-place": "rsync", "tar": "tar", "git": "git"}


def versions(name: str) -> str:
    """Return the versions that a trace is of; "": a library is not installed."""
    if name in TOOLS:
        said = subprocess.run([TOOLS[name], "--version"], check=True, capture_output=True, text=True).stdout
        return " ".join(said.split("\n")[0].split()[:4])
    program = PROGRAMS[name]
    ask = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    try:
        done = subprocess.run(
            [program.python, "-c", ask, *program.packages],
            env={**os.environ, "PYTHONPATH": python_path(name)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (FileNotFoundError, subprocess.CalledProcessError):
        return ""
    return ", ".join(map(" ".join, zip(program.packages, done.stdout.split(), strict=True)))


def main(names: list[str]) -> None:
    """Record programs, all if none is named."""
    RECORDED.mkdir(exist_ok=True)
    for name in names or PROGRAMS:
        if not versions(name):
            print(f"{name}: left out, {PROGRAMS[name].packages[0]} is not installed")  # noqa: T201
            continue
        trace = record(name)
        path = RECORDED / f"{name}.jsonl"
        dump(trace, path)
        print(f"{name}: {len(trace.lines)} calls, {path.stat().st_size} bytes, {trace.versions}")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
