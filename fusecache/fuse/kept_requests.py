"""Memory for the kernel's requests, from the moment they are read until they are answered.

With a keeper it outlives the process. If that is killed, its successor finds the unanswered requests, and answers them.
The reply to a change is kept before it is sent: the successor sends it again, and does not carry the change out twice.
The kernel ignores a second reply.

A request is read into a large place, which holds the largest one. If its handler waits, it moves to a small place. One
that is too long for that, or whose bytes are in use, stays, and gives back the memory behind it.

A request lies at the start of its place. A place is free while the first word there, the request's length, is 0. The
kernel writes it; this process clears it after the reply.
"""

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from fusecache.fuse.device import RequestBuffer
from fusecache.fuse.protocol import IN_HEADER, OUT_HEADER

# A small place is a request and its reply. Two names, the most that a request has beside a link's target and what is
# written, are 512 bytes; the longest reply to a change, of an entry and its open file, is 160.
_SMALL_BYTES = 1024
_SMALL_REQUEST_BYTES = 768
SMALL_PLACES = 16 * 1024
_BASE = SMALL_PLACES * _SMALL_BYTES
# A request in a large place counts as at least so much, which bounds how many of these there can be.
_LEAST_BYTES = 64 * 1024
# Somewhat more than the kernel writes back at once: `background_requests` of MAX_WRITE_BYTES.
HELD_BYTES_MAX = 256 * 1024 * 1024
# Large places that keep their pages, free or with a request that waits. To make one takes 0.7 ms.
_WHOLE_PLACES = 8
# Only pages that are touched use memory.
_LARGE_PLACES = HELD_BYTES_MAX // _LEAST_BYTES + 2 * _WHOLE_PLACES
_LARGE_REPLY_BYTES = 4096
_MAP_NORESERVE = 0x4000  # mmap.MAP_NORESERVE from Python 3.13 on
# Of the format before.
_OLD_SMALL_BYTES = 4096
_OLD_BASE = 4096 * (_OLD_SMALL_BYTES + mmap.PAGESIZE)
_LENGTH = struct.Struct("<I")
_FREE = _LENGTH.pack(0)


