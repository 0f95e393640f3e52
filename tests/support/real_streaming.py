"""Makes the installed MosaicML streaming importable, to compare ourselves with it.

Its vision half imports torchvision, whose wheel may be built for another torch than the one at hand and then
fails on operators that do not exist. Nothing here uses them, so they are declared, not implemented.
Use: `from tests.support.real_streaming import import_streaming; streaming = import_streaming()`, in a subprocess,
too.
"""

import fcntl
import importlib
import os
import sys
import warnings
from types import ModuleType
from typing import Any

SHARED_MEMORY = "/dev/shm"

_DECLARED: list[
    object
] = []  # torch.library.Library objects take their operators along when they are collected
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def mend_torchvision() -> None:
    """Let `import torchvision` succeed, whatever torch it was built for. ImportError if it is not installed."""
    # Its imports warn (deprecated modules of others), and pytest makes errors of warnings.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module("torchvision")
        except RuntimeError:
            for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
                del sys.modules[name]
            library = importlib.import_module("torch").library.Library("torchvision", "DEF")
            for operator in _OPERATORS:
                library.define(operator)
            _DECLARED.append(library)


def import_streaming() -> ModuleType:
    """Return the real `streaming` package. Raises ImportError if it is not installed."""
    mend_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        streaming = importlib.import_module("streaming")
        _choose_names_in_turn(importlib.import_module("streaming.base.dataset"))
    return streaming


def _choose_names_in_turn(module: Any) -> None:
    """Let one process at a time choose the names of a dataset's shared memory, which are the whole machine's.

    The library looks which number is free, and then takes it: of two tests that run at once, one failed.
    """
    choose = module.get_shm_prefix
    if choose.__module__ == __name__:
        return

    def choose_in_turn(*arguments: Any, **options: Any) -> Any:
        folder = os.open(SHARED_MEMORY, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            return choose(*arguments, **options)
        finally:
            os.close(folder)

    module.get_shm_prefix = choose_in_turn
