"""Unwraps the exception groups that trio's nurseries raise, so that callers can catch a single error."""

from collections.abc import Iterator
from contextlib import contextmanager

from fusecache.model.errors import FusecacheError


@contextmanager
def unwrap_single_error() -> Iterator[None]:
    """Raise the first FusecacheError of a group by itself; a group with any other error is raised unchanged.

    Ctrl-C ends all tasks, and is raised whatever they raised on the way.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt) is not None:
            raise KeyboardInterrupt from None
        failures, others = group.split(FusecacheError)
        if failures is None or others is not None:
            raise
        raise next(_leaves(failures)) from None


def _leaves(group: BaseExceptionGroup[FusecacheError]) -> Iterator[FusecacheError]:
    for inner in group.exceptions:
        if isinstance(inner, BaseExceptionGroup):
            yield from _leaves(inner)
        else:
            yield inner
