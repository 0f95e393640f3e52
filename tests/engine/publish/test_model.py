"""Random programs and crashes against a dict: the bucket ends up equal to the tree, and keeps the order on the way.

A name shows only content that it held, and never goes back to an older one. A replacement, a removal and a commit
marker come after all older changes in their directory's subtree; a removal comes after every older write.
"""

import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from fusecache.model.objects import MIB
from tests.support.node import Bucket, User, files_in, files_of, folders_in, photograph, running_node

FOLDERS = ("", "d", "e", "d/f")
NAMES = ("a", "b", "latest")
PATHS = [f"{folder}/{name}".strip("/") for folder in FOLDERS for name in NAMES]

paths = st.sampled_from(PATHS)
folders = st.sampled_from(FOLDERS[1:])
steps = st.one_of(
    st.tuples(st.just("write"), paths, st.binary(min_size=1, max_size=3)),
    st.tuples(st.just("write"), paths, st.binary(min_size=1, max_size=3)),
    st.tuples(st.just("unlink"), paths),
    st.tuples(st.just("rename"), paths, paths),
    st.tuples(st.just("symlink"), paths, st.sampled_from(["a", "../x"])),
    st.tuples(st.just("mkdir"), folders),
    st.tuples(st.just("rmdir"), folders),
    st.tuples(st.just("rename_folder"), folders, folders),
    st.tuples(st.just("wait"), st.sampled_from([0.2, 1.5, 5.0])),
    st.tuples(st.just("drain")),
    st.tuples(st.just("outage")),
    st.tuples(st.just("crash"), st.integers(0, 3), st.sampled_from(["before", "after"])),
)


