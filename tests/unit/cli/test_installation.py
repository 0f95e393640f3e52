"""The command that installs an extra, for each way in which the package can be installed."""

import os
import sys
from pathlib import Path

import pytest

from fusecache import installation
from fusecache.installation import extra_command
from tests.support import ROOT


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As a wheel, in a virtual environment that this user, root, may change, and no container."""
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "site-packages/fusecache/installation.py"))
    monkeypatch.setattr(installation, "_CONTAINER_MARKS", (tmp_path / "mark",))
    monkeypatch.setattr(sys, "executable", "/opt/fusecache/venv/bin/python3")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return tmp_path


def test_in_a_checkout_it_is_the_checkout(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "__file__", str(ROOT / "fusecache/installation.py"))
    assert extra_command("gcs") == f"/opt/fusecache/venv/bin/python3 -m pip install --editable '{ROOT}[gcs]'"


def test_of_a_wheel_it_is_what_its_environment_has(installed: Path) -> None:
    assert extra_command("gcs") == "/opt/fusecache/venv/bin/python3 -m pip install 'fusecache[gcs]'"


def test_what_belongs_to_root_needs_sudo(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(installed))
    assert extra_command("gcs") == "sudo /opt/fusecache/venv/bin/python3 -m pip install 'fusecache[gcs]'"


def test_without_pip_it_is_that_of_the_system(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    command = "pip --python /opt/fusecache/venv/bin/python3 install 'fusecache[gcs]'"
    assert extra_command("gcs") == f"apt-get install python3-pip && {command}"
    (installed / "mark").touch()
    assert extra_command("gcs") == (
        f"build an image on this one, with RUN apt-get update && apt-get install --yes python3-pip && {command}"
    )


def test_apt_needs_root_also_where_the_environment_is_the_users(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    command = "pip --python /opt/fusecache/venv/bin/python3 install 'fusecache[gcs]'"
    assert extra_command("gcs") == f"sudo apt-get install python3-pip && {command}"
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(installed))
    assert extra_command("gcs") == f"sudo apt-get install python3-pip && sudo {command}"


def test_a_users_environment_without_pip_gets_it_from_python(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "find_spec", lambda name: None if name == "pip" else name)
    python = "/opt/fusecache/venv/bin/python3"
    ensured = f"{python} -m ensurepip && {python} -m pip install 'fusecache[gcs]'"
    system = f"sudo apt-get install python3-pip && pip --python {python} install 'fusecache[gcs]'"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert extra_command("gcs") == ensured
    # Debian refuses ensurepip for the system's Python.
    monkeypatch.setattr(sys, "base_prefix", str(installed))
    assert extra_command("gcs") == system
