"""Bugs on demand: a function of the engine raises what no handler expects."""

import inspect
from typing import Any

import pytest


class Mistake(Exception):
    """An exception that no part of the engine knows."""


class MistakeIn:
    """Lets a method, or a function of a module, raise Mistake for some of its calls. calls: how many there were."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, times: int = 0, skip: int = 0
    ) -> None:
        """times: how many calls raise, after the first `skip`."""
        real = getattr(owner, name)
        self._name, self._skip = name, skip
        self.times, self.calls = times, 0

        async def faulty_task(*args: Any, **options: Any) -> Any:
            self._count()
            return await real(*args, **options)

        def faulty(*args: Any, **options: Any) -> Any:
            self._count()
            return real(*args, **options)

        monkeypatch.setattr(owner, name, faulty_task if inspect.iscoroutinefunction(real) else faulty)

    def _count(self) -> None:
        self.calls += 1
        if self.times and self.calls > self._skip:
            self.times -= 1
            raise Mistake(f"in {self._name}")
