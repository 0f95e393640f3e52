"""One bucket of a running mount: its keys, its first answer, and its part of the status.

A mount that started without its bucket: waits for the first answer, and then finishes what a start does.

Renews credentials while the bucket refuses them: the user may have put new ones into their source.

Not here: sources that renew by themselves before their keys expire. They do so at each request (`remote.s3`).
"""

import logging
import os
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import trio

from fusecache import __version__
from fusecache.config.options import MountOptions, shown_options
from fusecache.daemon.connect import (
    StartConnection,
    check_conditions,
    endpoint_of,
    keys_from,
    refuse_without_writes,
)
from fusecache.daemon.keeping import BucketAnswers
from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.tree import Ownership
from fusecache.engine.options import BucketAccess, EngineOptions
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.errors import FusecacheError, MountError, RemoteError
from fusecache.model.format_text import count_text, empty_text, renewal_text
from fusecache.model.predecessor import Predecessor
from fusecache.model.prices import AWS_PRICES, R2_PRICES, Prices
from fusecache.policy.backoff import backoff_seconds
from fusecache.remote.endpoints import Endpoint, StoreKind
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.store import ConditionalWrites

log = logging.getLogger(__name__)

# Interval of the requests that find out whether the bucket answers.
CHECK_SECONDS = 5.0


@dataclass(eq=False, repr=False)
class FirstContact:
    """Waits for the bucket's first answer. failure: why the mount starts without it; None: it answered.

    reads: the bucket answers reads, and refuses only writes.

    try_again: sends a request. finish: does what only a bucket that answers allows. remedy: how to renew refused keys;
    "" if the bucket only does not answer.
    """

    _failure: RemoteError | None
    reads: bool = field(kw_only=True)
    is_answered: Callable[[], bool] = field(kw_only=True)
    try_again: Callable[[], Awaitable[None]] = field(kw_only=True)
    finish: Callable[[], Awaitable[None]] = field(kw_only=True)
    remedy: str = field(kw_only=True)

    def facts(self) -> dict[str, Any]:
        """Return the status fields about the start."""
        return {"start_failure": str(self._failure or "")}

    def text(self, pending_files: int) -> str:
        """Return what the user who mounts must know; "" if the bucket answered."""
        if self._failure is None:
            return ""
        waiting = f"{count_text(pending_files, 'change')} waiting for upload"
        if self.reads:
            return (
                f"DEGRADED: the keys may not write: {self._failure}; {waiting}: give the keys that permission"
            )
        return (
            f"DEGRADED: started without the bucket: {self._failure}; readable are cached files by name, and "
            f"{waiting}; all else fails"
        ) + (
            f": {self.remedy}" if self.remedy else " until the bucket answers; then the mount heals by itself"
        )

    async def run(self) -> None:
        """Return once the bucket has answered and the start is finished."""
        while self._failure is not None:
            await trio.sleep(CHECK_SECONDS)
            await self.try_again()
            if not self.is_answered():
                continue
            try:
                await self.finish()
            except RemoteError:
                continue  # it does not answer any more
            except FusecacheError as exc:
                # The mount is in use: nothing is gained by ending it.
                log.error("the bucket answers, but a check of the start failed: %s", exc)
            else:
                log.info("the bucket answers: the mount is no longer degraded")
            self._failure = None


# Interval of the check whether the bucket refuses the credentials.
# Shortest time between two reloads of refused credentials; longest pause after one that failed, as of a half-written
# file.
RELOAD_SECONDS = 30.0
# A store may refuse valid credentials for a short time. The daemon logs a warning only after this long.
DENIED_SECONDS = 10.0
# The permissions of a new key take up to a minute to take effect. Keys that are refused for longer are wrong.
AUTH_FAILED_SECONDS = 90.0


