"""The kernel's FUSE protocol, as far as it is used: structs, opcodes, flags. Names are those of <linux/fuse.h>.

A struct is written as the names and types of its fields: B, H, I and Q are unsigned integers of 1, 2, 4 and 8 bytes, i
and q signed ones. `tests/unit/fuse/test_protocol.py` compares all of it with the header of the machine.
"""

from enum import IntEnum
from struct import Struct

MAJOR = 7
# The oldest minor version whose structs are these: Linux 5.4.
OLDEST_MINOR = 31

_ATTR = (
    "ino:Q size:Q blocks:Q atime:Q mtime:Q ctime:Q atimensec:I mtimensec:I ctimensec:I mode:I nlink:I uid:I gid:I "
    "rdev:I blksize:I flags:I"
)
_ENTRY = (
    "nodeid:Q generation:Q entry_valid:Q attr_valid:Q entry_valid_nsec:I attr_valid_nsec:I "
    + " ".join(f"attr.{field}" for field in _ATTR.split())
)  # fmt: skip
FIELDS = {
    "in_header": "len:I opcode:I unique:Q nodeid:Q uid:I gid:I pid:I total_extlen:H padding:H",
    "out_header": "len:I error:i unique:Q",
    "init_in": "major:I minor:I max_readahead:I flags:I flags2:I unused:11I",
    "init_out": "major:I minor:I max_readahead:I flags:I max_background:H congestion_threshold:H max_write:I "
    "time_gran:I max_pages:H map_alignment:H flags2:I unused:7I",
    "entry_out": _ENTRY,
    "attr_out": "attr_valid:Q attr_valid_nsec:I dummy:I "
    + " ".join(f"attr.{field}" for field in _ATTR.split()),
    "dirent": "ino:Q off:Q namelen:I type:I",
    "statfs_out": "st.blocks:Q st.bfree:Q st.bavail:Q st.files:Q st.ffree:Q st.bsize:I st.namelen:I st.frsize:I "
    "st.padding:I st.spare:6I",
    "open_out": "fh:Q open_flags:I padding:I",
    "write_out": "size:I padding:I",
    "forget_in": "nlookup:Q",
    "forget_one": "nodeid:Q nlookup:Q",
    "batch_forget_in": "count:I dummy:I",
    "setattr_in": "valid:I padding:I fh:Q size:Q lock_owner:Q atime:Q mtime:Q ctime:Q atimensec:I mtimensec:I "
    "ctimensec:I mode:I unused4:I uid:I gid:I unused5:I",
    "mknod_in": "mode:I rdev:I umask:I padding:I",
    "mkdir_in": "mode:I umask:I",
    "rename_in": "newdir:Q",
    "rename2_in": "newdir:Q flags:I padding:I",
    "link_in": "oldnodeid:Q",
    "open_in": "flags:I open_flags:I",
    "create_in": "flags:I mode:I umask:I open_flags:I",
    "read_in": "fh:Q offset:Q size:I read_flags:I lock_owner:Q flags:I padding:I",
    "write_in": "fh:Q offset:Q size:I write_flags:I lock_owner:Q flags:I padding:I",
    "flush_in": "fh:Q unused:I padding:I lock_owner:Q",
    "release_in": "fh:Q flags:I release_flags:I lock_owner:Q",
    "fsync_in": "fh:Q fsync_flags:I padding:I",
    "interrupt_in": "unique:Q",
    "backing_map": "fd:i flags:I padding:Q",
    "notify_inval_inode_out": "ino:Q off:q len:q",
    "notify_inval_entry_out": "parent:Q namelen:I flags:I",
}


def _struct(name: str) -> Struct:
    return Struct("<" + "".join(field.rpartition(":")[2] for field in FIELDS[name].split()))


IN_HEADER = _struct("in_header")
OUT_HEADER = _struct("out_header")
INIT_IN = _struct("init_in")
INIT_OUT = _struct("init_out")
ENTRY_OUT = _struct("entry_out")
ATTR_OUT = _struct("attr_out")
DIRENT = _struct("dirent")
STATFS_OUT = _struct("statfs_out")
OPEN_OUT = _struct("open_out")
WRITE_OUT = _struct("write_out")
FORGET_IN = _struct("forget_in")
FORGET_ONE = _struct("forget_one")
BATCH_FORGET_IN = _struct("batch_forget_in")
SETATTR_IN = _struct("setattr_in")
MKNOD_IN = _struct("mknod_in")
MKDIR_IN = _struct("mkdir_in")
RENAME_IN = _struct("rename_in")
RENAME2_IN = _struct("rename2_in")
LINK_IN = _struct("link_in")
OPEN_IN = _struct("open_in")
CREATE_IN = _struct("create_in")
READ_IN = _struct("read_in")
WRITE_IN = _struct("write_in")
FLUSH_IN = _struct("flush_in")
RELEASE_IN = _struct("release_in")
FSYNC_IN = _struct("fsync_in")
INTERRUPT_IN = _struct("interrupt_in")
BACKING_MAP = _struct("backing_map")
NOTIFY_INVAL_INODE_OUT = _struct("notify_inval_inode_out")
NOTIFY_INVAL_ENTRY_OUT = _struct("notify_inval_entry_out")


class Opcode(IntEnum):
    """The requests that are answered with more than ENOSYS."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    READDIRPLUS = 44
    RENAME2 = 45


class Notify(IntEnum):
    """Codes of messages to the kernel that answer no request."""

    INVAL_INODE = 2
    INVAL_ENTRY = 3


# Flags of FUSE_INIT.
FLAGS = {
    "ASYNC_READ": 1 << 0,
    "ATOMIC_O_TRUNC": 1 << 3,
    "EXPORT_SUPPORT": 1 << 4,
    "BIG_WRITES": 1 << 5,
    "AUTO_INVAL_DATA": 1 << 12,
    "DO_READDIRPLUS": 1 << 13,
    "WRITEBACK_CACHE": 1 << 16,
    "PARALLEL_DIROPS": 1 << 18,
    "MAX_PAGES": 1 << 22,
    "INIT_EXT": 1 << 30,
    # From bit 32 on: in `flags2`, from Linux 6.9 on.
    "PASSTHROUGH": 1 << 37,
}

FATTR_MODE = 1 << 0
FATTR_UID = 1 << 1
FATTR_GID = 1 << 2
FATTR_SIZE = 1 << 3
FATTR_ATIME = 1 << 4
FATTR_MTIME = 1 << 5
FATTR_FH = 1 << 6
FATTR_ATIME_NOW = 1 << 7
FATTR_MTIME_NOW = 1 << 8
FATTR_CTIME = 1 << 10

FOPEN_DIRECT_IO = 1 << 0
FOPEN_KEEP_CACHE = 1 << 1
FOPEN_NONSEEKABLE = 1 << 2
FOPEN_PASSTHROUGH = 1 << 7

# ioctl(2) on /dev/fuse: the kernel's number for an open file that it may read itself, and its end. The first word of
# `unused` in init_out is max_stack_depth there, and `padding` in open_out is backing_id: names since Linux 6.9.
FUSE_DEV_IOC_BACKING_OPEN = 0x4010E501
FUSE_DEV_IOC_BACKING_CLOSE = 0x4004E502

FSYNC_FDATASYNC = 1 << 0
