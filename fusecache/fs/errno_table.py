"""Maps model errors to errno. This is the only place that does."""

import errno

from fusecache.model import errors
from fusecache.model.hints import HintError

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
