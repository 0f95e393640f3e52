"""`make install` asks apt or dnf for the packages of the daemon, each by the name that the distribution has."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

DAEMON = [
    "e2fsprogs",
    "fuse3",
    "gcc",
    "libc6-dev",
    "libfuse3-dev",
    "pkg-config",
    "python3",
    "python3-dev",
    "python3-venv",
]
TOOLS = ("basename", "cat", "env", "id", "mktemp", "rm", "sh", "tr")


def made(folder: Path, **programs: str) -> Path:
    """Return a folder with a few tools, and programs that stand for a package manager's."""
    for name in TOOLS:
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, script in {"sudo": 'exec "$@"', **programs}.items():
        (folder / name).write_text(f"#!{shutil.which('sh')}\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def asked(folder: Path, *packages: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", ROOT / "scripts/system_packages.sh", *packages],
        env={"PATH": str(folder), "OUT": str(folder / "out"), **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_daemons_packages_are_those_of_make() -> None:
    assert f"DAEMON_PACKAGES := {' '.join(DAEMON)}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("python", ["python3", "/usr/bin/python3.11"])
def test_dnf_gets_the_counterparts_of_what_is_missing(tmp_path: Path, python: str) -> None:
    # gcc is there.
    folder = made(tmp_path, dnf='echo "$@" >>"$OUT"', rpm='[ "$4" = gcc ]')
    assert asked(folder, *DAEMON, PYTHON=python).returncode == 0
    name = os.path.basename(python)
    assert (folder / "out").read_text().split("install ")[1].split() == (
        f"e2fsprogs fuse3 glibc-devel fuse3-devel pkgconf-pkg-config {name} {name}-devel".split()
    )


def test_apt_gets_what_is_missing_after_its_lists(tmp_path: Path) -> None:
    dpkg = 'case "$*" in *fuse3) echo installed ;; *) exit 1 ;; esac'
    folder = made(tmp_path, **{"apt-get": 'echo "$@" >>"$OUT"', "dpkg-query": dpkg})
    assert asked(folder, "fuse3", "gcc", "python3-venv", "rpm-build").returncode == 0
    assert (folder / "out").read_text().splitlines() == [
        "-q update",
        "-q install --yes --no-install-recommends gcc python3-venv rpm",
    ]


def test_nothing_is_asked_if_all_is_there(tmp_path: Path) -> None:
    folder = made(tmp_path, dnf='echo "$@" >>"$OUT"', rpm="exit 0")
    done = asked(folder, *DAEMON)
    assert (done.returncode, done.stdout, (folder / "out").exists()) == (0, "", False)


def test_what_the_manager_says_is_shown_if_it_fails(tmp_path: Path) -> None:
    folder = made(tmp_path, dnf="echo no such package >&2; exit 1", rpm="exit 1")
    done = asked(folder, "fuse3")
    assert (done.returncode, done.stderr) == (1, "no such package\n")


def test_another_system_is_told_what_to_install(tmp_path: Path) -> None:
    done = asked(made(tmp_path), "fuse3", "gcc")
    assert done.returncode == 1
    assert "counterparts of: fuse3 gcc" in done.stderr
    assert "APT= (empty)" in done.stderr
