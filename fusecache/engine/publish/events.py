"""The callbacks of publishing, for rooms above this one."""

from collections.abc import Callable
from dataclasses import dataclass

from fusecache.engine.namespace.nodes import Node


@dataclass(eq=False, slots=True)
class PublishEvents:
    """Callbacks; the assembly sets them before publishing starts.

    on_name_lost(parent, name): the name no longer means the inode that the kernel knows.
    on_conflict(key, kept_as, size, error, number): another client changed the key first.
    on_published(key): the bucket accepted a change of the key.
    on_gone(key, etag): the bucket no longer shows this version.
    """

    on_name_lost: Callable[[Node, str], None] = lambda _parent, _name: None
    on_conflict: Callable[[str, str, int, str, int], None] = lambda *_: None
    on_published: Callable[[str], None] = lambda _key: None
    on_gone: Callable[[str, str | None], None] = lambda _key, _etag: None