@dataclass(eq=False, repr=False)
class CredentialRenewal:
    """Reloads refused credentials from their source.

    try_again: sends a request with the new credentials, and retries everything that waits.
    """

    _remote: ReadWriteSplit
    has_pending_writes: Callable[[], bool] = field(kw_only=True)
    try_again: Callable[[], Awaitable[None]] = field(kw_only=True)
    _next_reload: float = field(init=False, default=float("-inf"))
    _failures: int = field(init=False, default=0)
    _error: str = field(init=False, default="")
    _logged: str = field(init=False, default="")

    def facts(self) -> dict[str, Any]:
        """Return the status fields about the credentials."""
        denied_seconds = self._denied_seconds()
        state = "auth-failed" if denied_seconds >= AUTH_FAILED_SECONDS else "ok"
        return {"state": state, "denied_seconds": round(denied_seconds, 1), "keys_error": self._error}

    async def run(self) -> None:
        """Reload the credentials, while they are refused, until cancelled."""
        while True:
            await trio.sleep(CHECK_SECONDS)
            if not self._denied_seconds():
                self._on_accepted()
            elif trio.current_time() >= self._next_reload:
                self._next_reload = trio.current_time() + RELOAD_SECONDS
                await self._reload()
                # Send a request even if no program reads: otherwise the state of the read credentials stays unknown.
                await self.try_again()
                denied_seconds = self._denied_seconds()
                if denied_seconds >= DENIED_SECONDS and not self._error:
                    log.warning(
                        "credentials refused and reloaded denied_seconds=%.0f; "
                        "see `fusecache status` for how to renew them",
                        denied_seconds,
                    )

    async def _reload(self) -> None:
        try:
            await trio.to_thread.run_sync(self._remote.reload)
        except FusecacheError as exc:
            self._failures += 1
            pause = min(RELOAD_SECONDS, backoff_seconds(self._failures, random.random()))
            self._next_reload = trio.current_time() + pause
            self._error = str(exc)
            if self._error != self._logged:
                self._logged = self._error
                log.warning(
                    "refused credentials could not be reloaded, the old ones stay in use, will retry error=%s",
                    exc,
                )
        else:
            self._failures, self._error = 0, ""

    def _on_accepted(self) -> None:
        self._failures, self._error, self._logged = 0, "", ""

    def _denied_seconds(self) -> float:
        # With an empty queue no write request shows whether writes are allowed again: ignore the old refusal.
        writes = self._remote.writes_denied.seconds() if self.has_pending_writes() else 0.0
        return max(self._remote.reads_denied.seconds(), writes)


# A bucket that has not answered by then may be away.
_PROMPT_SECONDS = 2.0


