"""Run MosaicML's own tests with the classes of `loader.streaming`; print how many pass, and what the others ask for.

    python -m tests.streaming_suite FOLDER     FOLDER: github.com/mosaicml/streaming at the version that is installed

The exit status is 1 if a test fails for a reason that is not in REASONS, or if fewer than LEAST_PASSED passed.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.support import ROOT

FILES = (
    "compression",
    "eviction",
    "hashing",
    "laziness",
    "local",
    "mixing",
    "reader",
    "stream",
    "streaming",
    "unsafe_types",
    "writer",
)
# Pattern of a failed test's name or message -> what the test asks for. The first that fits counts.
REASONS = {
    r"test_eviction|test_cache_limit|test_accidental_shard_delete|test_dataset_compression|test_reader_download_fail": (
        "a local copy, which is evicted or downloaded again: here a dataset is read where it is"
    ),
    r"test_local_is_none|test_local_exists|test_existing_local|test_same_local_diff_remote|test_missing_index_json": (
        "the directory of such a copy"
    ),
    r"_Exception|_exception|test_exist_ok|test_invalid_args|test_max_size_limit|unsafe_types_unsafe": (
        "the words of an error, or its kind or moment"
    ),
    r"resample_streams|test_dataloader_device_per_stream|test_config": (
        "what only the library itself has, such as `resample_streams`"
    ),
    r"registry|test_custom_stream_name": "a registry of stream classes: `stream_name` is refused here",
    r"_warning": "warnings of `predownload` and `shuffle_block_size`, which mean nothing here",
    r"XSVWriter|JSONWriter": "shards of CSV, TSV, XSV or JSON, which are not read here",
}
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\w+\.py\S*.*)$", re.MULTILINE)
# How many passed when REASONS were written.
LEAST_PASSED = 460
_PASSED = re.compile(r"(\d+) passed")
# pytest 9 refuses a mark on a fixture. It had no effect there before.
_MARKED_FIXTURE = re.compile(r"^@pytest\.mark\.usefixtures\(.*\)\n(?=@pytest\.fixture)", re.MULTILINE)


def main(folder: Path) -> int:
    """Copy the tests, run them, and report; return the exit status."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        shutil.copytree(folder / "tests", Path(scratch, "tests"))
        shutil.copy(Path(__file__).with_name("face.py"), scratch)
        for file in Path(scratch, "tests").glob("test_*.py"):
            file.write_text(_MARKED_FIXTURE.sub("", file.read_text()))
        Path(scratch, "pytest.ini").write_text("[pytest]\n")
        words = [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-p",
            "face",
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=no",
        ]
        words += ["--timeout=120", *(f"tests/test_{name}.py" for name in FILES)]
        # The plugin's folder comes last: `tests` is this project's until the plugin has what it needs.
        paths = {"PYTHONPATH": f"{ROOT}:{scratch}", "COLUMNS": "1000"}
        told = subprocess.run(
            words, cwd=scratch, env=os.environ | paths, capture_output=True, text=True, check=False
        )
    return report(told.stdout + told.stderr)


def report(told: str) -> int:
    """Print a table of what pytest said; return the exit status."""
    reasons: Counter[str] = Counter()
    other: list[str] = []
    failed = _FAILED.findall(told)
    for line in failed:
        why = next((why for pattern, why in REASONS.items() if re.search(pattern, line)), None)
        if why is None:
            other.append(line)
        else:
            reasons[why] += 1
    passed = int(next(iter(_PASSED.findall(told)), 0))
    say(f"{passed} of {passed + len(failed)} pass\n")
    for why, count in reasons.most_common():
        say(f"{count:6}  {why}")
    for line in other:
        say(f"not explained: {line}")
    if passed < LEAST_PASSED:
        say(told)
    return 1 if other or passed < LEAST_PASSED else 0


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
