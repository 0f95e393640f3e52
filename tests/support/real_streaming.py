"""Makes the installed MosaicML streaming importable, to compare ourselves with it.

Its vision half imports torchvision, whose wheel may be built for another torch than the one at hand and then
fails on operators that do not exist. Nothing here uses them, so they are declared, not implemented.
Use: `from tests.support.real_streaming import import_streaming; streaming = import_streaming()`, in a subprocess,
too.
"""

import importlib
import sys
import warnings
from types import ModuleType

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
        return importlib.import_module("streaming")
