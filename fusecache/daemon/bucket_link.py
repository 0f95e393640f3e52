"""The bucket of a running mount: its keys, its first answer, and its part of the status.

A mount that started without its bucket: waits for the first answer, and then finishes what a start does.

Renews credentials while the bucket refuses them: the user may have put new ones into their source.

Not here: sources that renew by themselves before their keys expire. They do so at each request (`remote.s3`).
"""

import logging
import os
import random
from collections.abc import Callable
from contextlib import suppress
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
from fusecache.daemon.log import log_place
from fusecache.disk.cache_files import Carry
from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.tree import Ownership
from fusecache.engine.options import BucketAccess, EngineOptions
from fusecache.engine.runtime.supervisor import Supervisor
from fusecache.model.errors import FusecacheError, MountError, RemoteError
from fusecache.model.format_text import count_text, empty_text, renewal_text
from fusecache.model.predecessor import Predecessor
from fusecache.model.prices import AWS_PRICES, R2_PRICES, Prices
from fusecache.policy.backoff import backoff_seconds
from fusecache.policy.bucket_health import BucketHealth, BucketState
from fusecache.remote.endpoints import Endpoint, StoreKind
from fusecache.remote.store import ConditionalWrites, Peers

log = logging.getLogger(__name__)

# Interval of the requests that find out whether the bucket answers.
CHECK_SECONDS = 5.0
# Shortest time between two reloads of refused credentials; longest pause after one that failed, as of a half-written
# file.
RELOAD_SECONDS = 30.0
# A store may refuse valid credentials for a short time. The daemon logs a warning only after this long.
DENIED_SECONDS = 10.0
# The permissions of a new key take up to a minute to take effect. Keys that are refused for longer are wrong.
AUTH_FAILED_SECONDS = 90.0
# A bucket that has not answered by then may be away.
_PROMPT_SECONDS = 2.0


