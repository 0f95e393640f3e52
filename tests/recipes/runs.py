"""A trainer of examples/recipes in processes of its own, in its own virtual environment."""

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import ROOT

EXAMPLES = ROOT / "examples" / "recipes"
# A virtual environment for each recipe, with the recipe's name.
VENVS = Path(os.environ.get("FUSECACHE_TEST_RECIPES", ""))
# Two ranks that import all of it, beside another test on a busy machine.
END_SECONDS = 900.0
# Sums in one thread are the same sums each time; nothing is asked of a hub.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    # DeepSpeed compiles an operator for ranks without a GPU when it first starts; once is enough.
    "TORCH_EXTENSIONS_DIR": str(VENVS / "torch-extensions"),
    "PYTHONWARNINGS": "ignore",
    # LLM Foundry exports source files with imports in the order of a set.
    "PYTHONHASHSEED": "0",
    # A loss is in the output as soon as it is printed.
    "PYTHONUNBUFFERED": "1",
    # LitGPT imports the recipe's data module by its name; its model is too small to be compiled.
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "site"), str(EXAMPLES / "litgpt")]),
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


class Run:
    """A trainer that runs: `with Run(words, directory) as run`. Gone at the end of the block, with all its ranks."""

    def __init__(self, words: Sequence[str | Path], directory: Path) -> None:
        """words: a command below the virtual environments, and its arguments. directory: an own one, for its output."""
        directory.mkdir(parents=True, exist_ok=True)
        self._log_path = directory / "output"
        self._words = [VENVS / words[0], *words[1:]]
        kept = {name: os.environ[name] for name in ("LANG", "PATH") if name in os.environ}
        # No credentials, no endpoint: it knows directories alone.
        self._environment = {**kept, **ENVIRONMENT, "HOME": str(directory)}
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with open(self._log_path, "wb") as log:
            self._process = subprocess.Popen(
                self._words,
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """End the launcher and all ranks with SIGKILL; see them end."""
        assert self._process is not None
        for pid in [self._process.pid, *descendants(self._process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()

    def finish(self) -> None:
        """Return when it ended; fails the test if it did not end well."""
        assert self._process is not None
        code = self._process.wait(END_SECONDS)
        assert code == 0, f"{self._words} ended with {code}:\n{self.log()}"

    def ended(self) -> bool:
        """Return whether its launcher is gone."""
        assert self._process is not None
        return self._process.poll() is not None

    def losses(self, line: re.Pattern[str] = LOSS) -> dict[int, str]:
        """Return step -> loss of the steps that it made so far. line: what it prints of each; LOSS: to the last bit."""
        return {int(step): loss for step, loss in line.findall(self._log_path.read_text(errors="replace"))}

    def log(self) -> str:
        """Return the end of what it printed."""
        return self._log_path.read_text(errors="replace")[-5000:]


def run_to_the_end(
    words: Sequence[str | Path], directory: Path, line: re.Pattern[str] = LOSS
) -> dict[int, str]:
    """Run a trainer; return step -> loss."""
    with Run(words, directory) as run:
        run.finish()
        return run.losses(line)


def descendants(pid: int) -> list[int]:
    """Return the processes that a process began, and that those began. torchrun's ranks have sessions of their own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # ended meanwhile
        children.setdefault(int(text[text.rindex(")") + 2 :].split()[1]), []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        begun = children.get(queue.pop(), [])
        found += begun
        queue += begun
    return found
