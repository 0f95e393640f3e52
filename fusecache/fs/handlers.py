"""What is done around the kernel's request handlers: their errors become an errno, their time is counted.

Maps model errors to errno. This is the only place that does.
"""

import errno
import functools
import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import trio

from fusecache.engine.runtime.procfs import called_by
from fusecache.fuse.values import FUSEError
from fusecache.model import errors
from fusecache.model.errors import FusecacheError
from fusecache.model.hints import HintError

log = logging.getLogger(__name__)

# The first matching class counts, so the most specific come first.
ERRNO: tuple[tuple[type[errors.FusecacheError], int], ...] = (
    (errors.NotFound, errno.ENOENT),
    (errors.ObjectMissing, errno.ESTALE),  # the file was there when it was opened
    (errors.ObjectChanged, errno.ESTALE),
    (errors.AlreadyExists, errno.EEXIST),
    (errors.NotADirectory, errno.ENOTDIR),
    (errors.IsADirectory, errno.EISDIR),
    (errors.NotEmpty, errno.ENOTEMPTY),
    (errors.ReadOnly, errno.EROFS),
    (errors.NameTooLong, errno.ENAMETOOLONG),
    (errors.InvalidName, errno.EINVAL),
    (HintError, errno.EINVAL),
    (errors.NotPermitted, errno.EPERM),
    (errors.TooLarge, errno.EFBIG),
    (errors.Interrupted, errno.EINTR),
    (errors.AcrossDevices, errno.EXDEV),
    (errors.NoSpace, errno.ENOSPC),
    (errors.TooManyFiles, errno.ENFILE),
    (errors.AccessDenied, errno.EACCES),
    (errors.LinkNotFollowed, errno.EACCES),
    (errors.FusecacheError, errno.EIO),
)


def errno_of(error: errors.FusecacheError) -> int:
    """Return the errno that a program sees for an error."""
    return next(number for kind, number in ERRNO if isinstance(error, kind))


P = ParamSpec("P")
T = TypeVar("T")


def guarded(handler: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Turn a handler's errors into the errno that a program sees."""
    signature = inspect.signature(handler)

    @functools.wraps(handler)
    async def call_handler(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await handler(*args, **kwargs)
        except FUSEError:
            raise
        except FusecacheError as exc:
            number = errno_of(exc)
            if number == errno.EIO:
                log.warning("request failed call=%s error=%s", handler.__name__, exc)
            else:
                log.debug("request refused call=%s error=%s", handler.__name__, exc)
            raise FUSEError(number) from exc
        except Exception as exc:
            operations: Any = args[0]
            operations._on_unexpected(handler.__name__, exc, signature.bind(*args, **kwargs).arguments)
            raise FUSEError(errno.EIO) from exc

    return call_handler


def killable(handler: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """End a handler whose caller is killed, if it waits for the bucket and has changed nothing yet."""

    @functools.wraps(handler)
    async def call_handler(*args: P.args, **kwargs: P.kwargs) -> T:
        context: Any = kwargs["ctx"] if "ctx" in kwargs else args[-1]
        with called_by(context.pid):
            return await handler(*args, **kwargs)

    return call_handler


def timed(
    call: str,
) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """Count the time that a handler takes as one of a call of programs: `open` or `close`."""

    def wrapped(handler: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @functools.wraps(handler)
        async def count_time(*args: P.args, **kwargs: P.kwargs) -> T:
            began = trio.current_time()
            try:
                return await handler(*args, **kwargs)
            finally:
                operations: Any = args[0]
                operations._fs.call_times[call].count(trio.current_time() - began)

        return count_time

    return wrapped
