"""One mount's life as a process: checks, start, signals, end. The only place where everything is wired.

Invariant: whatever fails before `ready` leaves nothing mounted and nothing lost.
"""

import configparser
import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from fusecache import __version__
from fusecache.config.options import MountOptions, shown_options
from fusecache.daemon.control_server import ControlServer
from fusecache.daemon.disk_check import check_disk, shortage_text
from fusecache.daemon.sd_notify import notify
from fusecache.disk.state_directory import StateDirectory
from fusecache.engine.file_system import EngineOptions, FileSystem
from fusecache.engine.namespace.tree import Ownership
from fusecache.engine.runtime.exception_groups import unwrap_single_error
from fusecache.engine.runtime.offload import ThreadOffload
from fusecache.fs.control import ControlDirectory
from fusecache.fs.hint_files import HintFiles
from fusecache.fs.kernel import tune
from fusecache.fs.operations import Operations
from fusecache.model.errors import AccessDenied, FusecacheError, MountError, Unavailable
from fusecache.mount.launch import check_mountpoint
from fusecache.mount.leftover_text import found_text
from fusecache.remote.endpoints import URL_VARIABLES, Endpoint, Transport, choose_endpoint
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.s3.store import S3Store

log = logging.getLogger(__name__)

# GETs in flight; the pool of buffers bounds them too.
NETWORK_THREADS = 80
UPLOAD_THREADS = 16
# Requests that publish, and send few bytes: never behind large uploads.
PUBLISH_THREADS = 64
# Requests that may wait in handlers: with pyfuse3's 99, a hundred waiting readers would hang every `ls`.
MAX_TASKS = 4096
# Idle tasks are kept up to here, so that a burst of requests does not start and end tasks all the time.
MIN_TASKS = 64
# With the default of 5 ms a thread that copies a body holds the loop, and so every reader, for as long.
SWITCH_INTERVAL_SECONDS = 0.0005
STATUS_SECONDS = 5.0
CREDENTIALS_SECONDS = 30.0
# A store may refuse keys for a moment; from here on a person is told.
DENIED_SECONDS = 10.0
# Permissions of a new key take up to a minute to arrive: keys that are refused for longer are wrong.
AUTH_FAILED_SECONDS = 90.0
STALE_SECONDS = 10.0


def run(options: MountOptions, ready: Callable[[str], None]) -> int:
    """Mount, serve until unmounted or told to stop, drain; return the exit status.

    `ready` is called once the mount answers, with what whoever mounts should know ("": nothing).
    Raises FusecacheError if it cannot start.
    """
    _begin_log(options.log_level.upper())
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    try:
        return _run(options, ready)
    except FusecacheError as exc:
        notify(STATUS=f"failed: {exc}")
        raise


def _begin_log(level: str) -> None:
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for library in ("boto3", "botocore", "urllib3", "pyfuse3"):
        logging.getLogger(library).setLevel(logging.WARNING)  # at DEBUG they speak of every request
    logging.getLogger("pyfuse3").addFilter(_is_relevant)


def _is_relevant(record: logging.LogRecord) -> bool:
    """Return whether a line of pyfuse3's says more than that the kernel, being unmounted, awaits no answer."""
    return "fuse_reply_*" not in str(record.msg) or os.strerror(errno.ENOENT) not in record.getMessage()


def _run(options: MountOptions, ready: Callable[[str], None]) -> int:
    check_mountpoint(options.mountpoint, allow_other=options.allow_other)
    check_disk(options)
    endpoint = choose_endpoint(
        os.environ, endpoint_url=options.endpoint_url, region=options.region, is_r2=options.endpoint_is_r2
    )
    remote = _connect(options, endpoint)
    identity = f"{endpoint.url or 'AWS'} s3://{options.bucket}/{options.prefix}"
    with (
        closing(remote),
        StateDirectory(options.cache_dir, identity, mountpoint=options.mountpoint),
        unwrap_single_error(),
    ):
        return trio.run(_Daemon(options, remote, ready).run)
    raise AssertionError("unreachable: the daemon returns or raises")


