"""Gives the names of `loader.streaming` to all who import them from `streaming`. A plugin of pytest: `-p face`.

It lies in the folder of the tests, as their package is called `tests`, too: ours is forgotten after the import.
"""

import sys

import loader.streaming
from tests.support.real_streaming import import_streaming

import_streaming()
for found in [name for name in sys.modules if name == "tests" or name.startswith("tests.")]:
    del sys.modules[found]
for module in list(sys.modules.values()):
    if module.__name__.partition(".")[0] == "streaming":
        for name in loader.streaming.__all__:
            if hasattr(module, name):
                setattr(module, name, getattr(loader.streaming, name))
