"""Builds the parts of this room and connects them. Rooms above take from here the parts that they need."""

from dataclasses import dataclass

from fusecache.disk.staging import StagingDirectory
from fusecache.engine.cache.block_cache import BlockCache
from fusecache.engine.namespace.events import Events
from fusecache.engine.namespace.tree import Tree
from fusecache.engine.runtime.journal_writer import JournalWriter
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.write.close import CloseProtocol
from fusecache.engine.write.disposal import LocalOnly, VersionDisposal
from fusecache.engine.write.file_content import FileReader, StagingWriter, VersionFactory
from fusecache.engine.write.file_io import FileIO
from fusecache.engine.write.snapshots import Snapshots
from fusecache.engine.write.staging_space import Backpressure, EnospcLog, StagingSpace
from fusecache.engine.write.version_states import VersionStates
from fusecache.engine.writeback.placement import QueuePlacement
from fusecache.engine.writeback.queue import WritebackQueue


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Settings of the room: patterns of paths that are never published, and of names that are temporary."""

    local_only: tuple[str, ...] = ()
    temp_names: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class WriteParts:
    """The parts of this room that rooms above call."""

    file_io: FileIO
    close_protocol: CloseProtocol
    snapshots: Snapshots
    states: VersionStates
    disposal: VersionDisposal
    placement: QueuePlacement
    local_only: LocalOnly
    enospc_log: EnospcLog


def build_write_parts(  # noqa: PLR0913  # the one place where each part is given what it works with
    tree: Tree,
    cache: BlockCache,
    staging: StagingDirectory,
    journal: JournalWriter,
    queue: WritebackQueue,
    offload: Offload,
    backpressure: Backpressure,
    events: Events,
    options: WriteOptions,
    boot_id: str,
) -> WriteParts:
    """Build the parts. boot_id: of the running kernel; a row of another boot may lack bytes that were not synced."""
    local_only = LocalOnly(tree, options.local_only)
    space = StagingSpace(tree, cache, events)
    disposal = VersionDisposal(tree, cache, staging, journal, queue, local_only, events)
    placement = QueuePlacement(tree, queue, disposal.drop)
    states = VersionStates(tree, journal, queue, placement, space, local_only, disposal, events, boot_id)
    close_protocol = CloseProtocol(journal, queue, offload, states, disposal, local_only, space, backpressure)
    reader = FileReader(cache, queue, offload, events)
    writer = StagingWriter(cache, reader, offload)
    versions = VersionFactory(tree, journal, queue, staging, space, writer, disposal, boot_id)
    file_io = FileIO(
        tree, journal, versions, reader, writer, space, states, close_protocol, disposal, local_only, events
    )
    snapshots = Snapshots(tree, journal, states, local_only, options.temp_names)
    return WriteParts(
        file_io, close_protocol, snapshots, states, disposal, placement, local_only, space.enospc_log
    )