class BucketLink:
    """The tasks and facts of the bucket."""

    def __init__(
        self,
        options: MountOptions,
        connection: StartConnection,
        filesystem: FileSystem,
        reach: Callable[[], None],
        answers: BucketAnswers | None = None,
        *,
        is_beside_others: bool = False,
    ) -> None:
        """reach: records that the bucket answered. answers: for the next daemon of the mount.

        is_beside_others: as for `connect`.
        """
        self._options = options
        self._is_beside_others = is_beside_others
        self._connection = connection
        self._remote = connection.remote
        self._filesystem = filesystem
        self._reach = reach
        self._answers = answers = answers or BucketAnswers(None)
        # Why the mount started without the bucket; None: it has answered since.
        self._failure = connection.failure
        # Asked now: a file of keys that is half-written later says nothing.
        self._keys_from = _keys_from(options, options.profile)
        self._write_keys_from = _keys_from(options, options.write_profile or options.profile)
        self._next_reload, self._failed_reloads = float("-inf"), 0
        self._reload_error = ""
        if connection.failure is None:
            self._record_answer()
        elif not options.read_only:  # a write could come before `check_conditions`
            self._remote.health.writes_held = f"this mount started without the bucket: {connection.failure}"

    async def start(self) -> None:
        """Serve what is known here, if the bucket does not answer. Raises MountError if that is no use."""
        failure, refusal = self._connection.failure, self._connection.write_refusal
        if refusal is not None:  # reads are answered
            if not (self._is_beside_others or self._answers.is_in_use or len(self._filesystem.queue)):
                refuse_without_writes(self._options, refusal)
        elif failure is not None:
            await self._filesystem.start_without_bucket(failure)

    def run_in(self, nursery: trio.Nursery, supervisor: Supervisor) -> None:
        """Start the tasks that renew the keys, and that wait for the first answer."""
        nursery.start_soon(supervisor.run, "contact", self._wait_for_bucket, name="contact")
        nursery.start_soon(supervisor.run, "credentials", self._renew_keys, name="credentials")
        if self._answers.is_in_use and self._connection.failure is None:
            nursery.start_soon(supervisor.run, "names", self._know_names, name="names")

    async def _know_names(self) -> None:
        """Serve cached files by name if the bucket is silent: the listings of the daemon before are gone."""
        filesystem, asked = self._filesystem, trio.Event()

        async def ask() -> None:
            await filesystem.ask_bucket()
            asked.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, name="ask")
            with trio.move_on_after(_PROMPT_SECONDS):
                await asked.wait()
            if asked.is_set() and not self._remote.health.is_silent:
                return
            await filesystem.know_cached_names()
        while self._remote.health.is_silent:
            await trio.sleep(CHECK_SECONDS)
            await filesystem.ask_bucket()
        filesystem.on_bucket_answered()

    def _record_answer(self) -> None:
        found = self._remote.conditional_writes
        if self._options.read_only or found is not ConditionalWrites.UNKNOWN:
            self._answers.record(found)

    async def _wait_for_bucket(self) -> None:
        """Return once the bucket has answered and the start is finished."""
        while self._failure is not None:
            await trio.sleep(CHECK_SECONDS)
            await self._filesystem.ask_bucket()
            if self._remote.health.writes_refused_since:
                with suppress(RemoteError):
                    await trio.to_thread.run_sync(self._remote.probe_write, self._options.prefix)
            if self._remote.health.state in (BucketState.SILENT, BucketState.REFUSED):
                continue
            try:
                await self._finish_start()
            except RemoteError:
                continue  # it does not answer any more
            except FusecacheError as exc:
                # The mount is in use: nothing is gained by ending it.
                log.error("the bucket answers, but a check of the start failed: %s", exc)
            else:
                log.info("the bucket answers: the mount is no longer degraded")
            self._failure = None

    async def _finish_start(self) -> None:
        """The bucket answers for the first time: do what `connect` could not. Raises RemoteError, MountError."""
        self._filesystem.on_bucket_answered()
        self._reach()
        try:
            if not self._options.read_only:
                await trio.to_thread.run_sync(check_conditions, self._options, self._remote)
            self._remote.health.writes_held = ""
            self._record_answer()
        except MountError as exc:
            self._remote.health.writes_held = str(exc)
            raise
        finally:  # what waits is uploaded, or has the new reason
            await self._filesystem.try_again()

    async def _renew_keys(self) -> None:
        """Reload the credentials from their source, while they are refused, until cancelled."""
        while True:
            await trio.sleep(CHECK_SECONDS)
            if not self._refused_seconds():
                self._failed_reloads, self._reload_error = 0, ""
            elif trio.current_time() >= self._next_reload:
                self._next_reload = trio.current_time() + RELOAD_SECONDS
                await self._reload()
                # Send a request even if no program reads: otherwise the state of the read credentials stays unknown.
                await self._filesystem.try_again()
                refused_seconds = self._refused_seconds()
                if refused_seconds >= DENIED_SECONDS and not self._reload_error:
                    log.warning(
                        "credentials refused and reloaded denied_seconds=%.0f; "
                        "see `fusecache status` for how to renew them",
                        refused_seconds,
                    )

    async def _reload(self) -> None:
        try:
            await trio.to_thread.run_sync(self._remote.reload)
        except FusecacheError as exc:
            self._failed_reloads += 1
            pause = min(RELOAD_SECONDS, backoff_seconds(self._failed_reloads, random.random()))
            self._next_reload = trio.current_time() + pause
            if self._reload_error != str(exc):
                self._reload_error = str(exc)
                log.warning(
                    "refused credentials could not be reloaded, the old ones stay in use, will retry error=%s",
                    exc,
                )
        else:
            self._failed_reloads, self._reload_error = 0, ""

    def _refused_seconds(self) -> float:
        # With an empty queue no write request shows whether writes are allowed again: ignore the old refusal.
        has_writes = len(self._filesystem.queue) > 0
        return self._remote.health.refused_seconds(has_writes=has_writes)

    def text(self) -> str:
        """Return what the user who mounts must know; "" if the bucket answered."""
        if self._failure is None:
            return ""
        waiting = f"{count_text(len(self._filesystem.queue), 'change')} waiting for upload"
        text = (
            f"DEGRADED: started without the bucket: {self._failure}; readable are cached files by name, and "
        )
        text += f"{waiting}; all else fails"
        if self._connection.write_refusal is not None:  # reads are answered
            text = (
                f"DEGRADED: the keys may not write: {self._failure}; {waiting}: give the keys that permission"
            )
        elif self._connection.are_keys_refused:
            text += f": {renewal_text(self._keys_from)}"
        else:
            text += " until the bucket answers; then the mount heals by itself"
        return text

    def question(self) -> str:
        """Return what to ask the user who mounts a prefix without objects, else ""."""
        return empty_text(self._options.source, is_empty=self._connection.is_empty)

    def facts(self) -> dict[str, Any]:
        """Return the status fields about keys, start and store."""
        health = self._remote.health
        # While writes alone are refused, the keys for writing need renewal.
        is_writers = health.writes_refused_since and not health.reads_refused_since
        return {
            "state": "auth-failed" if self._refused_seconds() >= AUTH_FAILED_SECONDS else "ok",
            "keys_error": self._reload_error,
            "start_failure": str(self._failure or ""),
            "keys_from": self._write_keys_from if is_writers else self._keys_from,
            "conditional_writes": "" if self._options.read_only else self._remote.conditional_writes.value,
            "writes_held": health.writes_held,
        }