class BucketLink:
    """The tasks and facts of one bucket. name: of its folder; "" for the only bucket of a mount."""

    def __init__(
        self,
        name: str,
        options: MountOptions,
        connection: StartConnection,
        filesystem: FileSystem,
        reach: Callable[[], None],
        answers: BucketAnswers | None = None,
    ) -> None:
        """reach: records that the bucket answered. answers: for the next daemon of the mount."""
        self.name = name
        self._options = options
        self._connection = connection
        self._remote = remote = connection.remote
        self._filesystem = filesystem
        self._reach = reach
        self._answers = answers = answers or BucketAnswers(None)
        self._renewal = CredentialRenewal(
            remote,
            has_pending_writes=lambda: filesystem.pending_changes(name) > 0,
            try_again=partial(filesystem.try_again, name),
        )
        self._contact = FirstContact(
            connection.failure,
            reads=connection.write_refusal is not None,
            is_answered=lambda: filesystem.is_answered(name) and not remote.writes_denied.is_on,
            try_again=self._ask_again,
            finish=self._finish_start,
            remedy=renewal_text(_keys_from(options, options.profile)) if connection.are_keys_refused else "",
        )
        if connection.failure is None:
            self._record_answer()
        elif not options.read_only:  # a write could come before `check_conditions`
            remote.writes_held = f"this mount started without the bucket: {connection.failure}"

    async def start(self) -> None:
        """Serve what is known here, if the bucket does not answer. Raises MountError if that is no use."""
        failure, refusal = self._connection.failure, self._connection.write_refusal
        if refusal is not None:  # reads are answered
            if not (self.name or self._answers.is_in_use or self._filesystem.pending_changes()):
                refuse_without_writes(self._options, refusal)
        elif failure is not None:
            await self._filesystem.start_without_bucket(self.name, failure)

    def run_in(self, nursery: trio.Nursery, supervisor: Supervisor) -> None:
        """Start the tasks that renew the keys, and that wait for the first answer."""
        nursery.start_soon(supervisor.run, "contact", self._contact.run, name="contact")
        nursery.start_soon(supervisor.run, "credentials", self._renewal.run, name="credentials")
        if self._answers.is_in_use and self._connection.failure is None:
            nursery.start_soon(supervisor.run, "names", self._know_names, name="names")

    async def _know_names(self) -> None:
        """Serve cached files by name if the bucket is silent: the listings of the daemon before are gone."""
        name, filesystem, asked = self.name, self._filesystem, trio.Event()

        async def ask() -> None:
            await filesystem.ask_bucket(name)
            asked.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, name="ask")
            with trio.move_on_after(_PROMPT_SECONDS):
                await asked.wait()
            if asked.is_set() and filesystem.is_answered(name):
                return
            await filesystem.know_cached_names(name)
        while not filesystem.is_answered(name):
            await trio.sleep(CHECK_SECONDS)
            await filesystem.ask_bucket(name)
        filesystem.on_bucket_answered(name)

    def _record_answer(self) -> None:
        found = self._remote.conditional_writes
        if self._options.read_only or found is not ConditionalWrites.UNKNOWN:
            self._answers.record(self.name, found)

    async def _ask_again(self) -> None:
        await self._filesystem.ask_bucket(self.name)
        if self._remote.writes_denied.is_on:
            with suppress(RemoteError):
                await trio.to_thread.run_sync(self._remote.probe_write, self._options.prefix)

    async def _finish_start(self) -> None:
        """The bucket answers for the first time: do what `connect` could not. Raises RemoteError, MountError."""
        self._filesystem.on_bucket_answered(self.name)
        self._reach()
        try:
            if not self._options.read_only:
                await trio.to_thread.run_sync(check_conditions, self._options, self._remote)
            self._remote.writes_held = ""
            self._record_answer()
        except MountError as exc:
            self._remote.writes_held = str(exc)
            raise
        finally:  # what waits is uploaded, or has the new reason
            await self._filesystem.try_again(self.name)

    def text(self) -> str:
        """Return what the user who mounts must know; "" if the bucket answered."""
        text = self._contact.text(self._filesystem.pending_changes(self.name))
        return f"bucket {self.name}: {text}" if text and self.name else text

    def question(self) -> str:
        """Return what to ask the user who mounts a prefix without objects, else ""."""
        return empty_text(self._options.source, is_empty=self._connection.is_empty)

    def facts(self) -> dict[str, Any]:
        """Return the status fields about keys, start and store."""
        return {
            **self._renewal.facts(),
            **self._contact.facts(),
            "conditional_writes": "" if self._options.read_only else self._remote.conditional_writes.value,
            "writes_held": self._remote.writes_held,
        }

    def row(self) -> dict[str, Any]:
        """Return the bucket's row in the status of a mount of several."""
        return {
            "bucket": self.name,
            "source": self._options.source,
            "read_only": self._options.read_only,
            **key_facts(self._options),
            **self.facts(),
            **self._filesystem.bucket_facts(self.name),
        }


def key_facts(options: MountOptions) -> dict[str, Any]:
    """Return where the bucket is, and where the keys for reading and for writing come from."""
    primary = next((each.url for each in options.requests.endpoints[:1]), "") or endpoint_of(options).url
    return {
        "endpoint": (primary or "AWS").rstrip("/"),
        "keys_from": _keys_from(options, options.profile),
        "write_keys_from": _keys_from(options, options.write_profile or options.profile),
    }


def bucket_access(options: MountOptions) -> BucketAccess:
    """Return how the engine may use a bucket."""
    return BucketAccess(
        read_only=options.read_only,
        keys_from=_keys_from(options, options.write_profile or options.profile),
        writes_by_other_keys=options.write_profile is not None
        or any(each.write_keys is not None for each in options.requests.endpoints[:1]),
    )


def command_access(options: MountOptions, endpoint: Endpoint) -> dict[str, Any]:
    """Return how the bucket is reached for writes, for commands that work on it themselves."""
    file = options.credentials_file
    family = next((each.credentials_from for each in options.requests.endpoints), None)
    return {
        "source": options.source,
        "endpoint_url": endpoint.url,
        "region": endpoint.region,
        "profile": options.write_profile or options.profile,
        "credentials_file": None if file is None else str(file),
        "credentials_from": family,
        "is_r2": endpoint.is_r2,
    }


