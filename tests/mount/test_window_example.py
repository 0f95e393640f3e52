"""The example of peers that train together over a bucket plays on two real mounts."""

import re
import sys

import pytest

from tests.support import ROOT
from tests.support.mounts import run


@pytest.mark.s3server_only
def test_four_peers_play_three_windows_together() -> None:
    done = run(sys.executable, "-m", "examples.buckets.window", cwd=ROOT, seconds=180)
    said = done.stdout.splitlines()
    assert re.search(r"^window 1 peer 0: left out .*peer-3.npz.zst$", done.stdout, re.MULTILINE)
    for window in range(3):
        members = re.findall(
            rf"^window {window} peer \d: aggregate of peers (.*) is equal$", done.stdout, re.MULTILINE
        )
        assert len(members) == 4
        assert len(set(members)) == 1
        assert ("3" in members[0]) == (window != 1)
    assert said[-2] == "the bucket has the last window only: 5 objects"
    assert said[-1].startswith("all checks held")