def endpoint_fact(options: MountOptions) -> str:
    """Return where the bucket is."""
    primary = next((each.url for each in options.requests.endpoints[:1]), "") or endpoint_of(options).url
    return (primary or "AWS").rstrip("/")


def bucket_access(options: MountOptions, health: BucketHealth | None = None) -> BucketAccess:
    """Return how the engine may use a bucket. health: what its store records."""
    return BucketAccess(
        keys_from=_keys_from(options, options.write_profile or options.profile),
        writes_by_other_keys=options.write_profile is not None
        or any(each.write_keys is not None for each in options.requests.endpoints[:1]),
        health=health,
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
    }


def _prices_of(endpoint: Endpoint) -> Prices | None:
    """Return what the requests to the bucket cost; None if that is unknown."""
    if endpoint.is_r2:
        return R2_PRICES
    host = urlsplit(endpoint.url or "").hostname or ""
    is_aws = endpoint.kind is StoreKind.S3 and (endpoint.url is None or host.endswith(".amazonaws.com"))
    return AWS_PRICES if is_aws else None


def _keys_from(options: MountOptions, profile: str | None) -> str:
    if options.kind is not StoreKind.S3:
        from fusecache.remote.clouds.opening import cloud_keys_from  # as in connect.py

        return cloud_keys_from(options.kind, os.environ)
    family = next((each.credentials_from for each in options.requests.endpoints), None)
    if family is not None:
        return f"environment ({family}_…)"
    return keys_from(profile, os.environ, credentials_file=options.credentials_file)


def movers_of(options: MountOptions) -> int:
    """Return how many processes carry bytes for the daemon."""
    return 0 if options.session.fuse_library == "pyfuse3" else options.session.movers


def engine_options(
    options: MountOptions,
    ownership: Ownership,
    predecessor: Predecessor | None,
    health: BucketHealth,
    carry: Carry,
    peers: Peers | None = None,
) -> EngineOptions:
    """Return what the engine must know. carry: may have another process store buffers."""
    return EngineOptions(
        directory=options.cache_dir,
        prefix=options.prefix,
        ownership=ownership,
        cache_bytes=options.cache_size,
        buffer_bytes=options.memory,
        are_buffers_shared=movers_of(options) > 0,
        carry=carry,
        settle_seconds=options.writeback.settle_seconds,
        fresh_seconds=options.attribute_seconds,
        immutable=options.immutable,
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
        whole_files=options.whole_files,
        symlinks=options.symlinks,
        download_rate=options.requests.download_rate,
        patience_seconds=options.requests.read_timeout,
        prices=_prices_of(endpoint_of(options)),
        predecessor=predecessor,
        access=bucket_access(options, health),
        peers=peers,
    )


def initial_facts(options: MountOptions) -> dict[str, Any]:
    """Return the status fields that are known before the mount starts."""
    return {
        "version": __version__,
        "pid": os.getpid(),
        "source": options.source,
        "mountpoint": str(options.mountpoint),
        "log": log_place(),
        "endpoint": endpoint_fact(options),
        "options": shown_options(options),
        "kernel": {"applied": [], "refused": []},
    }
