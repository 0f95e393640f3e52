"""Compile caches on a mount: what one node has compiled, the next one loads."""

import json
import shutil
from pathlib import Path

import pytest

from tests.mount.conftest import Place
from tests.support.mounts import run_python

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)

PROGRAM = """
import json, os, sys
os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1]
# Else it first compiles a program for each instruction set of the processor: half of this test's time.
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
import torch
from torch._dynamo.utils import counters
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
with torch.no_grad():
    result = torch.compile(model)(torch.ones(4, 64))
found = counters["inductor"]
print(json.dumps({
    "compiled": found["fxgraph_cache_miss"], "loaded": found["fxgraph_cache_hit"], "sum": float(result.sum()),
}))
"""


def compiled_in(folder: Path) -> dict[str, float]:
    """Compile a model with torch's caches in a folder; return how often that compiled, and how often it loaded."""
    found: dict[str, float] = json.loads(run_python(PROGRAM, folder, seconds=300).stdout.splitlines()[-1])
    return found


def compiled_libraries(place: Place) -> set[str]:
    """Return the names of the compiled libraries in the bucket."""
    return {name for name in place.bucket.names() if name.endswith(".so")}


def test_a_model_that_one_node_has_compiled_is_not_compiled_by_the_next(place: Place) -> None:
    """And no name of the cache is in conflict: torch writes each under a temporary name first."""
    first = compiled_in(place.path / "inductor")
    assert (first["compiled"], first["loaded"]) == (1, 0)
    place.sync()
    libraries = compiled_libraries(place)
    assert libraries
    second = compiled_in(place.second / "inductor")
    assert (second["compiled"], second["loaded"]) == (0, 1)
    assert second["sum"] == first["sum"]
    place.second_mount.sync(place.name)
    assert compiled_libraries(place) == libraries, "the second node has run the C++ compiler"
    for mount in (place.first_mount, place.second_mount):
        assert mount.status()["conflicts"] == []