def _connect(options: MountOptions, endpoint: Endpoint) -> ReadWriteSplit:
    """Make the stores and show that they may do what the mount will ask of them."""
    transport = Transport(max_connections=NETWORK_THREADS + UPLOAD_THREADS + PUBLISH_THREADS)
    reader = S3Store(options.bucket, endpoint, profile=options.profile, transport=transport)
    try:
        reader.list_page(options.prefix, limit=1)
    except Unavailable as exc:
        raise MountError(
            f"{options.source} cannot be reached: {exc}; is {endpoint.url or 'AWS'} the right endpoint "
            f"(--endpoint-url, else {', '.join(URL_VARIABLES)} or R2_ACCOUNT_ID), "
            "and is there a way to it (network, proxy, firewall)?"
        ) from exc
    if options.read_only:
        return ReadWriteSplit([reader], None)
    writer = reader
    if options.write_profile is not None:
        writer = S3Store(options.bucket, endpoint, profile=options.write_profile, transport=transport)
    try:
        writer.probe_write(options.prefix)
    except AccessDenied as exc:
        raise MountError(
            f"{options.source}: these credentials may read but not write ({exc}); "
            f"mount with --read-only, or give a key that may write"
        ) from exc
    return ReadWriteSplit([reader], writer)


def _keys_from(profile: str | None, environ: Mapping[str, str]) -> str:
    """Return where the keys are read from: `environment`, the path of a file, or "" for another link of the chain."""
    if profile is None and "AWS_ACCESS_KEY_ID" in environ:
        return "environment"
    path = os.path.expanduser(environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    profiles = configparser.RawConfigParser()
    profiles.read(path)
    section = profile or environ.get("AWS_PROFILE", "default")
    return path if profiles.has_option(section, "aws_access_key_id") else ""


class _Daemon:
    def __init__(self, options: MountOptions, remote: ReadWriteSplit, ready: Callable[[str], None]) -> None:
        self._options = options
        self._remote = remote
        self._ready = ready
        self._stop = trio.Event()
        self._mounted = False
        self._abandoned = False
        self._signals = 0
        self._signal = trio.Event()
        self._facts: dict[str, Any] = {}

    async def run(self) -> int:
        options = self._options
        offload = ThreadOffload(
            network_threads=NETWORK_THREADS, upload_threads=UPLOAD_THREADS, publish_threads=PUBLISH_THREADS
        )
        owner = os.stat(options.mountpoint)
        ownership = Ownership(
            owner.st_uid if options.uid is None else options.uid,
            owner.st_gid if options.gid is None else options.gid,
            options.umask,
            # As tar: only root can give files to others, and keep what is not its own in reach.
            is_told=options.posix_metadata
            and os.geteuid() == 0
            and options.uid is None
            and options.gid is None,
        )
        filesystem = FileSystem(
            self._remote,
            offload,
            EngineOptions(
                directory=options.cache_dir,
                prefix=options.prefix,
                ownership=ownership,
                cache_bytes=options.cache_size,
                buffer_bytes=options.memory,
                settle_seconds=options.settle_seconds,
                fresh_seconds=options.attribute_seconds,
                immutable=options.immutable,
                posix_metadata=options.posix_metadata,
                temp_names=options.temp_names,
                order_last=options.order_last,
                delete_delay=options.delete_delay,
                last_wins=options.conflict == "last-wins",
                read_only=options.read_only,
                fsync_is_remote=options.fsync == "remote",
                local_only=options.local_only,
                pin=options.pin,
                keys_from=_keys_from(options.write_profile or options.profile, os.environ),
                writes_by_other_keys=options.write_profile is not None,
            ),
        )
        facts = self._facts
        facts |= {
            "version": __version__,
            "pid": os.getpid(),
            "source": options.source,
            "mountpoint": str(options.mountpoint),
            "read_only": options.read_only,
            "keys_from": _keys_from(options.profile, os.environ),
            "write_keys_from": _keys_from(options.write_profile or options.profile, os.environ),
            **shown_options(options),
            "kernel": {"applied": [], "refused": []},
        }
        socket_path = _socket_path(options.cache_dir)
        server = ControlServer(
            filesystem,
            socket_path,
            lambda: {**facts, "state": self._state(filesystem)},
            on_abandon=self._abandon,
            on_carry_on=self._resume,
        )
        statistics: Callable[[], dict[str, Any]] = server.status
        operations = Operations(
            filesystem,
            ControlDirectory(
                socket_path,
                statistics,
                HintFiles(filesystem.hints, ownership.uid, ownership.gid),
                ownership.uid,
                ownership.gid,
            ),
            read_only=options.read_only,
        )
        async with filesystem.running():
            try:
                async with trio.open_nursery() as nursery:
                    await nursery.start(self._watch_signals, name="signals")
                    await nursery.start(server.run, name="control")
                    self._mount(operations)
                    nursery.start_soon(self._serve, name="fuse")
                    await self._announce(filesystem)
                    nursery.start_soon(self._report, filesystem, name="status")
                    nursery.start_soon(self._renew_credentials, filesystem, name="credentials")
                    await self._stop.wait()
                    filesystem.end_waiting()
                    await self._drain(filesystem)
                    offload.abandon_reads()
                    if self._must_stop_now():
                        # As a kill would: what a request did that nobody heard of is found out by the next mount.
                        offload.abandon_writes()
                    nursery.cancel_scope.cancel()
            finally:
                # Only when no handler runs any more: one that replied through a closed session would crash.
                self._unmount()
            return self._report_pending(filesystem)

    def _mount(self, operations: Operations) -> None:
        options = self._options
        words = set(pyfuse3.default_options)
        words |= {f"fsname={options.source}", "subtype=fusecache"}
        if options.allow_other:
            words.add("allow_other")
        try:
            pyfuse3.init(operations, str(options.mountpoint), words)
        except RuntimeError as exc:
            raise MountError(
                f"{options.mountpoint}: the mount was refused ({exc}); what fusermount3 said stands above, "
                f"or in {options.cache_dir}/fusecache.log"
            ) from exc
        self._mounted = True

    def _unmount(self) -> None:
        if self._mounted:
            self._mounted = False
            pyfuse3.close(unmount=True)

    async def _serve(self) -> None:
        """Answer the kernel until the mount is gone, then publish what is left."""
        await pyfuse3.main(min_tasks=MIN_TASKS, max_tasks=MAX_TASKS)
        self._stop.set()

    async def _announce(self, filesystem: FileSystem) -> None:
        """Show that the mount answers, tune the kernel's side of it, and say so."""
        mountpoint = str(self._options.mountpoint)
        await trio.to_thread.run_sync(os.stat, mountpoint)
        settings = await trio.to_thread.run_sync(tune, mountpoint)
        self._facts["kernel"] = {"applied": list(settings.applied), "refused": list(settings.refused)}
        log.info("kernel applied=%s", ",".join(settings.applied) or "nothing")
        if settings.refused:
            log.warning(
                "kernel settings refused, large reads and many at once are slower: %s; to have them: %s",
                ", ".join(settings.refused),
                settings.remedy,
            )
        pending = filesystem.pending()
        log.info("mounted source=%s at=%s pending_files=%d", self._options.source, mountpoint, pending.files)
        notify(READY=1, STATUS=f"mounted at {mountpoint}", MAINPID=os.getpid())
        short = shortage_text(self._options, filesystem.cache.usable_bytes())
        if short:
            log.warning("%s", short)
        recovered = filesystem.replayed
        found = found_text(
            self._options.mountpoint,
            changes=len(recovered.versions) + len(recovered.operations),
            orphans=recovered.orphans,
            suspects=recovered.suspects,
        )
        self._ready("; ".join(filter(None, (found, short))))

    async def _report(self, filesystem: FileSystem) -> None:
        while True:
            await trio.sleep(STATUS_SECONDS)
            notify(STATUS=filesystem.status.line(filesystem.pending()))

    async def _renew_credentials(self, filesystem: FileSystem) -> None:
        """While the bucket refuses our keys, read them again from where they came from: somebody may mend them."""
        reloaded = float("-inf")
        while True:
            await trio.sleep(STATUS_SECONDS)
            denied_seconds = self._denied_seconds(filesystem)
            if denied_seconds and trio.current_time() >= reloaded + CREDENTIALS_SECONDS:
                reloaded = trio.current_time()
                await trio.to_thread.run_sync(self._remote.reload)
                # Also a reader that nobody uses just now is asked, so that its state is known.
                await filesystem.try_again()
                denied_seconds = self._denied_seconds(filesystem)
                if denied_seconds >= DENIED_SECONDS:
                    log.warning(
                        "the bucket refuses the credentials, for %.0f s now; they were read again",
                        denied_seconds,
                    )

    def _state(self, filesystem: FileSystem) -> str:
        """Return the mount's state in one word."""
        return "auth-failed" if self._denied_seconds(filesystem) >= AUTH_FAILED_SECONDS else "ok"

    def _denied_seconds(self, filesystem: FileSystem) -> float:
        # With nothing to be published nobody learns that writing is granted again: that is not known then.
        writes = self._remote.writes_denied.seconds() if len(filesystem.queue) else 0.0
        return max(self._remote.reads_denied.seconds(), writes)

    def _abandon(self) -> None:
        """Leave what is not uploaded to the next mount."""
        self._abandoned = True

    def _resume(self) -> None:
        """The mount does not end after all."""
        self._abandoned = False

    def _must_stop_now(self) -> bool:
        return self._abandoned or self._signals > 1

    async def _drain(self, filesystem: FileSystem) -> None:
        """Publish what is left, saying how far it is; a second signal leaves it to the next mount."""
        if not len(filesystem.queue) or self._abandoned:
            return
        notify(STOPPING=1, STATUS="uploading what is left")

        async def report() -> None:
            while True:
                pending = filesystem.pending()
                log.info("draining files=%d bytes=%d", pending.files, pending.bytes)
                notify(STATUS=f"draining: {filesystem.status.line(pending)}")
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(report, name="drain-report")
            nursery.start_soon(self._watch_second_signal, nursery.cancel_scope, name="second-signal")
            with filesystem.publisher.draining():
                # Files are still closed meanwhile: the mount answers until the end.
                while len(filesystem.queue):
                    await filesystem.wait_durable("", None)
            nursery.cancel_scope.cancel()

    def _report_pending(self, filesystem: FileSystem) -> int:
        """Return the exit status: 0 if the bucket has everything, or nobody wanted to wait for it."""
        left = filesystem.pending()
        if not left.files:
            return 0
        log.warning(
            "stopped before everything was uploaded files=%d bytes=%d; kept in %s, the next mount goes on",
            left.files, left.bytes, self._options.cache_dir,
        )  # fmt: skip
        return 0 if self._abandoned else 1

    async def _watch_signals(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for number in signals:
                log.info("stopping signal=%s", signal.Signals(number).name)
                self._signals += 1
                self._stop.set()
                self._signal.set()

    async def _watch_second_signal(self, scope: trio.CancelScope) -> None:
        while self._signals < 2:
            self._signal = trio.Event()
            await self._signal.wait()
        scope.cancel()


def _socket_path(cache_dir: Path) -> str:
    """Return where the control socket goes: short, as addresses of sockets end at 108 bytes.

    Those of killed daemons, on which nobody listens any more, are removed.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or ("/run" if os.geteuid() == 0 else tempfile.gettempdir()))
    folder = base / ("fusecache" if base != Path(tempfile.gettempdir()) else f"fusecache-{os.geteuid()}")
    try:
        folder.mkdir(mode=0o755, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="fusecache-"))
    for path in folder.glob("*.sock"):
        _remove_if_stale(path)
    digest = blake2b(str(cache_dir.resolve()).encode(), digest_size=8).hexdigest()
    return str(folder / f"{digest}.sock")


def _remove_if_stale(path: Path) -> None:
    """Remove a unix socket that refuses connections: its daemon was killed.

    One that was bound and does not listen yet refuses too: it is left alone for a while.
    """
    try:
        if time.time() - path.lstat().st_mtime < STALE_SECONDS:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(0)  # a busy daemon's backlog may be full: that is no refusal
            probe.connect(os.fspath(path))
    except ConnectionRefusedError:
        with suppress(OSError):
            path.unlink()
    except OSError:
        return
