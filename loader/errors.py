"""The exceptions that the loader raises.

Each exception takes one message argument, so it survives pickling on its way back from a worker process. Where
MosaicML's library raises a built-in exception, ours is one of that kind as well: code that catches ValueError works.
"""


class LoaderError(Exception):
    """Base of every error of the loader. The message names the file or the setting, the cause and a remedy."""


class ArgumentError(LoaderError, ValueError):
    """Arguments contradict each other, or have a value or a type that the loader cannot use."""


class UnknownArgumentError(LoaderError, TypeError):
    """An argument of this name does not exist."""


class DatasetError(LoaderError, RuntimeError, ValueError):
    """index.json is missing or damaged, or describes something that this loader cannot read."""


class NoDatasetError(DatasetError, FileNotFoundError):
    """The directory has no index.json."""


class ShardError(LoaderError, RuntimeError, ValueError):
    """A shard is missing, truncated, replaced or unreadable. The message names the shard, its bytes and its samples."""


class EncodingError(LoaderError, ValueError):
    """A value does not fit its column, or the bytes of a column cannot be decoded."""


class ValueTypeError(EncodingError, TypeError, AttributeError):
    """A value is not of the type that its column stores. MosaicML's library raises AttributeError."""


class MissingValueError(EncodingError, KeyError):
    """A sample lacks a column, or has a value of another size than its column."""

    __str__ = Exception.__str__  # KeyError would put the message in quotes


class UnmetNeedError(EncodingError):
    """The value may be sound, but decoding it needs a package or a higher limit, which the message names."""


class WriterError(LoaderError, ValueError):
    """A dataset cannot be written with these arguments or samples."""


class NotEmptyError(WriterError, FileExistsError):
    """The directory that a writer would fill has files already."""


class UnknownEncodingError(WriterError, TypeError):
    """A column has an encoding that does not exist."""


class NoSampleError(WriterError):
    """The input of a writer or a conversion has no samples."""


class OrderError(LoaderError, ValueError):
    """A sample order cannot exist: the batch does not divide, there are too few samples, or a name is unknown."""


class StateError(LoaderError, ValueError):
    """A saved state does not belong to this dataset or order, or the current state is not known."""


class FilesMissingError(LoaderError, TimeoutError):
    """`wait_for` ended without all files. found: the paths that were there; missing: the patterns that had too few."""

    found: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def cause_text(problem: BaseException) -> str:
    """Return the first line of an error's text, else of its cause's text, else the class name; never ""."""
    text = str(problem).strip() or str(problem.__cause__ or "").strip() or type(problem).__name__
    return text.splitlines()[0]
