"""The examples of buckets that need mounts: peers that train together, and an endpoint that dies."""

import re
import sys

from tests.support import ROOT
from tests.support.mounts import run


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


def test_an_endpoint_dies_in_the_middle_of_a_read() -> None:
    done = run(sys.executable, "-m", "examples.buckets.failover", cwd=ROOT, seconds=180)
    assert len(re.findall(r"^ok      ", done.stdout, re.MULTILINE)) == 5, done.stdout
