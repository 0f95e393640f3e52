"""How this copy of the package was installed: the command that adds an optional part (extra), another copy beside it.

No index needs to know the package: pip finds the extras of an installed package in its metadata.
"""

import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

# Set for the `fusecache` that another one became: it does not look further.
CAME_BY_PATH = "FUSECACHE_CAME_BY_PATH"
# Files that Docker and podman put into their containers.
_CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def extra_command(extra: str) -> str:
    """Return the command that installs an extra into the environment of this interpreter."""
    root = Path(__file__).parents[1]
    is_checkout = (root / "pyproject.toml").exists()
    what = f"--editable {shlex.quote(f'{root}[{extra}]')}" if is_checkout else f"'fusecache[{extra}]'"
    python = shlex.quote(sys.executable)
    sudo = "" if os.access(sys.prefix, os.W_OK) else "sudo "
    if find_spec("pip") is not None:
        return f"{sudo}{python} -m pip install {what}"
    # The Debian package, the image, and an environment that uv made have no pip of their own.
    pip = f"{sudo}pip --python {python} install {what}"
    if any(mark.exists() for mark in _CONTAINER_MARKS):
        return f"build an image on this one, with RUN apt-get update && apt-get install --yes python3-pip && {pip}"
    # Debian refuses ensurepip for the system's Python.
    if sys.prefix != sys.base_prefix and find_spec("ensurepip") is not None:
        return f"{sudo}{python} -m ensurepip && {sudo}{python} -m pip install {what}"
    apt_sudo = "sudo " if os.geteuid() else ""
    return f"{apt_sudo}apt-get install python3-pip && {pip}"


def next_in_path() -> str | None:
    """Return the path of the `fusecache` that comes next in PATH, if this one was found there and cannot mount.

    A trainer's environment has this program with the loader, and comes before the node's own in PATH.
    """
    folder, name = os.path.split(sys.argv[0])
    # `dataset` belongs to the loader.
    if name != "fusecache" or sys.argv[1:2] == ["dataset"] or find_spec("trio"):
        return None
    own, folders = os.path.realpath(folder), [os.path.realpath(each) for each in os.get_exec_path()]
    if own not in folders or CAME_BY_PATH in os.environ:
        return None
    behind = folders[folders.index(own) + 1 :]
    return shutil.which(name, path=os.pathsep.join(each for each in behind if each != own))
