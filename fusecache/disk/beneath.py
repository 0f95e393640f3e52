"""Reaches files below a folder part by part, and follows no symlink: whatever a bucket brings stays in the folder.

Each part is opened relative to its directory, so it does not matter which client puts a symlink where, nor when. This
is what RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS of openat2(2) do, which some containers forbid.
"""

import errno
import os
import stat
from contextlib import suppress

_PART = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_folder(root: str, path: str, *, create: bool = False, barred: os.stat_result | None = None) -> int:
    """Return a descriptor (O_PATH) of a folder below root, to be closed by the caller. create: make what is missing.

    path: "" is root. Raises OSError: NotADirectoryError, ELOOP for a symlink, EPERM for the barred folder in root. Its
    `filename` is the part of the path that is in the way, and its `strerror` says how to go on.
    """
    parts = path.split("/") if path else []
    if not {"", ".", ".."}.isdisjoint(parts):
        raise OSError(errno.EINVAL, "it leads out of the folder", path)
    held = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parts, 1):
            above = held
            held = _open_part(above, part, "/".join(parts[:number]), create=create)
            os.close(above)
            if number == 1 and barred is not None and os.path.samestat(os.fstat(held), barred):
                raise OSError(errno.EPERM, "it is fusecache's own folder: rename the object", part)
    except BaseException:
        os.close(held)
        raise
    return held


def _open_part(above: int, part: str, path: str, *, create: bool) -> int:
    if create:
        with suppress(FileExistsError):
            os.mkdir(part, dir_fd=above)
    try:
        return os.open(part, _PART, dir_fd=above)
    except NotADirectoryError as exc:
        if stat.S_ISLNK(os.stat(part, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(
                errno.ELOOP, "it is a symlink, which is not followed: rename or remove it", path
            ) from exc
        raise NotADirectoryError(
            errno.ENOTDIR, "it is a file, in the way of a directory: rename or remove it", path
        ) from exc


def open_beneath(path: str, flags: int) -> int:
    """Open a file by a path without symlinks, for `open(…, opener=open_beneath)`. Raises OSError, ELOOP for a symlink.

    path: of a folder, as os.path.realpath gives it, and a name in it.
    """
    folder, name = os.path.split(path)
    held = open_folder("/", folder.strip("/"))
    try:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=held)
    except OSError as exc:
        text = (
            "it is a symlink, which is not followed: remove it" if exc.errno == errno.ELOOP else exc.strerror
        )
        raise OSError(exc.errno, text, path) from exc
    finally:
        os.close(held)


def replace_text(path: str, text: str) -> None:
    """Replace a file atomically. path, errors: as of `open_beneath`."""
    temporary = f"{path}.tmp"
    with open(temporary, "w", opener=open_beneath) as file:
        file.write(text)
    folder, name = os.path.split(path)
    held = open_folder("/", folder.strip("/"))
    try:
        os.replace(f"{name}.tmp", name, src_dir_fd=held, dst_dir_fd=held)
    finally:
        os.close(held)
