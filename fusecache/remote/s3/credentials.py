"""Where the access keys of requests come from, and what happens while that source fails.

botocore knows the AWS chain: environment, profiles, `credential_process`, web identity, SSO, instance roles. Its
sources renew keys that expire, and may fail with any exception.
"""

import logging
import threading
import time
from typing import Any, Protocol

import botocore.exceptions
from botocore.credentials import ReadOnlyCredentials

from fusecache.model.errors import CredentialsMissing

log = logging.getLogger(__name__)

# Pause before a failed source is asked again. It doubles with each failure, up to LONGEST_PAUSE_SECONDS.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class KeySource(Protocol):
    """A source of keys, such as botocore's `Credentials`."""

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the keys that are valid now."""
        ...


class KeptCredentials:
    """Keys of a source that may fail: while it fails, the last keys stay in use. Thread-safe.

    botocore asks for renewal some minutes before keys expire, so the last keys often still work. If they do not, the
    bucket says so.
    """

    def __init__(self, source: Any, name: str) -> None:
        """source: a `KeySource`. name: of the source, for messages."""
        self._source = source
        self._name = name
        self._lock = threading.Lock()
        self._last: ReadOnlyCredentials | None = None
        self._error: Exception | None = None
        self._failures = 0
        self._ask_again_at = float("-inf")

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the source: botocore looks at `method` and others."""
        return getattr(self._source, name)

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the keys. Raises CredentialsMissing if the source fails and never gave any."""
        if self._error is not None and time.monotonic() < self._ask_again_at:
            return self._last_or_raise(self._error)
        try:
            keys: ReadOnlyCredentials = self._source.get_frozen_credentials()
        except Exception as exc:  # noqa: BLE001  # botocore's sources raise anything: OSError, KeyError, ClientError, …
            self._on_failed(exc)
            return self._last_or_raise(exc)
        if self._error is not None:
            self._on_recovered()
        self._last = keys
        return keys

    def _last_or_raise(self, error: Exception) -> ReadOnlyCredentials:
        if self._last is None:
            raise CredentialsMissing(failure_text(self._name, error)) from error
        return self._last

    def _on_failed(self, error: Exception) -> None:
        with self._lock:
            if self._last is not None and str(error) != str(self._error or ""):
                log.warning(
                    "keys could not be renewed, the last ones stay in use, will retry source=%s error=%s",
                    self._name, error,
                )  # fmt: skip
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(self._failures, 16))
            self._failures += 1
            self._ask_again_at = time.monotonic() + pause
            self._error = error

    def _on_recovered(self) -> None:
        with self._lock:
            if self._last is not None and self._error is not None:
                log.info("keys renewed source=%s", self._name)
            self._error, self._failures = None, 0


def failure_text(name: str, error: Exception) -> str:
    """Return why a source gave no keys."""
    if isinstance(error, botocore.exceptions.CredentialRetrievalError):
        reason = str(error.kwargs.get("error_msg", error))
    else:
        reason = str(error) or type(error).__name__
    return f"the keys from {name} could not be read: {' '.join(reason.split())}"
