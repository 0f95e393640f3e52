"""How a bucket answers: the one place that knows whether it is silent, refuses the keys, or may not be written."""

import enum
from collections.abc import Callable

from fusecache.model.errors import AccessDenied, CredentialsMissing, RemoteError, Unavailable


class BucketState(enum.Enum):
    """ANSWERING; SILENT: it does not answer; REFUSED: it refuses the keys; HELD: it answers, and may not be written."""

    ANSWERING = "answering"
    SILENT = "silent"
    REFUSED = "refused"
    HELD = "held"


class BucketHealth:
    """Since when a bucket is silent or refuses the keys, for reads and for writes. Thread-safe.

    reads_refused_since, writes_refused_since: None if the last one was not refused. refusal: of the keys for reading,
    for every request: a LIST of the mount's prefix was refused. writes_held: why no object may be written; "": it may.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._silent_since: float | None = None
        self.reads_refused_since: float | None = None
        self.writes_refused_since: float | None = None
        self.refusal: RemoteError | None = None
        self.writes_held = ""

    @property
    def state(self) -> BucketState:
        """How the bucket answers now."""
        if self.reads_refused_since is not None or self.writes_refused_since is not None:
            return BucketState.REFUSED
        if self.is_silent:
            return BucketState.SILENT
        return BucketState.HELD if self.writes_held else BucketState.ANSWERING

    @property
    def is_silent(self) -> bool:
        """Whether the last LIST or HEAD got no answer, or one is overdue, or all of them are refused."""
        return self._silent_since is not None

    @property
    def silent_seconds(self) -> float:
        """For how long the bucket is silent."""
        return self._seconds(self._silent_since)

    def refused_seconds(self, *, has_writes: bool) -> float:
        """Return for how long the keys are refused. has_writes: without writes nothing shows that they are allowed."""
        writes = self._seconds(self.writes_refused_since) if has_writes else 0.0
        return max(self._seconds(self.reads_refused_since), writes)

    def on_silence(self, seconds: float = 0.0) -> None:
        """A request has had no answer for so long."""
        if self._silent_since is None:
            self._silent_since = self._clock() - seconds

    def on_answer(self) -> None:
        """The bucket answered a LIST or HEAD."""
        self._silent_since = self.reads_refused_since = self.refusal = None

    def on_refused(self, refusal: RemoteError) -> None:
        """The bucket refused a LIST that the keys must allow."""
        self.refusal = refusal
        self.on_read(refusal)
        self.on_silence()

    def on_read(self, error: RemoteError | None) -> None:
        """A read ended. error: None for success."""
        self.reads_refused_since = self._since(self.reads_refused_since, error)

    def on_write(self, error: RemoteError | None) -> None:
        """A write ended. error: None for success."""
        self.writes_refused_since = self._since(self.writes_refused_since, error)

    def _since(self, since: float | None, error: RemoteError | None) -> float | None:
        if isinstance(error, Unavailable):  # says nothing about the keys
            return since
        is_refusal = isinstance(error, AccessDenied | CredentialsMissing)
        return (self._clock() if since is None else since) if is_refusal else None

    def _seconds(self, since: float | None) -> float:
        return 0.0 if since is None else self._clock() - since
