"""What a daemon that was killed left to the one that goes on with its mount (`fs/kept_files.py` reads it)."""

from dataclasses import dataclass, field
from typing import NamedTuple

from fusecache.model.objects import ObjectInfo
from fusecache.model.records import PosixAttributes

# The generation of content in which bytes are missing that a program wrote. It is never published.
LOST = -1


@dataclass(frozen=True, slots=True)
class KeptNode:
    """An inode that the kernel knows. parent: its directory's number, 0 if it has no name.

    generation: of the local content; 0 if it has none, LOST if a write to it failed. object: the version that the
    bucket shows under its name, as far as it was known.
    is_written: a program has it open for writing.
    """

    number: int
    parent: int
    name: str
    attributes: PosixAttributes
    generation: int = 0
    object: ObjectInfo | None = None
    is_written: bool = False


class ReadPlace(NamedTuple):  # one is made for each name that a directory returns
    """How far an open directory was read: `position` names were returned.

    after: the last one's sort name, as in `DirectoryHandle`. early_files: of the names returned, the files in whose
    place a directory of the same name may still follow.
    """

    position: int
    after: str
    early_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KeptReading:
    """The reading of an open directory. places: those from which the kernel may go on."""

    places: tuple[ReadPlace, ...]


@dataclass(frozen=True, slots=True)
class KeptHandle:
    """A handle that the kernel has from an earlier daemon. backing_id: of an open by passthrough, else 0.

    reading: of a directory whose names were asked for. was_killed: the process that opened the file.
    """

    number: int
    inode: int
    pid: int
    is_directory: bool = False
    writable: bool = False
    process: int = 0
    appends: bool = False
    backing_id: int = 0
    reading: KeptReading | None = None
    was_killed: bool = False


@dataclass(slots=True)
class Predecessor:
    """What a killed daemon left to this one, as its journal has it.

    start: how many daemons have served the mount before this one. began_ns: when the first one did, since 1970.
    is_whole: all that it left was readable.
    """

    start: int
    began_ns: int
    directories: list[KeptNode] = field(default_factory=list)
    files: list[KeptNode] = field(default_factory=list)
    handles: list[KeptHandle] = field(default_factory=list)
    is_whole: bool = True

    @property
    def written(self) -> set[int]:
        """The generations that a program has open for writing."""
        return {each.generation for each in self.files if each.is_written}
