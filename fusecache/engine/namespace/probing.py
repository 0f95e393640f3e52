"""Probes one name in the bucket: an object with that key, and any key below it."""

from dataclasses import dataclass, field

from fusecache.engine.namespace.list_page import file_row, with_metadata
from fusecache.engine.runtime.metadata_client import UNREACHABLE_SECONDS, MetadataClient, SharedRequest
from fusecache.index.rows import ListedEntry
from fusecache.model.errors import FusecacheError


@dataclass(eq=False, slots=True)
class NameProbe(SharedRequest):
    """A request for one name. asked: loop time; rows: the answer, empty if nothing has that name.

    is_superseded: this node has published a change of the name since, so the answer may show either state.
    """

    asked: float = 0.0
    is_superseded: bool = False
    rows: list[ListedEntry] = field(default_factory=list)


async def probe_name(
    metadata_client: MetadataClient,
    key: str,
    name: str,
    probe: NameProbe,
    known: ListedEntry | None,
    *,
    of_all: bool,
) -> None:
    """Fill in the probe's rows, or its failure. Usually one LIST, plus a HEAD where `with_metadata` needs one.

    The whole probe fails once the bucket has not answered any request for UNREACHABLE_SECONDS.
    """
    try:
        with metadata_client.deadline(UNREACHABLE_SECONDS):
            rows = await _rows_of(metadata_client, key, name)
            prefix = key.removesuffix(name)
            probe.rows = await with_metadata(metadata_client, prefix, rows, {name: known}, of_all=of_all)
    except FusecacheError as exc:
        probe.failure = exc


async def _rows_of(metadata_client: MetadataClient, key: str, name: str) -> list[ListedEntry]:
    store, below = metadata_client.store, key + "/"
    page = await metadata_client.call(store.list_page, key, delimiter="/", limit=2)
    rows = [file_row(name, info) for info in page.objects if info.key == key]
    is_directory = below in page.prefixes
    last = max((*(info.key for info in page.objects), *page.prefixes), default="")
    if not is_directory and page.next_token is not None and last < below:
        # Names that sort in between, such as `name-1` and `name.txt`, have filled the page.
        is_directory = bool((await metadata_client.call(store.list_page, below, limit=1)).objects)
    if is_directory:
        rows.append(ListedEntry(name, is_directory=True))
    return rows
