"""Where the access keys of requests come from, and what happens while that source fails.

botocore knows the AWS chain: environment, profiles, `credential_process`, web identity, SSO, instance roles. Its
sources renew keys that expire, and may fail with any exception.
"""

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import botocore.exceptions
from botocore.credentials import ReadOnlyCredentials

from fusecache.model.errors import ConfigError, CredentialsMissing
from fusecache.policy.backoff import backoff_seconds
from fusecache.remote.endpoints import read_key_file

log = logging.getLogger(__name__)

# Longest pause before a failed source is asked again.
LONGEST_PAUSE_SECONDS = 30.0
_SECTION = re.compile(r"\[(?:profile\s+)?([^\]]+)\]")
_SETTING = re.compile(r"(?:export\s+)?([A-Za-z_]+)\s*=\s*(.*)")


@dataclass(eq=False, slots=True)
class FileCredentials:
    """The keys in a `credentials_file`, read again when the file changes. Thread-safe.

    The file is an AWS credentials file, or lines NAME=value as systemd's EnvironmentFile has them. profile: the
    section of the file; None is `default`, or a file without sections.
    """

    path: Path
    profile: str | None = None
    _state: tuple[int, ...] = ()
    _keys: ReadOnlyCredentials | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the keys. Raises ConfigError if the file has none, or if other users may read it."""
        with self._lock:
            try:
                if self._keys is None or _file_state(os.stat(self.path)) != self._state:
                    self._read()
            except OSError as exc:
                raise ConfigError(f"credentials_file = {self.path}: {exc.strerror}") from exc
            assert self._keys is not None
            return self._keys

    def _read(self) -> None:
        data, facts = read_key_file("credentials_file", self.path)
        text = data.decode("utf-8", "replace")
        found = _settings_of(text, self.profile or "default", needs_section=self.profile is not None)
        if found is None:
            raise ConfigError(
                f"credentials_file = {self.path}: it has no section [{self.profile or 'default'}]; add it, or name "
                "another one with `profile` or `write_profile`"
            )
        for name in ("aws_access_key_id", "aws_secret_access_key"):
            if not found.get(name):
                raise ConfigError(
                    f"credentials_file = {self.path}: it has no {name}; write `{name} = …`, or `{name.upper()}=…`"
                )
        self._keys = ReadOnlyCredentials(
            found["aws_access_key_id"],
            found["aws_secret_access_key"],
            found.get("aws_session_token") or None,
        )
        self._state = _file_state(facts)


def _file_state(facts: os.stat_result) -> tuple[int, ...]:
    """Return what changes whenever a file is written or replaced."""
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_mode


def _settings_of(text: str, section: str, *, needs_section: bool) -> dict[str, str] | None:
    """Return the settings of a section by name in lower case; None if the file has sections, but not this one.

    Lines before the first section belong to every one that is not asked for by name.
    """
    found: dict[str, str] = {}
    is_ours, has_ours, has_any = not needs_section, False, False
    for line in map(str.strip, text.splitlines()):
        if title := _SECTION.fullmatch(line):
            has_any, is_ours = True, title[1].strip() == section
            has_ours = has_ours or is_ours
        elif is_ours and (setting := _SETTING.fullmatch(line)):
            value = setting[2].strip()
            if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
                value = value[1:-1]
            found[setting[1].lower()] = value
    if not has_ours and (needs_section or (has_any and not found)):
        return None
    return found


class KeptCredentials:
    """Keys of a source that may fail: while it fails, the last keys stay in use. Thread-safe.

    botocore asks for renewal some minutes before keys expire, so the last keys often still work. If they do not, the
    bucket says so.
    """

    def __init__(self, read: Callable[[], ReadOnlyCredentials], name: str) -> None:
        """read: returns the source's keys. name: of the source, for messages."""
        self._read = read
        self._name = name
        self._lock = threading.Lock()
        self._last: ReadOnlyCredentials | None = None
        self._error: Exception | None = None
        self._failures = 0
        self._ask_again_at = float("-inf")

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the keys. Raises CredentialsMissing if the source fails and never gave any."""
        with self._lock:
            error = self._error if time.monotonic() < self._ask_again_at else None
        if error is not None:
            return self._last_or_raise(error)
        try:
            keys = self._read()
        except Exception as exc:  # noqa: BLE001  # botocore's sources raise anything: OSError, KeyError, ClientError, …
            self._on_failed(exc)
            return self._last_or_raise(exc)
        self._on_keys(keys)
        return keys

    def _last_or_raise(self, error: Exception) -> ReadOnlyCredentials:
        if self._last is None:
            if isinstance(error, CredentialsMissing):
                raise error
            raise CredentialsMissing(failure_text(self._name, error)) from error
        return self._last

    def _on_failed(self, error: Exception) -> None:
        with self._lock:
            if self._last is not None and str(error) != str(self._error or ""):
                log.warning(
                    "keys could not be renewed, the last ones stay in use, will retry source=%s error=%s",
                    self._name, error,
                )  # fmt: skip
            self._failures += 1
            pause = min(LONGEST_PAUSE_SECONDS, backoff_seconds(self._failures, random.random()))
            self._ask_again_at = time.monotonic() + pause
            self._error = error

    def _on_keys(self, keys: ReadOnlyCredentials) -> None:
        with self._lock:
            if self._last is not None and self._error is not None:
                log.info("keys renewed source=%s", self._name)
            self._last, self._error, self._failures = keys, None, 0


def failure_text(name: str, error: Exception) -> str:
    """Return why a source gave no keys."""
    if isinstance(error, botocore.exceptions.CredentialRetrievalError):
        reason = str(error.kwargs.get("error_msg", error))
    else:
        reason = str(error) or type(error).__name__
    return f"the keys from {name} could not be read: {' '.join(reason.split())}"