class KeptBuffer(RequestBuffer):
    """Memory for one request. Behind it: the bytes of the kept reply (0: none), then the reply.

    counts_as: bytes of memory that it uses while its request waits. is_whole: all its pages exist.
    """

    __slots__ = ("counts_as", "is_whole", "number")

    def __init__(self, memory: mmap.mmap, offset: int, length: int, size: int, number: int) -> None:
        """offset, length: where in the memory it is; size: of the request's part; in bytes."""
        super().__init__(length, memory, offset)
        self.size = size
        self.number = number
        self.counts_as = 0
        self.is_whole = False

    @property
    def is_small(self) -> bool:
        """Whether it holds no large request."""
        return self.size == _SMALL_REQUEST_BYTES

    def keep_reply(self, payload: bytes | memoryview, error: int) -> None:
        """Keep what the request is answered with. One that is too long is not kept: that is of a read."""
        size = OUT_HEADER.size + len(payload)
        at = self.size + _LENGTH.size
        if size <= len(self.view) - at:
            self.view[at : at + size] = OUT_HEADER.pack(size, -error, 0) + payload
            self.view[self.size : at] = _LENGTH.pack(size)

    def kept_reply(self) -> tuple[bytes, int] | None:
        """Return the payload and the errno of the kept reply, or None."""
        (size,) = _LENGTH.unpack_from(self.view, self.size)
        at = self.size + _LENGTH.size
        if not OUT_HEADER.size <= size <= len(self.view) - at:
            return None
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
    """Places for requests in one memory file. Owned by one process and one thread at a time.

    buffer_bytes: the size of the largest request.
    """

    def __init__(self, fd: int, buffer_bytes: int) -> None:
        """fd: of an empty memory file, or of a predecessor's, with the same buffer_bytes. It stays the caller's.

        -1: in memory that ends with this process.
        """
        self._fd = fd
        self.buffer_bytes = buffer_bytes
        self._stride = _rounded(buffer_bytes + _LARGE_REPLY_BYTES)
        size = _BASE + _LARGE_PLACES * self._stride
        # One mapping for all: each of Python's has a descriptor of its own.
        if fd < 0:
            shared = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._memory = mmap.mmap(-1, size, flags=shared)
        else:
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
        # Whole places that are free, and how many there are in all.
        self._whole: list[KeptBuffer] = []
        self._whole_count = 0
        # Places that are free: the small ones, and the numbers of large ones without memory. The others from _made on.
        self._small: list[KeptBuffer] = []
        self._spare: list[int] = []
        self._small_made = self._large_made = 0

    def left(self) -> list[LeftRequest]:
        """Return the requests that a predecessor left, in the order in which the kernel made them."""
        taken: dict[int, LeftRequest] = {}
        for place in self._touched():
            size = place.request_bytes()
            unique = IN_HEADER.unpack_from(place.view)[2]
            # Twice, if the predecessor was just copying it to a small place, which comes first.
            if size and unique not in taken:
                taken[unique] = LeftRequest(place, size, place.kept_reply())
            elif place.is_small:
                place.clear()
            else:
                self._free(place, 0)
        uses = [each.buffer for each in taken.values()]
        small = {each.number for each in uses if each.is_small}
        large = {each.number for each in uses if not each.is_small}
        self._small_made, self._large_made = (max(each, default=-1) + 1 for each in (small, large))
        self._small = [self._small_place(each) for each in range(self._small_made) if each not in small]
        self._spare = [each for each in range(self._large_made) if each not in large]
        return [taken[unique] for unique in sorted(taken)]

    def take(self) -> KeptBuffer:
        """Return a place for the next request, whatever its size."""
        if self._whole:
            return self._whole.pop()
        if self._spare:
            number = self._spare.pop()
        else:
            number = self._large_made
            self._large_made += 1
        place = self._large_place(number)
        # The pages exist from now on. If the process were killed while the kernel makes one for a request, the request
        # would fail.
        place.view[:] = bytes(len(place.view))
        place.is_whole = True
        self._whole_count += 1
        return place

    def hold(self, place: KeptBuffer, size: int, *, stays: bool) -> KeptBuffer:
        """A request is not answered yet. Return where it is from now on. stays: its bytes are in use where they are."""
        if not stays and size <= _SMALL_REQUEST_BYTES:
            small = self._copy_of(place, size)
            if small is not None:
                self.give_back(place)
                return small
        place.counts_as = max(_LEAST_BYTES, size)
        if self._whole_count > _WHOLE_PLACES:
            self._free(place, _rounded(size), place.size)
        return place

    def give_back(self, place: KeptBuffer) -> None:
        """A place is not needed any more. A large one gives its memory back, if there are enough with memory."""
        place.clear()
        if place.is_small:
            self._small.append(place)
            return
        if place.is_whole and self._whole_count <= _WHOLE_PLACES:
            self._whole.append(place)
        else:
            self._free(place, 0)
            self._spare.append(place.number)

    def _copy_of(self, place: KeptBuffer, size: int) -> KeptBuffer | None:
        if self._small:
            copy = self._small.pop()
        elif self._small_made < SMALL_PLACES:
            copy = self._small_place(self._small_made)
            self._small_made += 1
        else:
            return None
        # The length comes last: from then on the request is here, and then no longer there.
        copy.clear()
        copy.view[_LENGTH.size : size] = place.view[_LENGTH.size : size]
        copy.view[: _LENGTH.size] = place.view[: _LENGTH.size]
        return copy

    def _touched(self) -> Iterator[KeptBuffer]:
        """Return the places that have memory. To look at one that has none would make it."""
        at = 0
        with suppress(OSError):  # ENXIO: the rest of the file is a hole
            while True:
                at = os.lseek(self._fd, at, os.SEEK_DATA)
                if at < _BASE:
                    place = self._small_place(at // _SMALL_BYTES)
                    at = (place.number + 1) * _SMALL_BYTES
                else:
                    place = self._large_place((at - _BASE) // self._stride)
                    at = _BASE + (place.number + 1) * self._stride
                yield place

    def _small_place(self, number: int) -> KeptBuffer:
        return KeptBuffer(self._memory, number * _SMALL_BYTES, _SMALL_BYTES, _SMALL_REQUEST_BYTES, number)

    def _large_place(self, number: int) -> KeptBuffer:
        at = _BASE + number * self._stride
        return KeptBuffer(self._memory, at, self._stride, self.buffer_bytes, number)

    def _free(self, place: KeptBuffer, start: int, stop: int | None = None) -> None:
        """Give the pages from `start` on back to the system: they hold zeros then."""
        self._whole_count -= place.is_whole
        place.is_whole = False
        stop = self._stride if stop is None else stop // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            at = _BASE + place.number * self._stride
            self._memory.madvise(mmap.MADV_REMOVE, at + start, stop - start)


def copied_requests(old_fd: int, places: KeptRequests) -> list[LeftRequest]:
    """Return what a predecessor of the format before left, in the order in which the kernel made it, in other places.

    There, each place is a request and a page for its reply: 4 096 places for small requests, then those for any size.
    """
    found: dict[int, LeftRequest] = {}
    size, at, length = os.fstat(old_fd).st_size, 0, _OLD_SMALL_BYTES
    while at + length + mmap.PAGESIZE <= size:
        old = os.pread(old_fd, length + mmap.PAGESIZE, at)
        at += len(old)
        if at == _OLD_BASE:
            length = places.buffer_bytes
        (count,) = _LENGTH.unpack_from(old)
        unique = IN_HEADER.unpack_from(old)[2]
        (reply_bytes,) = _LENGTH.unpack_from(old, len(old) - mmap.PAGESIZE)
        if not count or (unique in found and not reply_bytes):
            continue
        if unique in found:
            places.give_back(found[unique].buffer)
        place = places.take()
        place.view[:count] = old[:count]
        if reply_bytes:
            start = len(old) - mmap.PAGESIZE + _LENGTH.size
            _, error, _ = OUT_HEADER.unpack_from(old, start)
            place.keep_reply(old[start + OUT_HEADER.size : start + reply_bytes], -error)
        elif count <= _SMALL_REQUEST_BYTES:
            place = places.hold(place, count, stays=False)
        found[unique] = LeftRequest(place, count, place.kept_reply())
    return [found[unique] for unique in sorted(found)]


def _rounded(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def make_memory(name: str) -> int:
    """Return the descriptor of new shared memory without a name in any folder. Raises OSError."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC)
    except AttributeError as exc:  # a C library without it
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from exc
