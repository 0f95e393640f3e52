"""The wiring of the engine: which part hears of which event of another part.

A room defines what it emits as a listener (`WriteListener`, …), a class whose methods do nothing. A constructor
receives one. The classes here implement these listeners: each method passes the event on.

Invariant: no event is emitted before the assembly has set all parts of `Hearers`.
"""

from typing import TYPE_CHECKING

from fusecache.engine.namespace.nodes import FileVersion, Node
from fusecache.engine.prefetch.hint_service import HintService
from fusecache.engine.prefetch.sibling_readahead import SiblingReadahead
from fusecache.engine.publish.multipart_uploader import MultipartUploader
from fusecache.engine.publish.preparer import Preparer
from fusecache.engine.publish.publisher import Publisher
from fusecache.engine.recovery.quarantine import Quarantine
from fusecache.engine.write.listener import WriteListener
from fusecache.engine.write.open_file_snapshots import OpenFileSnapshots
from fusecache.index.journal import Change
from fusecache.model.records import FileRecord

if TYPE_CHECKING:
    from collections.abc import Callable


class Hearers:
    """The parts that hear of events. The assembly sets each as soon as it is built.

    lose_name(parent, name): the kernel forgets the name.
    """

    sibling_readahead: SiblingReadahead
    hints: HintService
    uploader: MultipartUploader
    preparer: Preparer
    publisher: Publisher
    snapshots: OpenFileSnapshots
    quarantine: Quarantine

    def __init__(self) -> None:
        self.lose_name: Callable[[Node, str], None] = lambda _parent, _name: None


class WriteEvents(WriteListener):
    """Reads, writes and closes -> the publisher, the uploads, the quarantine, read-ahead, the kernel."""

    def __init__(self, to: Hearers) -> None:
        self._to = to

    def on_read(self, node: Node, pid: int) -> None:
        """The file that the process reads next is guessed, unless a hint covers this one."""
        if node.object is None or not self._to.hints.names(node.object.object_id):
            self._to.sibling_readahead.on_read(node, pid)

    def on_dirty(self) -> None:
        """The file is watched, and published when it stays open for long."""
        self._to.snapshots.on_dirty()

    def on_part_ready(self, version: FileVersion) -> None:
        """The part is uploaded."""
        self._to.uploader.on_growth(version)

    def on_sealed(self) -> None:
        """The publisher looks at the queue again."""
        self._to.publisher.wake()

    def on_upload_obsolete(self, version: FileVersion) -> None:
        """The upload is aborted, and the content is prepared again when it is due."""
        self._to.preparer.restart(version)

    def on_dropped(self, version: FileVersion) -> None:
        """The upload is aborted, the staging file deleted, its space released."""
        self._to.preparer.dropped(version)

    def on_quarantined(self, record: FileRecord) -> None:
        """`recover` lists the content."""
        self._to.quarantine.on_quarantined(record)

    def on_name_lost(self, parent: Node, name: str) -> None:
        """The kernel forgets the name."""
        self._to.lose_name(parent, name)

    def on_resolved(self, version: FileVersion) -> list[Change]:
        """Commit markers that were held for it are queued."""
        return self._to.publisher.commit_markers.on_resolved(version)

    def on_returned(self, version: FileVersion) -> list[Change]:
        """It is queued, if it is a held commit marker that nothing blocks now."""
        return self._to.publisher.commit_markers.on_returned(version)
