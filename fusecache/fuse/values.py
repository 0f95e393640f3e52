"""What request handlers receive and return."""

import os
from dataclasses import dataclass
from typing import Protocol

# The inode of a mount's root directory.
ROOT_INODE = 1
# rename(2): fail if the new name exists (linux/fs.h).
RENAME_NOREPLACE = 1
_MOST_ERRNO = 511  # the kernel refuses a reply with a larger one


class FUSEError(Exception):
    """Raised by a handler: the system call fails with this errno."""

    def __init__(self, number: int) -> None:
        """number: an errno from 1 to 511. Raises ValueError for another one."""
        if not 0 < number <= _MOST_ERRNO:
            raise ValueError(f"{number} is not an errno that the kernel accepts")
        super().__init__(number)
        self.errno = number

    def __str__(self) -> str:
        return os.strerror(self.errno)


class MountRefused(Exception):  # what happened, not an error of the program
    """A file system cannot be mounted: no /dev/fuse, no permission, no helper, or a kernel that is too old."""


@dataclass(frozen=True, slots=True)
class MountPlan:
    """Where and how to mount.

    source: what the mount table shows as the device; any text without NUL. subtype: the mount's type is fuse.SUBTYPE.
    allow_other: other users than the one who mounts may use the mount.
    """

    mountpoint: str
    source: str
    subtype: str
    allow_other: bool = False


@dataclass(slots=True)
class RequestContext:
    """Who makes the system call. pid: its thread, 0 if that is not visible here. umask: of create, mkdir and mknod.

    unique: the request's number. is_redone: a process that was killed had begun this request, and not answered it.
    """

    uid: int
    gid: int
    pid: int
    umask: int = 0
    unique: int = 0
    is_redone: bool = False


class EntryAttributes:
    """An inode's attributes, as stat(2) shows them, and how long the kernel may use them.

    Times are nanoseconds since 1970. st_size: bytes. st_blocks: units of 512 bytes. entry_timeout: seconds for which
    the name leads to this inode; attr_timeout: seconds for which the attributes hold. A lookup that returns st_ino 0
    says that the name does not exist, for entry_timeout.
    """

    # Defaults live in the class: a handler sets what differs, so making one of these costs little.
    st_ino: int = 0
    generation: int = 0
    entry_timeout: float = 300
    attr_timeout: float = 300
    st_mode: int = 0o100000
    st_nlink: int = 1
    st_uid: int = 0
    st_gid: int = 0
    st_rdev: int = 0
    st_size: int = 0
    st_blksize: int = 4096
    st_blocks: int = 0
    st_atime_ns: int = 0
    st_mtime_ns: int = 0
    st_ctime_ns: int = 0


@dataclass(slots=True)
class SetattrFields:
    """Which attributes a setattr request changes."""

    update_atime: bool = False
    update_mtime: bool = False
    update_ctime: bool = False
    update_mode: bool = False
    update_uid: bool = False
    update_gid: bool = False
    update_size: bool = False


@dataclass(slots=True)
class FileInfo:
    """An open file. fh: the number that later requests carry.

    direct_io: reads and writes bypass the kernel's page cache. keep_cache: pages from earlier opens stay valid.
    backing_id: of `open_backing`, for passthrough; 0: reads come to the handler. All opens of an inode at a time must
    have the same one, else the kernel fails them (EIO).
    """

    fh: int = 0
    direct_io: bool = False
    keep_cache: bool = True
    nonseekable: bool = False
    backing_id: int = 0


@dataclass(slots=True)
class StatvfsData:
    """A file system's space, as statvfs(3) shows it. f_blocks, f_bfree, f_bavail: units of f_frsize bytes."""

    f_bsize: int = 0
    f_frsize: int = 0
    f_blocks: int = 0
    f_bfree: int = 0
    f_bavail: int = 0
    f_files: int = 0
    f_ffree: int = 0
    f_favail: int = 0
    f_namemax: int = 0


class ReaddirToken(Protocol):
    """The reply to one readdir request, while its handler fills it."""

    def add(self, name: bytes, entry: EntryAttributes, next_id: int) -> bool:
        """Add an entry; return False, without adding it, if the reply is full.

        next_id: the `start_id` of a later request that continues behind this entry. Each entry but `.` and `..` gives
        the kernel a reference to its inode, as a lookup does.
        """
        ...
