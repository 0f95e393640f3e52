"""Tells a refusal of one object's key from a refusal of the credentials: both are a 403.

Refused credentials are a person's to renew, so requests are retried. A key that the credentials may not write, though
they may write others, stays refused: its change must not hold back the others.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fusecache.model.errors import AccessDenied, Refused, RemoteError

# A key counts as refused for good when it was refused this long while other writes were allowed. The permissions of
# new credentials take up to a minute to take effect.
KEY_REFUSED_SECONDS = 90.0
# How long an accepted write proves that the credentials may write.
PROOF_SECONDS = 2.0
# Keys remembered; more are refused at once only if the credentials are.
_KEYS_MAX = 10_000


@dataclass(slots=True)
class _Refusal:
    """since: when this key was first refused while the credentials were proven to work; None: not proven."""

    since: float | None = None


class RefusedKeys:
    """Judges each refusal of a write. Thread-safe."""

    def __init__(self, probe: Callable[[], None]) -> None:
        """probe: sends a write that the credentials must allow, and leaves nothing behind."""
        self._probe = probe
        self._lock = threading.Lock()  # of all but `_probing`
        self._probing = threading.Lock()  # held by the one thread that probes; the others wait for its answer
        self._refusals: dict[str, _Refusal] = {}
        self._accepted_at = float("-inf")
        self._probed_at = float("-inf")

    def on_accepted(self, key: str) -> None:
        """The bucket accepted a write of a key."""
        with self._lock:
            self._accepted_at = time.monotonic()
            self._refusals.pop(key, None)

    def judge(self, key: str, error: AccessDenied) -> tuple[RemoteError, bool]:
        """Return the error to raise for a refused write, and whether the credentials may write other keys.

        The error is Refused once the key was refused for KEY_REFUSED_SECONDS while other writes were allowed.
        """
        allows_others = self._may_write()
        now = time.monotonic()
        with self._lock:
            if len(self._refusals) >= _KEYS_MAX and key not in self._refusals:
                self._refusals.clear()
            refusal = self._refusals.setdefault(key, _Refusal())
            if not allows_others:
                refusal.since = None
            elif refusal.since is None:
                refusal.since = now
            elif now - refusal.since >= KEY_REFUSED_SECONDS:
                return Refused(f"{error}; the credentials may write other keys, but not this one"), True
        return error, allows_others

    def _may_write(self) -> bool:
        """Return whether the credentials may write: an accepted request proves it, else a probe."""
        with self._probing:
            with self._lock:
                before = self._accepted_at
                is_known = time.monotonic() - max(before, self._probed_at) < PROOF_SECONDS
            if not is_known:
                try:
                    self._probe()
                except RemoteError:
                    accepted_at = float("-inf")
                else:
                    accepted_at = time.monotonic()
                with self._lock:
                    self._probed_at = time.monotonic()
                    if self._accepted_at == before:  # else a write was accepted in between
                        self._accepted_at = accepted_at
            with self._lock:
                return time.monotonic() - self._accepted_at < PROOF_SECONDS
