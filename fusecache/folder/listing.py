"""Lists a bucket, and says which of its keys cannot be files of a folder."""

from dataclasses import dataclass, field

from fusecache.folder.patience import Patience
from fusecache.model.objects import ObjectInfo
from fusecache.policy.unusable_keys import UnusableKeys
from fusecache.remote.store import ReadStore


@dataclass(slots=True)
class BucketListing:
    """The objects below a prefix, by name: the key without the prefix.

    directories: names that end in "/", of directory markers. unusable: why a key has no file.
    """

    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)


def list_bucket(store: ReadStore, prefix: str, patience: Patience) -> BucketListing:
    """List everything below a prefix. Raises RemoteError."""
    found, checker, token = BucketListing(), UnusableKeys(), None
    while True:
        page = patience.call(lambda token=token: store.list_page(prefix, token=token))  # type: ignore[misc]
        for info in page.objects:
            name = info.key[len(prefix) :]
            found.unusable.update(checker.see(name))
            if name.endswith("/"):
                found.directories.append(name)
            elif name:
                found.objects[name] = info
        token = page.next_token
        if token is None:
            break
    for name in found.unusable:
        found.objects.pop(name, None)
    found.directories = [name for name in found.directories if name not in found.unusable]
    return found
