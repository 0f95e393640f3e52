"""What a bucket should be to a reader: every version ever stored, and which one each key shows now."""

import random
from dataclasses import dataclass, field

from fusecache.model.objects import MIB, ObjectId
from tests.support.block_caches import some_bytes
from tests.support.memory_store import MemoryStore

KEYS = tuple(f"o{number}" for number in range(8))
SIZES = (0, 1, 4095, 65_535, 65_536, 65_537, MIB - 1, MIB + 1, 3 * MIB, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1)
LARGE_SIZE = 19 * MIB + 777


@dataclass
class ReferenceBucket:
    """A dict of versions, kept in step with a store that the engine reads."""

    rng: random.Random
    store: MemoryStore
    versions: dict[ObjectId, bytes] = field(default_factory=dict)
    newest: dict[str, ObjectId] = field(default_factory=dict)

    def put(self, key: str, size: int) -> None:
        """Replace an object as another client would."""
        data = some_bytes(size, seed=self.rng.randrange(1 << 30))
        object_id = ObjectId(key, self.store.put_bytes(key, data))
        self.newest[key] = object_id
        self.versions[object_id] = data

    def remove(self, key: str) -> None:
        """Delete an object as another client would."""
        self.newest.pop(key, None)
        self.store.remove(key)

    def shows(self, object_id: ObjectId) -> bool:
        """Say whether the bucket still has this version."""
        return self.newest.get(object_id.key) == object_id

    def forget_unused(self, used: set[ObjectId]) -> None:
        """Drop the bytes of versions that nobody can read any more."""
        keep = used | set(self.newest.values())
        self.versions = {object_id: data for object_id, data in self.versions.items() if object_id in keep}
