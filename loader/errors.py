"""What can go wrong in the loader.

Each error takes one message, so it survives the way back from a worker.
"""


class LoaderError(Exception):
    """Any error of the loader. The message names the file or the setting, the cause and a way out."""


class ArgumentError(LoaderError, ValueError):
    """Arguments that contradict each other, or that nothing here can be done with."""


class DatasetError(LoaderError):
    """index.json is missing, damaged, or says something this loader cannot read."""


class ShardError(LoaderError):
    """A shard is missing, truncated, replaced or unreadable. Names the shard, the bytes and the samples."""


class EncodingError(LoaderError):
    """A value does not fit its column, or the bytes of a column do not decode."""


class UnmetNeedError(EncodingError):
    """A value may be sound, but decoding it needs what is not here: a package, a higher limit. Names it."""


class WriterError(LoaderError):
    """A dataset cannot be written as asked."""


class NoSampleError(WriterError):
    """What is to be written has no sample."""


class OrderError(LoaderError):
    """A sample order that cannot exist: batches that do not divide, too few samples, an unknown name."""


class StateError(LoaderError):
    """A saved position does not belong to this dataset or order, or cannot be told."""


def cause_text(problem: BaseException) -> str:
    """Return the first line of what an error says, or of its cause if it says nothing, or else its kind; never ""."""
    told = str(problem).strip() or str(problem.__cause__ or "").strip() or type(problem).__name__
    return told.splitlines()[0]
