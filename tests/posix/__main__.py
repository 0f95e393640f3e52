"""Run pjdfstest on a mount of the project's S3 server; print how many checks passed, and why the others did not.

    python -m tests.posix FOLDER [TEST…]     as root. FOLDER: a built copy of github.com/pjd/pjdfstest.
                                             TEST: folders of its tests, such as rename; all take 8 minutes

The exit status is 1 if a check fails for a reason that is not in REASONS.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.s3server import S3Server
from tests.support.mounts import Mount
from tests.support.s3_buckets import Bucket, Service

# What a failed check says -> why. The first that fits counts.
REASONS = {
    r"\blink | nlink|,nlink": "hard links: refused, as a bucket has none",
    "ENAMETOOLONG": "a path of more than 1 024 bytes is longer than a key may be",
    "atime": "the time of access is not kept: it is shown as that of the last change of content",
    r"^not ok \d+$": "ctime is not kept: it is shown as the time of the last change of content",
    r"got ENOENT$": "what a refused link would have made is not there",
}
_FILE = re.compile(r"^(\S+/tests/(\w+)/\d+\.t) \.+", re.MULTILINE)


def main(folder: Path, tests: list[str]) -> int:
    """Mount, test, unmount; return the exit status."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch, S3Server() as server:
        os.chmod(scratch, 0o755)
        server.control.set_rules(write_interval_seconds=0.0)
        service = Service(server.endpoint_url, server.access_key, server.secret_key, server.bucket)
        mount = Mount(Bucket(service, service.client(), ""), Path(scratch, "mnt"), Path(scratch, "cache"))
        mount.path.mkdir()
        mount.start("--allow-other", "--posix-metadata", "--cache-size", "4GiB")
        try:
            (mount.path / "tests").mkdir()
            words = ["prove", "--verbose", "--recurse", *(folder / "tests" / each for each in tests or [""])]
            told = subprocess.run(
                words, cwd=mount.path / "tests", capture_output=True, text=True, check=False
            ).stdout
        finally:
            mount.remove()
    return report(told)


def say(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")


def report(told: str) -> int:
    """Print a table of what pjdfstest said; return the exit status."""
    passed, failed, reasons = Counter[str](), Counter[str](), Counter[str]()
    other: list[str] = []
    parts = _FILE.split(told)
    for operation, text in zip(parts[2::3], parts[3::3], strict=True):
        passed[operation] += len(re.findall(r"^ok \d+", text, re.MULTILINE))
        for line in re.findall(r"^not ok (?!.*# TODO).*$", text, re.MULTILINE):
            failed[operation] += 1
            why = next((why for pattern, why in REASONS.items() if re.search(pattern, line)), None)
            if why is None:
                other.append(f"{operation}: {line}")
            else:
                reasons[why] += 1
    for operation in sorted(passed | failed):
        say(f"{operation:16}{passed[operation]:6} passed{failed[operation]:6} failed")
    say(f"{'in all':16}{passed.total():6} passed{failed.total():6} failed\n")
    for why, count in reasons.most_common():
        say(f"{count:6}  {why}")
    for line in other:
        say(f"not explained: {line}")
    return 1 if other or not passed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
