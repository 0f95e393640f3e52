"""Queries of `fusecache status`: a mount, or one path. For a symlink in a mount, both the link and its target."""

import os
from typing import Any

from fusecache.model.errors import MountError
from fusecache.mount.control_client import Mount, ask
from fusecache.mount.launch import resolve_in_mount


def status_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the status of a path. For a symlink in a mount: the target's status, with the link's own as `link`.

    If the target has no status, return the link's own, with the reason as `target_error`. Raises MountError.
    """
    mount, inner = resolve_in_mount(path, follows=False)
    own = _ask(path, mount, inner)
    if "link_to" not in own.get("there", {}):
        return own
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
