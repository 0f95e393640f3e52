"""The daemon process of one mount: checks, start, signals, shutdown. It wires engine, FUSE and control socket.

Invariant: a failure before `ready` leaves nothing mounted and loses no data.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import trio

from fusecache.config.node_limits import request_memory
from fusecache.config.options import MountOptions
from fusecache.daemon.bucket_link import (
    BucketLink,
    command_access,
    engine_options,
    initial_facts,
    movers_of,
)
from fusecache.daemon.checkup import check_disk, risk_texts, shortage_text
from fusecache.daemon.connect import (
    StartConnection,
    connect,
    endpoint_of,
    identity_of,
    proven_conditions,
    record_conditions,
)
from fusecache.daemon.control_server import ControlServer, Endings
from fusecache.daemon.control_socket import ControlSocket
from fusecache.daemon.http_server import http_served
from fusecache.daemon.keeping import BucketAnswers, DaemonStart, prepare_successor
from fusecache.daemon.log import begin_log
from fusecache.daemon.peer_list import NO_PEERS, PeerList, check_entries, open_peers
from fusecache.disk.native import forbid_core_dumps
from fusecache.disk.staging import raise_limit
from fusecache.disk.state_directory import StateDirectory, recorded_identity
from fusecache.engine.cache.buffer_pool import LentBuffers
from fusecache.engine.durability.sync import STALLED
from fusecache.engine.file_system import FileSystem
from fusecache.engine.namespace.tree import Ownership
from fusecache.engine.runtime.offload import Offload
from fusecache.engine.runtime.supervisor import Supervisor, unwrap_single_error
from fusecache.fs.control import ControlDirectory
from fusecache.fs.hint_files import HintFiles, OwnedHints
from fusecache.fs.kept_files import KeptFiles
from fusecache.fs.kernel import KernelCaches, tune
from fusecache.fs.operations import Operations
from fusecache.fuse.library import FuseSession, open_session
from fusecache.fuse.movers import MoverPlan
from fusecache.fuse.values import MountPlan, MountRefused
from fusecache.keeper import STATUS_HAND_OVER
from fusecache.model.errors import FusecacheError, MountError, NoSpace, NotPermitted, ReadOnly
from fusecache.model.format_text import at_mount, printable
from fusecache.model.verdict import verdict_line
from fusecache.mount.launch import check_mountpoint
from fusecache.mount.progress import found_text
from fusecache.mount.sd_notify import notify
from fusecache.movers.carrier import Carrier
from fusecache.page.history import RateHistory
from fusecache.remote.endpoints import Endpoint, Transport

log = logging.getLogger(__name__)

# Threads for GETs: more than may be in flight (`CacheOptions.connections`). The buffer pool bounds them too.
NETWORK_THREADS = 96
# Maximum uploads of bodies in flight.
UPLOAD_THREADS = 16
# Threads for publishing requests that send few bytes, so that they never queue behind large uploads.
PUBLISH_THREADS = 64
# With Python's default of 5 ms, a thread that copies a body blocks the event loop, and so every reader, that long.
SWITCH_INTERVAL_SECONDS = 0.0005
# Files of the daemon are its user's alone. Modes of files in the mount come from each caller's umask, not from this.
PRIVATE_UMASK = 0o077
_SAME_SIGNAL_SECONDS = 1.0
# A start waits no longer for the names of other nodes.
PEERS_SECONDS = 3.0
STATUS_SECONDS = 5.0  # interval of the status line for systemd


def run(start: DaemonStart, ready: Callable[[str], None]) -> int:
    """Mount, serve until unmounted or signalled, drain; return the exit status.

    ready: called once the mount answers, with a message for the user who mounts ("": none).
    Raises FusecacheError if the daemon cannot start.
    """
    os.umask(PRIVATE_UMASK)
    forbid_core_dumps()
    monitoring = start.options.monitoring
    begin_log(monitoring.log_level.upper(), monitoring.log_format)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    log.info("open files limit=%d", raise_limit())
    try:
        return _run(start, ready)
    except FusecacheError as exc:
        notify(STATUS=f"failed: {exc}")
        raise


def _run(start: DaemonStart, ready: Callable[[str], None]) -> int:
    options, kept = start.options, start.kept
    if kept is None or not kept.is_resumed:
        check_mountpoint(options.mountpoint, allow_other=options.allow_other)
    check_disk(options)
    check_entries(options.requests.peers)
    endpoint = endpoint_of(options)
    threads = NETWORK_THREADS + UPLOAD_THREADS + PUBLISH_THREADS
    identity = identity_of(options, endpoint)
    # The directory got its identity when a mount with it first reached the bucket: endpoint and names are right.
    was_used = recorded_identity(options.cache_dir) == identity
    carrier = Carrier()
    connection = connect(
        options,
        endpoint,
        transport=Transport(max_connections=threads, carry=carrier.fetch if movers_of(options) else None),
        was_used=was_used,
        is_one_of_several=start.is_one_of_several,
        is_beside_others=start.is_beside_others,
        known=BucketAnswers(kept).known,
        proven=proven_conditions(options.cache_dir, identity),
    )
    # Not of a bucket that never answered: its source may still be corrected.
    is_reached = was_used or connection.failure is None or connection.write_refusal is not None
    with (
        closing(connection.remote),
        StateDirectory(
            options.cache_dir, identity if is_reached else "", mountpoint=options.mountpoint
        ) as directory,
        unwrap_single_error(),
    ):
        daemon = _Daemon(start, connection, endpoint, ready, partial(directory.add, identity), carrier)

        def record() -> None:
            record_conditions(directory, identity, connection.remote.conditional_writes)

        record()
        try:
            return trio.run(daemon.run)
        finally:
            record()  # the bucket may have answered since
    raise AssertionError("unreachable: the daemon returns or raises")


class _Daemon:
    def __init__(
        self,
        start: DaemonStart,
        connection: StartConnection,
        endpoint: Endpoint,
        ready: Callable[[str], None],
        reach: Callable[[], None],
        carrier: Carrier,
    ) -> None:
        """reach: records that the bucket answered."""
        self._carrier = carrier
        self._kept = start.kept
        self._keeper = os.getppid()
        self._kept_files = KeptFiles(start.kept)
        self._options = start.options
        self._is_beside_others = start.is_beside_others
        self._connection = connection
        self._access = command_access(start.options, endpoint)
        self._peers = open_peers(start.options, carrier.fetch)
        self._peer_list = None if self._peers is None else PeerList(self._peers, start.options, os.environ)
        self._reach = reach
        self._risks = risk_texts(start.options, endpoint)
        self._link: BucketLink | None = None
        self._ready = ready
        self._stop = trio.Event()
        self._session: FuseSession | None = None
        self._kernel_caches = KernelCaches(self._kept_files)
        self._is_announced = False
        self._abandoned = False
        self._is_stalled = False
        self._signals = 0
        self._signal = trio.Event()
        self._facts: dict[str, Any] = {"config_not_applied": start.not_applied}
        self._supervisor = Supervisor()
        self._history = RateHistory()
        self._has_failed = False
        self._upgrading = trio.Lock()

    async def run(self) -> int:
        """Assemble the mount, serve it until its end, and return the exit status."""
        options = self._options
        offload = Offload(
            self._supervisor,
            network_threads=NETWORK_THREADS,
            upload_threads=UPLOAD_THREADS,
            publish_threads=PUBLISH_THREADS,
        )
        ownership = _ownership(options, self._kept_files.owner(options.mountpoint))
        filesystem = FileSystem(
            self._connection.remote,
            offload,
            engine_options(
                options,
                ownership,
                self._kept_files.predecessor,
                self._connection.remote.health,
                self._carrier.store,
                self._peers,
            ),
            self._supervisor,
            self._kernel_caches,
        )
        self._kept_files.settle(filesystem.journal, filesystem.tree.began_ns)
        self._facts |= initial_facts(options)
        answers = BucketAnswers(self._kept)
        link = self._link = BucketLink(
            options,
            self._connection,
            filesystem,
            self._reach,
            answers,
            is_beside_others=self._is_beside_others,
        )
        server, operations = self._endpoints(filesystem, ownership)
        if self._peer_list is not None:
            with trio.move_on_after(PEERS_SECONDS):
                await self._peer_list.look()
        async with filesystem.running():
            self._refuse_keys(filesystem)
            await link.start()
            try:
                is_resumed = self._kept is not None and self._kept.is_resumed
                with http_served(options.monitoring, server.status, self._history, is_resumed=is_resumed):
                    async with trio.open_nursery() as nursery:
                        await self._start(nursery, filesystem, server, operations)
                        link.run_in(nursery, self._supervisor)
                        await self._stop.wait()
                        await self._shut_down(filesystem, offload)
                        nursery.cancel_scope.cancel()
            finally:
                # Only after all handlers have ended: a handler that replies through a closed session would crash.
                self._unmount()
            return self._report_pending(filesystem)

    # ---- the phases of a run

    def _refuse_keys(self, filesystem: FileSystem) -> None:
        """Raise the refusal if the bucket refuses the keys, unless files wait for upload or a service asks."""
        is_wanted = self._options.requests.start_without == "keys" or self._is_beside_others
        if self._connection.are_keys_refused and not is_wanted and not len(filesystem.queue):
            raise MountError(str(self._connection.failure))

    def _status_facts(self) -> dict[str, Any]:
        assert self._link is not None
        remote = self._connection.remote
        return {
            **self._facts,
            **self._link.facts(),
            "failed_tasks": self._supervisor.statistics(),
            "options": {**self._facts["options"], "keep_mounted": self._outlives},
            "endpoints": remote.endpoints(),
            "peers": (self._peers or NO_PEERS).statistics(),
            "request_times": remote.times.as_dict(),
        }

    def _endpoints(self, filesystem: FileSystem, ownership: Ownership) -> tuple[ControlServer, Operations]:
        """Return the two ways into the file system: the control socket and the FUSE operations."""
        options = self._options
        control_socket = ControlSocket(_socket_name(options.cache_dir), shared=options.allow_other)
        owners = frozenset({0, os.geteuid(), ownership.uid})
        hints = OwnedHints(filesystem.hints, owners)
        server = ControlServer(
            filesystem,
            control_socket,
            hints,
            self._status_facts,
            lambda request, user: operations.handed_files.open(request, user),
            owners=owners,
            access=self._access,
            endings=Endings(self._abandon, self._resume, self._hand_over),
        )
        start = self._kept_files.start
        hint_files = HintFiles(hints, ownership.uid, ownership.gid, start)
        control = ControlDirectory(
            lambda: control_socket.path, server.status, hint_files, ownership.uid, ownership.gid, start
        )
        record = self._supervisor.record
        operations = Operations(filesystem, control, record, self._kept_files, read_only=options.read_only)
        return server, operations

    async def _start(
        self,
        nursery: trio.Nursery,
        filesystem: FileSystem,
        server: ControlServer,
        operations: Operations,
    ) -> None:
        """Mount, start the tasks, and report that the mount is ready."""
        supervisor = self._supervisor
        await nursery.start(supervisor.run_service, "signals", self._watch_signals, name="signals")
        await nursery.start(supervisor.run_service, "control", server.run, name="control")
        session = self._mount(operations, filesystem.cache.lent_buffers)
        filesystem.kernel_pages.attach(str(self._options.mountpoint))
        operations.adopt()
        nursery.start_soon(self._serve, session, name="fuse")
        nursery.start_soon(operations.passthrough.hold_adopted, name="passthrough")
        await self._announce(filesystem)
        if self._peer_list is not None:
            nursery.start_soon(supervisor.run, "peers", self._peer_list.run, name="peers")
        nursery.start_soon(supervisor.run, "status", partial(self._report, filesystem, server), name="status")

    async def _shut_down(self, filesystem: FileSystem, offload: Offload) -> None:
        """Answer waiting calls, drain the queue, and abandon the requests that no caller needs any more."""
        filesystem.end_waiting()
        await self._drain(filesystem)
        offload.abandon_reads()
        if self._must_stop_now():
            # Like a kill: the next mount finds out which of the requests in flight took effect.
            offload.abandon_writes()

    def _mount(self, operations: Operations, memory: LentBuffers) -> FuseSession:
        options = self._options
        movers = movers_of(options) if memory.fd >= 0 else 0
        if movers:
            self._carrier.attach(memory.offset_of)
        # Users name the bucket: as the mount table's device it must not forge a line.
        name = printable(options.source)
        plan = MountPlan(str(options.mountpoint), name, "fusecache", allow_other=options.allow_other)
        try:
            self._session = open_session(
                operations,
                plan,
                options.session.fuse_library,
                self._kept,
                MoverPlan(movers, memory, self._carrier),
            )
        except MountRefused as exc:
            raise MountError(
                f"{options.mountpoint}: mounting failed: {exc}; the log is {options.cache_dir}/fusecache.log"
            ) from exc
        self._facts["options"] |= {
            "fuse_library": self._session.library,
            "movers": movers if self._session.library == "own" else 0,
        }
        self._kernel_caches.attach(self._session)
        operations.passthrough.attach(self._session)
        operations.handed_files.attach(str(options.mountpoint))
        return self._session

    def _unmount(self) -> None:
        if self._session is not None:
            self._session.close()

    async def _serve(self, session: FuseSession) -> None:
        """Serve the kernel's requests until the mount is gone, then request the shutdown."""
        try:
            await session.serve(request_memory())
        except* Exception as group:  # noqa: BLE001  # recorded, and ends the mount in good order
            # The session cannot start again: requests in handlers would never be answered. Pending files are uploaded.
            self._supervisor.record("fuse", group)
            self._has_failed = True
        self._stop.set()

    async def _announce(self, filesystem: FileSystem) -> None:
        """Report that the mount is ready."""
        mountpoint = str(self._options.mountpoint)
        if self._kept is None or not self._kept.is_resumed:
            await self._tune(mountpoint)
        pending = filesystem.status.pending()
        log.info("mounted source=%s at=%s pending_files=%d", self._options.source, mountpoint, pending.files)
        self._is_announced = notify(READY=1, STATUS=f"mounted at {mountpoint}", MAINPID=self._main_process())
        short = shortage_text(self._options, filesystem.cache.usable_bytes())
        assert self._link is not None
        degraded = at_mount(self._link.text(), mountpoint)
        warnings = [
            text for text in (degraded, short, *self._risks, self._facts["config_not_applied"]) if text
        ]
        for text in warnings:
            log.warning("%s", text)
        recovered = filesystem.replayed
        found = found_text(
            self._options.mountpoint,
            changes=len(recovered.versions) + len(recovered.operations),
            orphans=recovered.orphans,
            suspects=recovered.suspects,
        )
        # Who has files here knows the prefix.
        question = "" if found else self._link.question()
        self._ready("; ".join(filter(None, (found, *warnings, question))))

    async def _tune(self, mountpoint: str) -> None:
        """Check that a new mount answers, and set what the kernel keeps for as long as the mount is there."""
        await trio.to_thread.run_sync(os.stat, mountpoint)
        settings = await trio.to_thread.run_sync(tune, mountpoint, request_memory())
        self._facts["kernel"] = {"applied": list(settings.applied), "refused": list(settings.refused)}
        log.info("kernel applied=%s", ",".join(settings.applied) or "nothing")
        if settings.refused:
            log.warning(
                "kernel settings refused; large and concurrent reads are slower settings=%s; to set them: %s",
                ", ".join(settings.refused),
                settings.remedy,
            )

    async def _report(self, filesystem: FileSystem, server: ControlServer) -> None:
        while True:
            await trio.sleep(STATUS_SECONDS)
            if not self._is_announced:
                self._is_announced = notify(READY=1, MAINPID=self._main_process())
            status = server.status()
            self._history.record(status)
            reasons = at_mount(verdict_line(status), self._options.mountpoint)
            verdict = f"{reasons}; " if status["reasons"] else ""
            notify(STATUS=verdict + filesystem.status.line(filesystem.status.pending()))

    def _main_process(self) -> int:
        """Return the process that a service manager watches: the keeper, if there is one."""
        return os.getpid() if self._kept is None else self._keeper

    @property
    def _outlives(self) -> bool:
        """Whether a keeper would start a successor."""
        is_own = self._session is not None and self._session.library == "own"
        return self._kept is not None and is_own and os.getppid() == self._keeper

    async def _hand_over(self, user: int, program: str) -> Callable[[], None]:
        """Return what ends this process, once a successor with the Python at `program` waits."""
        if user not in {0, os.geteuid()}:
            raise NotPermitted("only root and the user who mounted may replace the daemon")
        if self._kept is None or not self._outlives:
            raise MountError(
                f"{self._options.mountpoint}: no keeper holds this mount: to upgrade, unmount and mount again"
            )
        mountpoint = str(self._options.mountpoint)
        # One at a time; who waits here hears from the successor. It is never released if there is one.
        await self._upgrading.acquire()
        try:
            await trio.to_thread.run_sync(
                prepare_successor, self._kept, program, mountpoint, abandon_on_cancel=True
            )
            if self._stop.is_set():
                raise MountError(f"{self._options.mountpoint}: the mount ends")
        except BaseException:
            self._upgrading.release()
            raise
        log.info("the daemon ends, for its successor program=%s", program)
        return partial(os._exit, STATUS_HAND_OVER)

    def _abandon(self) -> None:
        """Make the shutdown leave pending uploads to the next mount."""
        self._abandoned = True

    def _resume(self) -> None:
        """Undo `_abandon`: the unmount failed and the mount stays."""
        self._abandoned = False

    def _must_stop_now(self) -> bool:
        return self._abandoned or self._is_stalled or self._signals > 1

    async def _drain(self, filesystem: FileSystem) -> None:
        """Publish pending changes and report progress; a second signal leaves the rest to the next mount."""
        if not len(filesystem.queue) or self._abandoned:
            return
        notify(STOPPING=1, STATUS="uploading pending files")

        async def report() -> None:
            while True:
                pending = filesystem.status.pending()
                failure = filesystem.publisher.failure
                reason = f" waiting_for={failure}" if failure is not None else ""
                log.info("draining files=%d bytes=%d%s", pending.files, pending.bytes, reason)
                notify(STATUS=f"draining: {filesystem.status.line(pending)}")
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._supervisor.run, "drain-report", report, name="drain-report")
            watch = partial(self._watch_second_signal, nursery.cancel_scope)
            nursery.start_soon(self._supervisor.run, "second-signal", watch, name="second-signal")
            try:
                # Until the queue is empty, because programs can still close files: the mount answers until the end.
                ended = await filesystem.drain(until_empty=True)
            except (NoSpace, ReadOnly) as exc:
                log.error("pending changes are left to the next mount error=%s", exc)
            else:
                if ended.result == STALLED:
                    self._is_stalled = True
                    log.warning("the drain ends: %s", ended.message)
                    notify(STATUS=ended.message)
            nursery.cancel_scope.cancel()

    def _report_pending(self, filesystem: FileSystem) -> int:
        """Return the exit status: 0 if the bucket has everything or the drain was abandoned, else 1.

        Also 1 after a failure of the FUSE session, so that a service manager starts the daemon again.
        """
        left = filesystem.status.pending()
        if not left.files:
            return int(self._has_failed)
        log.warning(
            "stopped with pending uploads files=%d bytes=%d cache_dir=%s; the next mount resumes them",
            left.files, left.bytes, self._options.cache_dir,
        )  # fmt: skip
        return 0 if self._abandoned else 1

    async def _watch_signals(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            last = float("-inf")
            async for number in signals:
                # A signal to the whole group reaches the keeper as well, which passes it on.
                if self._kept is not None and trio.current_time() < last + _SAME_SIGNAL_SECONDS:
                    continue
                last = trio.current_time()
                log.info("stopping signal=%s", signal.Signals(number).name)
                self._signals += 1
                self._stop.set()
                self._signal.set()

    async def _watch_second_signal(self, scope: trio.CancelScope) -> None:
        while self._signals < 2:
            self._signal = trio.Event()
            await self._signal.wait()
        scope.cancel()


def _ownership(options: MountOptions, owner: tuple[int, int]) -> Ownership:
    """Return who owns the files: the options, else the owner of the mountpoint, a user and a group."""
    is_fixed = (options.uid, options.gid) != (None, None)
    return Ownership(
        owner[0] if options.uid is None else options.uid,
        owner[1] if options.gid is None else options.gid,
        options.umask,
        # Like tar: only root can give files to other users and still access them.
        is_told=options.posix_metadata and os.geteuid() == 0 and not is_fixed,
        is_fixed=is_fixed,
    )


def _socket_name(cache_dir: Path) -> str:
    """Return a short name for the control socket, as one cache directory has one daemon."""
    return blake2b(str(cache_dir.resolve()).encode(), digest_size=8).hexdigest()
