"""Turns uploaded staging files into cache files: links them, writes their rows, and moves their reservations.

Used on the trio loop; calls that may block go through `offload`.

Invariants:
1. The staging files stay; the caller removes them. A cache file is another link to the bytes.
2. Each file's bytes are on the ledger once: as a staging file, then as cache, or released.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusecache.disk.cache_files import CacheFiles
from fusecache.engine.cache.block_table import BlockTable
from fusecache.engine.cache.chunks import CachedObject
from fusecache.engine.runtime.offload import Offload
from fusecache.index.cache_index import BlockRow, CacheIndex, ObjectChange
from fusecache.model.errors import LocalDiskError
from fusecache.model.objects import BLOCK_BYTES, GRANULE_BYTES, GRANULES_PER_BLOCK, ObjectId
from fusecache.policy.cache.granules import GRANULES_PER_CHUNK, PAGE_BYTES, disk_bytes, full_mask
from fusecache.policy.cache.space_ledger import SpaceLedger

log = logging.getLogger(__name__)

_CHECKSUM_BYTES = 8
# Most rows of one index transaction: those of 16 GiB.
_ROWS_PER_COMMIT = 16384


@dataclass(frozen=True, slots=True)
class StagedObject:
    """An uploaded staging file. granule_checksums: xxh3_64 of each 64 KiB, 8 bytes little-endian."""

    object_id: ObjectId
    size: int
    path: Path
    granule_checksums: bytes

    def is_whole(self) -> bool:
        """Return whether its checksums and its file on disk have the expected size. Raises LocalDiskError."""
        if len(self.granule_checksums) != -(-self.size // GRANULE_BYTES) * _CHECKSUM_BYTES:
            return False
        try:
            return self.path.stat().st_size == self.size
        except OSError as exc:
            raise LocalDiskError(f"{self.path}: cannot find the staging file: {exc}") from exc


@dataclass(eq=False, slots=True)
class _Adopted:
    """A staging file that becomes cache file `number`.

    padding: bytes to the end of its last page. rows: how many of its blocks have a row in the index.
    """

    entry: CachedObject
    staged: StagedObject
    number: int
    padding: int
    rows: int = 0

    @property
    def disk_bytes(self) -> int:
        return self.entry.size + self.padding

    @property
    def blocks(self) -> int:
        return -(-self.entry.size // BLOCK_BYTES)


@dataclass(eq=False, repr=False)
class Adoption:
    """Adopts uploaded staging files into the cache."""

    _offload: Offload
    _files: CacheFiles
    _index: CacheIndex
    _table: BlockTable
    _ledger: SpaceLedger

    async def adopt(self, files: Sequence[tuple[CachedObject, StagedObject]]) -> None:
        """Turn each staging file into the cache file of its object. Its reservation moves with it."""
        for entry, _ in files:
            entry.handles += 1  # keeps it in memory
        await self._table.run_to_completion(self._adopt_held, files, name="cache-adopt")

    async def _adopt_held(self, files: Sequence[tuple[CachedObject, StagedObject]]) -> None:
        try:
            await self._adopt(files)
        finally:
            for entry, _ in files:
                self._table.close_object(entry)

    async def _adopt(self, files: Sequence[tuple[CachedObject, StagedObject]]) -> None:
        await self._table.load_objects([entry for entry, _ in files])
        for entry, _ in files:
            await self._table.load_object_now(entry)
            entry.disk_operations += 1
        try:
            needless: list[int] = []
            adopted: list[_Adopted] = []
            for file in await self._take_over(files):
                if file.entry.number is None:
                    file.entry.number, self._table.by_number[file.number] = file.number, file.entry
                    adopted.append(file)
                else:  # a read cached a part of the object while the file was linked
                    self._ledger.release_cache(file.disk_bytes)
                    needless.append(file.number)
            needless += await self._write_adopted_rows(adopted)
        finally:
            for entry, _ in files:
                entry.disk_operations -= 1
        for number in needless:
            await self._offload.disk(self._files.delete, number)

    async def _take_over(self, files: Sequence[tuple[CachedObject, StagedObject]]) -> "list[_Adopted]":
        """Make cache files of staging files and return those. Reserves the rest of each last page.

        Of the others, the object has a cache file already, or is empty, or finds no space or no index.
        """
        moves: list[_Adopted] = []
        taken: set[CachedObject] = set()
        try:
            for entry, staged in files:
                number = await self._number_for(entry, staged) if entry not in taken else None
                padding = -entry.size % PAGE_BYTES
                if number is not None and self._ledger.reserve_cache(padding):
                    taken.add(entry)
                    moves.append(_Adopted(entry, staged, number, padding))
            done = await self._offload.disk(self._link_all, [(file.staged, file.number) for file in moves])
        except BaseException:  # the staging files stay, and stay reserved
            for file in moves:
                self._ledger.cancel_cache(file.padding)
            raise
        for file in moves:
            if file.number in done:
                self._ledger.adopt(file.entry.size)
                self._ledger.commit_cache(file.padding)
            else:
                self._ledger.cancel_cache(file.padding)
        linked = {file.staged.path for file in moves if file.number in done}
        for _, staged in files:
            if staged.path not in linked:
                self._ledger.release_staging(staged.size)
        return [file for file in moves if file.number in done]

    async def _number_for(self, entry: CachedObject, staged: StagedObject) -> int | None:
        """Return a file number for the new cache file, None if the staging file may not become one."""
        if entry.number is not None or not entry.size or entry.size != staged.size:
            return None
        try:
            return await self._table.new_number() if self._table.accepts_blocks else None
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)
            return None

    def _link_all(self, files: Sequence[tuple[StagedObject, int]]) -> set[int]:
        """Run in a thread: make cache files of staging files. Return the numbers of the new ones."""
        done: set[int] = set()
        for staged, number in files:
            try:
                if staged.is_whole():
                    self._files.adopt(staged.path, number)
                    done.add(number)
                else:
                    log.warning(
                        "staging file not cached: another program changed its size; the bucket has it "
                        "as it was written path=%s key=%s bytes=%d",
                        staged.path, staged.object_id.key, staged.size,
                    )  # fmt: skip
            except LocalDiskError as exc:
                log.debug("staging file not adopted path=%s error=%s", staged.path, exc)
        return done

    async def _write_adopted_rows(self, files: "list[_Adopted]") -> list[int]:
        """Write the rows of whole files, a bounded number of rows per transaction.

        Return the numbers of the files whose rows the index does not take: these are no cache files any more.
        """
        doomed: list[int] = []
        async with self._table.rows_lock:
            try:
                for group in _commits(files, self._table.clock):
                    await self._offload.rows(
                        self._index.apply, [change for _, change in group], self._table.clock
                    )
                    for file, change in group:
                        file.rows += len(change.rows)
            except LocalDiskError as exc:
                self._table.count_disk_error(exc)
            except Exception as exc:  # noqa: BLE001  # recorded; files without rows are removed below
                self._table.tasks.supervisor.record("cache-adopt", exc)
            for file in files:
                is_known = await self._is_known(file)
                self._uncount_chunks(file.entry)
                if is_known:
                    self._fill_chunks(file)
                else:
                    self._table.by_number.pop(file.number, None)
                    file.entry.number = None
                    self._ledger.release_cache(file.disk_bytes)
                    doomed.append(file.number)
        return doomed

    async def _is_known(self, file: "_Adopted") -> bool:
        """Return whether the index has all rows of a file. Rows of only a part of it are removed."""
        if not file.rows or file.rows == file.blocks:
            return file.rows > 0
        try:
            await self._offload.rows(self._index.remove_object, file.entry.object_id)
        except LocalDiskError as exc:
            self._table.count_disk_error(exc)
            return True  # blocks without a row stay counted on the ledger until the next start
        return False

    def _uncount_chunks(self, entry: CachedObject) -> None:
        """Reset chunks that stored granules before the whole file was known: their bytes are counted twice."""
        for chunk in entry.chunks.values():
            self._ledger.release_cache(disk_bytes(chunk.present, chunk.size))
            chunk.present = chunk.dirty = 0
        entry.blocks = 0

    def _fill_chunks(self, file: "_Adopted") -> None:
        """Mark the chunks of a file as present as a whole. Without reading its rows, as that may fail."""
        file.entry.blocks, file.entry.rows = file.blocks, -1
        chunk_sums = GRANULES_PER_CHUNK * _CHECKSUM_BYTES
        for chunk in file.entry.chunks.values():
            first = chunk.index * chunk_sums
            chunk.set_checksums(0, file.staged.granule_checksums[first : first + chunk_sums])
            chunk.present = full_mask(chunk.size)
            chunk.stamp = self._table.clock
            chunk.loaded = True


def _commits(files: Sequence[_Adopted], clock: int) -> Iterator[list[tuple[_Adopted, ObjectChange]]]:
    """Divide the rows of whole files into transactions of at most _ROWS_PER_COMMIT rows."""
    step = _ROWS_PER_COMMIT * BLOCK_BYTES
    group: list[tuple[_Adopted, ObjectChange]] = []
    rows_left = _ROWS_PER_COMMIT
    for file in files:
        size = file.entry.size
        for start in range(0, size, step):
            rows = _whole_rows(size, file.staged.granule_checksums, start, min(size, start + step), clock)
            if len(rows) > rows_left:
                yield group
                group, rows_left = [], _ROWS_PER_COMMIT
            group.append((file, ObjectChange(file.entry.object_id, file.number, size, rows)))
            rows_left -= len(rows)
    if group:
        yield group


def _whole_rows(size: int, checksums: bytes, start: int, stop: int, stamp: int) -> dict[int, BlockRow | None]:
    """Return the rows of the blocks that begin in [start, stop) of a whole file."""
    rows: dict[int, BlockRow | None] = {}
    row_bytes = GRANULES_PER_BLOCK * _CHECKSUM_BYTES
    for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
        length = min(BLOCK_BYTES, size - block * BLOCK_BYTES)
        pages = -(-length // PAGE_BYTES) * PAGE_BYTES
        sums = checksums[block * row_bytes : (block + 1) * row_bytes].ljust(row_bytes, b"\0")
        rows[block] = BlockRow(full_mask(length), stamp & 0xFFFFFFFF, pages, sums)
    return rows
