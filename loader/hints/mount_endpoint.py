"""Finds the daemon of the mount that a directory lies on, and sends messages to it."""

import errno
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from fusecache.model.hints import FOLDER

_SOCKET_VARIABLE = "FUSECACHE_SOCKET"
_ANSWER_SECONDS = 30.0
# The errno for texts in the socket's answer. Writing the hint file instead reports its errno directly.
_REJECTIONS = {"no plan": errno.ENOENT, "all jobs together": errno.EPERM, "try again later": errno.EPERM}
# The inode number of a mount's root (linux/fuse.h).
_FUSE_ROOT_ID = 1


@dataclass(frozen=True, slots=True)
class MountEndpoint:
    """Where a mount accepts hints: files in its directory, or its daemon's socket on a read-only mount."""

    root: Path

    def send(self, file: str, message: bytes) -> None:
        """Send a message for a hint file; b"" withdraws what the job has sent.

        Raises OSError: EINVAL if the daemon rejects it, EPERM if it rejects it until other jobs end.
        """
        path = self.root / ".fusecache" / FOLDER / file
        try:
            if message:
                path.write_bytes(message)
            else:
                path.unlink()
        except OSError as problem:
            if problem.errno not in (errno.EROFS, errno.EACCES):
                raise
            self._send_by_socket(file, message)

    def _send_by_socket(self, file: str, message: bytes) -> None:
        address = os.environ.get(_SOCKET_VARIABLE) or (self.root / ".fusecache/socket").read_text().strip()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            connection.connect(address)
            request = {"command": "hint", "file": file, "bytes": len(message)}
            connection.sendall(json.dumps(request).encode() + b"\n" + message)
            with connection.makefile("rb") as lines:
                try:
                    answer = json.loads(lines.readline())
                except ValueError as problem:
                    raise OSError(errno.EPROTO, f"the daemon's answer is not JSON: {problem}") from problem
        if answer.get("result") != "ok":
            reason = str(answer.get("message"))
            known = (number for words, number in _REJECTIONS.items() if words in reason)
            raise OSError(next(known, errno.EINVAL), reason)


def find_endpoint(directory: str | Path) -> tuple[MountEndpoint, str] | None:
    """Return the endpoint of the mount that a directory lies in, and its path there; None if it is in no mount.

    The root must be a real mount point: the loader never writes hint files into a plain directory.
    """
    path = Path(os.path.realpath(directory))
    for root in (path, *path.parents):
        if os.path.ismount(root):
            try:
                # A folder of a mount that is bound elsewhere: its `.fusecache` would come from the bucket.
                if root.stat().st_ino != _FUSE_ROOT_ID:
                    return None
                if not (root / ".fusecache" / FOLDER).is_dir() or not (root / ".fusecache/socket").is_file():
                    return None
            except OSError:  # another kind of mount, or its daemon is gone
                return None
            inner = path.relative_to(root).as_posix()
            return MountEndpoint(root), "" if inner == "." else inner + "/"
    return None
