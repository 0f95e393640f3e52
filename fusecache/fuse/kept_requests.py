"""Requests of the kernel in shared memory, from the moment they are read until they are answered.

If the process is killed, its successor finds the unanswered ones, and answers them. The reply to a change is
kept before it is sent: the successor sends it again, and does not carry the change out twice. The kernel ignores a
second reply.

A request lies at the start of its place. A place is free while the first word there, the request's length, is 0. The
kernel writes it; this process clears it after the reply.
"""

import errno
import mmap
import os
import struct
from dataclasses import dataclass

from fusecache.fuse.device import RequestBuffer
from fusecache.fuse.protocol import IN_HEADER, OUT_HEADER

_PAGE = 4096
# Places for small requests whose handlers wait, so that these do not keep the memory of the largest ones.
_SMALL = 4096
_SMALL_PLACES = 4096
_LENGTH = struct.Struct("<I")
# Behind each request: the bytes of the kept reply (0: none), then the reply itself.
_REPLY_BYTES_MAX = _PAGE - _LENGTH.size
_FREE = _LENGTH.pack(0)


class KeptBuffer(RequestBuffer):
    """Shared memory for one request, with a page behind it for its reply."""

    __slots__ = ("is_small", "number")

    def __init__(self, memory: mmap.mmap, offset: int, size: int, number: int, *, is_small: bool) -> None:
        """offset, size: where in the memory the request's part is, in bytes."""
        super().__init__(size + _PAGE, memory, offset)
        self.size = size
        self.number = number
        self.is_small = is_small

    def keep_reply(self, payload: bytes | memoryview, error: int) -> None:
        """Keep what the request is answered with. A longer payload than a page is not kept: that is of a read."""
        size = OUT_HEADER.size + len(payload)
        if size <= _REPLY_BYTES_MAX:
            at = self.size + _LENGTH.size
            self.view[at : at + size] = OUT_HEADER.pack(size, -error, 0) + payload
            self.view[self.size : self.size + _LENGTH.size] = _LENGTH.pack(size)

    def kept_reply(self) -> tuple[bytes, int] | None:
        """Return the payload and the errno of the kept reply, or None."""
        (size,) = _LENGTH.unpack_from(self.view, self.size)
        if not OUT_HEADER.size <= size <= _REPLY_BYTES_MAX:
            return None
        at = self.size + _LENGTH.size
        _, error, _ = OUT_HEADER.unpack_from(self.view, at)
        return bytes(self.view[at + OUT_HEADER.size : at + size]), -error

    def request_bytes(self) -> int:
        """Return the length of the request that it holds; 0: it is free."""
        (size,) = _LENGTH.unpack_from(self.view)
        return size if IN_HEADER.size <= size <= self.size else 0

    def clear(self) -> None:
        """The request was answered. In this order: a reply without its request is nothing."""
        self.view[: _LENGTH.size] = _FREE
        self.view[self.size : self.size + _LENGTH.size] = _FREE


@dataclass(frozen=True, slots=True)
class LeftRequest:
    """A request that a predecessor did not answer, or did not know to be answered. reply: what it kept for it."""

    buffer: KeptBuffer
    size: int
    reply: tuple[bytes, int] | None


class KeptRequests:
    """Places for requests in one memory file. Owned by one process and one thread at a time."""

    def __init__(self, fd: int, buffer_bytes: int) -> None:
        """fd: of an empty memory file, or of a predecessor's, with the same buffer_bytes. It stays the caller's."""
        self._fd = fd
        self._buffer_bytes = buffer_bytes
        self._stride = buffer_bytes + _PAGE
        self._base = _SMALL_PLACES * (_SMALL + _PAGE)
        self._small: list[KeptBuffer] = []
        self._small_made = 0
        # Numbers of large places that are free, and have no buffer.
        self._spare: list[int] = []
        size = os.fstat(fd).st_size
        self._made = max(0, (size - self._base) // self._stride)
        if size < self._base:
            os.ftruncate(fd, self._base)
        # One for all: each mapping of Python has a descriptor of its own.
        self._small_memory = mmap.mmap(fd, self._base)

    def left(self) -> list[LeftRequest]:
        """Return the requests that a predecessor left, in the order in which the kernel made them."""
        found = []
        for number in range(_SMALL_PLACES):
            # Most were never used: their pages do not exist, and reading them would make them.
            if _LENGTH.unpack(os.pread(self._fd, _LENGTH.size, number * (_SMALL + _PAGE)))[0]:
                found.append(self._small_place(number))
        found += [self._large_place(number) for number in range(self._made)]
        taken: dict[int, LeftRequest] = {}
        for place in found:
            if not place.is_small:
                self._spare.append(place.number)
            size = place.request_bytes()
            if not size:
                continue
            unique = IN_HEADER.unpack_from(place.view)[2]
            left = LeftRequest(place, size, place.kept_reply())
            # Twice, if the predecessor was just copying it to a place of its own.
            if unique not in taken or left.reply:
                taken[unique] = left
        uses = {each.buffer.number for each in taken.values() if each.buffer.is_small}
        # Numbers from here on are handed out; those below are free, except the ones in use.
        self._small_made = max(uses, default=-1) + 1
        self._small = [self._small_place(each) for each in range(self._small_made) if each not in uses]
        in_use = {each.buffer.number for each in taken.values() if not each.buffer.is_small}
        for place in found:
            if place.number not in (uses if place.is_small else in_use):
                place.clear()
        self._spare = [number for number in self._spare if number not in in_use]
        return [taken[unique] for unique in sorted(taken)]

    def new(self) -> KeptBuffer:
        """Return another buffer for a request of any size."""
        if self._spare:
            number = self._spare.pop()
        else:
            number = self._made
            self._made += 1
            os.ftruncate(self._fd, self._base + self._made * self._stride)
        buffer = self._large_place(number)
        # The pages exist from now on. If the process were killed while the kernel makes one for a request, the request
        # would fail.
        buffer.view[:] = bytes(len(buffer.view))
        return buffer

    def copy_of(self, buffer: RequestBuffer, size: int) -> KeptBuffer | None:
        """Copy a small request to a place of its own; None if it is not small, or all places are taken."""
        if size > _SMALL:
            return None
        if self._small:
            place = self._small.pop()
        elif self._small_made < _SMALL_PLACES:
            place = self._small_place(self._small_made)
            place.view[:] = bytes(len(place.view))
            self._small_made += 1
        else:
            return None
        # The length comes last: from then on the request is here, and then no longer there.
        place.clear()
        place.view[_LENGTH.size : size] = buffer.view[_LENGTH.size : size]
        place.view[: _LENGTH.size] = buffer.view[: _LENGTH.size]
        return place

    def give_back(self, place: KeptBuffer) -> None:
        """A place is not needed any more. A large one gives its memory back."""
        place.clear()
        if place.is_small:
            self._small.append(place)
        else:
            place.free_memory()
            self._spare.append(place.number)

    def _small_place(self, number: int) -> KeptBuffer:
        return KeptBuffer(self._small_memory, number * (_SMALL + _PAGE), _SMALL, number, is_small=True)

    def _large_place(self, number: int) -> KeptBuffer:
        memory = mmap.mmap(self._fd, self._stride, offset=self._base + number * self._stride)
        return KeptBuffer(memory, 0, self._buffer_bytes, number, is_small=False)


def make_memory(name: str) -> int:
    """Return the descriptor of new shared memory without a name in any folder. Raises OSError."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except AttributeError as exc:  # a C library without it
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from exc