def request_prices(mounts: Iterable[MountOptions]) -> Prices | None:
    """Return what the requests to all buckets cost; None if that is unknown, or not the same."""
    found = {_prices_of(endpoint_of(each)) for each in mounts}
    return found.pop() if len(found) == 1 else None


def _prices_of(endpoint: Endpoint) -> Prices | None:
    if endpoint.is_r2:
        return R2_PRICES
    host = urlsplit(endpoint.url or "").hostname or ""
    is_aws = endpoint.kind is StoreKind.S3 and (endpoint.url is None or host.endswith(".amazonaws.com"))
    return AWS_PRICES if is_aws else None


def immutable_names(mounts: Mapping[str, MountOptions]) -> tuple[str, ...]:
    """Return the patterns of names that never change, as paths in the mount of several buckets."""
    found: list[str] = []
    for name, options in mounts.items():
        for pattern in options.immutable:
            found.append(f"{name}/{pattern}" if name else pattern)
            if name and "/" not in pattern:
                found.append(f"{name}/*/{pattern}")
    return tuple(found)


def split_source(source: str) -> tuple[str, str]:
    """Return the bucket and the prefix of a source; the prefix is empty or ends in '/'."""
    bucket, _, prefix = source.partition("://")[2].rstrip("/").partition("/")
    return bucket, f"{prefix}/" if prefix else ""


def key_here(name: str, prefix: str, key: str) -> str:
    """Return a key of a bucket as a mount of several has it, or "". A key with '/' at its end, or "", is all below it.

    name: of the bucket's folder; prefix: of its source.
    """
    if key.startswith(prefix):
        return f"{name}/{key[len(prefix) :]}"
    is_above = not key or key.endswith("/")
    return f"{name}/" if is_above and prefix.startswith(key) else ""


def _keys_from(options: MountOptions, profile: str | None) -> str:
    if options.kind is not StoreKind.S3:
        from fusecache.remote.clouds.opening import cloud_keys_from  # as in connect.py

        return cloud_keys_from(options.kind, os.environ)
    family = next((each.credentials_from for each in options.requests.endpoints), None)
    if family is not None:
        return f"environment ({family}_…)"
    return keys_from(profile, os.environ, credentials_file=options.credentials_file)


def engine_options(
    options: MountOptions,
    mounts: Mapping[str, MountOptions],
    ownership: Ownership,
    predecessor: Predecessor | None,
) -> EngineOptions:
    """Return what the engine must know. mounts: the options of each bucket, by the name of its folder."""
    return EngineOptions(
        directory=options.cache_dir,
        prefix=options.prefix,
        ownership=ownership,
        cache_bytes=options.cache_size,
        buffer_bytes=options.memory,
        settle_seconds=options.writeback.settle_seconds,
        fresh_seconds=options.attribute_seconds,
        immutable=(*options.immutable, *(() if "" in mounts else immutable_names(mounts))),
        posix_metadata=options.posix_metadata,
        temp_names=options.writeback.temp_names,
        order_last=options.writeback.order_last,
        drain_seconds=options.writeback.drain_timeout,
        delete_delay=options.writeback.delete_delay,
        last_wins=options.writeback.conflict == "last-wins",
        read_only=options.read_only,
        fsync_is_remote=options.writeback.fsync == "remote",
        local_only=options.writeback.local_only,
        pin=options.pin,
        symlinks=options.symlinks,
        download_rate=options.requests.download_rate,
        patience_seconds=options.requests.read_timeout,
        prices=request_prices(mounts.values()),
        predecessor=predecessor,
        buckets={name: bucket_access(each) for name, each in mounts.items()},
    )


def initial_facts(options: MountOptions, mounts: Mapping[str, MountOptions]) -> dict[str, Any]:
    """Return the status fields that are known before the mount starts."""
    return {
        "version": __version__,
        "pid": os.getpid(),
        "source": options.source,
        "mountpoint": str(options.mountpoint),
        **(key_facts(options) if "" in mounts else {"keys_from": "", "write_keys_from": "", "endpoint": ""}),
        **shown_options(options),
        "kernel": {"applied": [], "refused": []},
    }