class Program:
    """Runs steps on a node and on a dict of paths (None: a directory), and watches what the bucket shows."""

    def __init__(self, directory: Path) -> None:
        self.bucket = Bucket()
        self.tree: dict[str, bytes | None] = {}
        self.history: list[dict[str, bytes]] = [{}]
        # Keys written again before the bucket had them: what they show may be older, or newer, than the rest.
        self.loose: set[str] = set()
        # A name that was not published yet, or a whole folder, moved: the order of the others says nothing.
        self.is_unordered = False
        self._directory = directory
        self._lives = 0
        # Of each key: the moment of the history that the bucket shows of it.
        self._reached: dict[str, int] = {}
        self._seen = 0

    async def run(self, program: list[tuple]) -> None:
        """Carry out all steps, each life of the node in turn."""
        rest = list(program)
        while rest:
            self._lives += 1
            place = self._directory / str(self._lives)
            async with running_node(self.bucket, place, buffer_bytes=40 * MIB) as user:
                assert files_of(await user.tree()) == files_of(self.tree)
                while rest and rest[0][0] != "crash":
                    await self.step(user, rest.pop(0))
                if rest:
                    await self.crash(place, *rest.pop(0)[1:])
            self.bucket.come_back()
        await self.check_end()

    async def check_end(self) -> None:
        """A last life publishes what is left."""
        place = self._directory / str(self._lives + 1)
        last = self._directory / str(self._lives)
        if not place.exists():
            photograph(last, place)
        async with running_node(self.bucket, place, buffer_bytes=40 * MIB) as user:
            assert await user.drained() == "durable"
            self.check_states()
            assert await user.tree() == self.tree
            assert user.fs.publisher.kept_as == {}
            assert user.fs.publisher.rejected == []
        shown = self.bucket.shows()
        assert files_in(shown) == files_of(self.tree)
        assert folders_in(shown) == {path for path, data in self.tree.items() if data is None}

    async def step(self, user: User, step: tuple) -> None:
        """Do it here and there, if it can be done at all."""
        word, *arguments = step
        if word == "wait":
            await trio.sleep(arguments[0])
        elif word == "outage":
            self.bucket.takes_nothing = not self.bucket.takes_nothing
        elif word == "drain":
            self.bucket.takes_nothing = False
            assert await user.drained() == "durable"
            assert files_in(self.bucket.shows()) == files_of(self.tree)
            self.check_states()
            self.is_unordered = False
            self.loose.clear()
        elif (done := getattr(self, word)(user, *arguments)) is not None:
            self.history.append(files_of(self.tree))
            await done
        self.check_states()

    async def crash(self, place: Path, request: int, when: str) -> None:
        """The node ends at one of the next requests, or, if none comes, now."""
        after = self._directory / str(self._lives + 1)
        died = trio.Event()
        self.bucket.takes_nothing = False
        self.bucket.die_at(request, when, lambda: (photograph(place, after), died.set()))
        with trio.move_on_after(20):
            await died.wait()
        if not after.exists():
            photograph(place, after)
        self.bucket.is_cut_off = True

    # ---- steps: each returns what to await, or None if it cannot be done

    def write(self, user: User, path: str, data: bytes) -> Awaitable[None] | None:
        there = self.tree.get(path, b"")
        if there is None or there.startswith(b"-> ") or not self._has_parent(path):
            return None
        self._touch(user, path)
        self.tree[path] = data
        return user.write(path, data)

    def unlink(self, user: User, path: str) -> Awaitable[None] | None:
        if self.tree.get(path) is None:
            return None
        del self.tree[path]
        return user.unlink(path)

    def rename(self, user: User, old: str, new: str) -> Awaitable[None] | None:
        if self.tree.get(old) is None or self.tree.get(new, b"") is None or old == new:
            return None
        if not self._has_parent(new):
            return None
        self._touch(user, new)
        if user.fs.queue.for_key(old) or user.fs.queue.for_key(new):
            self.is_unordered = True
        self.tree[new] = self.tree.pop(old)
        return user.rename(old, new)

    def symlink(self, user: User, path: str, target: str) -> Awaitable[None] | None:
        if path in self.tree or not self._has_parent(path):
            return None
        self._touch(user, path)
        self.tree[path] = f"-> {target}".encode()
        return user.symlink(target, path)

    def mkdir(self, user: User, path: str) -> Awaitable[None] | None:
        if path in self.tree or not self._has_parent(path):
            return None
        self.tree[path] = None
        return user.mkdir(path)

    def rmdir(self, user: User, path: str) -> Awaitable[None] | None:
        if path not in self.tree or self._below(path):
            return None
        del self.tree[path]
        return user.rmdir(path)

    def rename_folder(self, user: User, old: str, new: str) -> Awaitable[None] | None:
        is_free = new not in self.tree or not self._below(new)
        if (
            old not in self.tree
            or not is_free
            or not self._has_parent(new)
            or f"{new}/".startswith(f"{old}/")
        ):
            return None
        self.is_unordered = True
        for path in [old, *self._below(old)]:
            self.tree[new + path[len(old) :]] = self.tree.pop(path)
        return user.rename(old, new)

    # ---- what the bucket showed

    def check_states(self) -> None:
        """Hold each change of the bucket against what the tree held, and when."""
        states = [{}, *self.bucket.states]
        for index in range(self._seen, len(self.bucket.states)):
            before, after = files_in(states[index]), files_in(states[index + 1])
            for key in {key for key in before | after if before.get(key) != after.get(key)}:
                # Between copy and delete a renamed object has both names.
                if not self.is_unordered and key not in self.loose and index not in self.bucket.copied:
                    self._check_change(key, before.get(key), after)
        self._seen = len(self.bucket.states)
        if self.is_unordered:
            self._reached = dict.fromkeys(PATHS, len(self.history) - 1)

    def _check_change(self, key: str, before: bytes | None, after: dict[str, bytes]) -> None:
        value, since = after.get(key), self._reached.get(key, 0)
        found = [age for age in range(since, len(self.history)) if self.history[age].get(key) == value]
        assert found, f"{key} = {value} was never the tree's since {since}: {self.history}"
        lacked = [age for age in range(since, len(self.history)) if self.history[age].get(key) != before]
        self._reached[key] = found[0]
        tells = key.endswith("latest") or (value or b"").startswith(b"-> ")
        if before is None and not tells:
            return
        folder = key.rpartition("/")[0]
        for other in PATHS:
            if other == key or other in self.loose:
                continue
            is_below = not folder or other.startswith(f"{folder}/")
            was_there = self.history[lacked[0] - 1].get(other) is not None
            if is_below or (value is None and was_there):
                allowed = {state.get(other) for state in self.history[lacked[0] - 1 :]}
                assert after.get(other) in allowed, f"{key} = {value} came before {other}: {self.history}"

    def _touch(self, user: User, path: str) -> None:
        if user.fs.queue.for_key(path):
            self.loose.add(path)

    def _has_parent(self, path: str) -> bool:
        folder = path.rpartition("/")[0]
        return not folder or (folder in self.tree and self.tree[folder] is None)

    def _below(self, folder: str) -> list[str]:
        return [path for path in self.tree if path.startswith(f"{folder}/")]


def run_on_a_quick_clock(main: Callable[[Path], Awaitable[None]]) -> None:
    """Run on a clock that jumps whenever all wait."""
    memory = Path("/dev/shm")  # a life makes hundreds of folders: quick there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        trio.run(main, Path(name), clock=MockClock(autojump_threshold=0))


@given(st.lists(steps, max_size=14))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_bucket_follows_the_tree(program: list[tuple]) -> None:
    async def main(directory: Path) -> None:
        await Program(directory).run([*program, ("crash", 100, "before")])

    run_on_a_quick_clock(main)
