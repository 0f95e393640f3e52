"""`fusecache status`: asks the daemon about a mount or one path. Not here: the text (`status_text`)."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusecache.cli.views.status_text import status_view
from fusecache.model.errors import MountError
from fusecache.model.format_text import at_mount
from fusecache.mount.control_client import Mount, ask
from fusecache.mount.launch import mount_of_this_node, resolve_in_mount


def status(arguments: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the status of a path, or of the only mount; return the exit status."""
    found = status_of(arguments.path or mount_of_this_node(Path.cwd()))
    text = at_mount(status_view(found), found["mountpoint"])
    sys.stdout.write(json.dumps(found, indent=2) + "\n" if arguments.json else text)
    return 0


def status_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the status of a path. For a symlink in a mount: the target's status, with the link's own as `link`.

    If the target has no status, return the link's own, with the reason as `target_error`. Raises MountError.
    """
    mount, inner = resolve_in_mount(path, follows=False)
    own = _ask(path, mount, inner)
    if "link_to" not in own.get("there", {}):
        return own
    if not own["there"].get("link_followed", True):
        return {**own, "target_error": "the link is not followed (option symlinks)"}
    try:
        target = _ask(path, *resolve_in_mount(path))
    except MountError as exc:
        return {**own, "target_error": str(exc)}
    return {**target, "link": {name: own[name] for name in ("path", "state", "there")}}


def _ask(path: str | os.PathLike[str], mount: Mount, inner: str) -> dict[str, Any]:
    answer = ask(mount, "status", inner)
    if answer.result not in ("ok", "durable"):
        # The error below starts with the full path.
        message = answer.message.removeprefix(f"{inner}: ") if inner else answer.message
        raise MountError(f"{path}: {message or answer.result}")
    return answer.status
