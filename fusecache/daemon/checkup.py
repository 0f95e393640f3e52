"""The checks of `fusecache doctor`: the node, the cache's disk and the bucket, as a mount with these options needs it.

They write one temporary file next to the cache, and leave nothing in the bucket.

Checks whether the disk of a cache directory has space for the cache size that the options ask for.

Warnings about a mount that works, but risks data: an unencrypted endpoint, a cache in memory or on a network.
"""

import http.client
import ipaddress
import os
import platform
import re
import resource
import shutil
import socket
import ssl
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote, urlsplit

from fusecache.config.node_limits import memory_bytes
from fusecache.config.options import SMALLEST_CACHE_BYTES, MountOptions
from fusecache.daemon.connect import endpoint_of, keys_from, open_stores
from fusecache.daemon.peer_list import nodes_of, open_peers
from fusecache.engine.cache.block_cache import FREE_SPACE_FLOOR_BYTES
from fusecache.engine.runtime.procfs import available_memory
from fusecache.model.errors import AccessDenied, FusecacheError, MountError, RemoteError
from fusecache.model.format_text import empty_text, seconds_text, size_text
from fusecache.model.objects import MIB, Extent, ObjectInfo
from fusecache.mount.launch import MountState, check_fuse, check_mountpoint, mount_state
from fusecache.mount.mount_table import TABLE, mounted_types
from fusecache.remote.endpoints import Endpoint, StoreKind, Transport
from fusecache.remote.http.peers import TEST_OBJECTS, cause_of
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.store import PROBE_NAME


def check_disk(options: MountOptions) -> None:
    """Raise MountError if the disk of the cache directory is too small for any write. A read-only mount passes."""
    total_bytes = _disk_of(options.cache_dir).total
    if not options.read_only and total_bytes < FREE_SPACE_FLOOR_BYTES + SMALLEST_CACHE_BYTES:
        raise MountError(
            f"the disk of {options.cache_dir} is too small for writes: it has {size_text(total_bytes)}, and "
            f"{size_text(FREE_SPACE_FLOOR_BYTES)} must stay free for the journal; choose another with --cache-dir"
        )


def shortage_text(options: MountOptions, usable_bytes: int) -> str:
    """Return a warning if the disk has less space than the cache may use, else ""."""
    if usable_bytes >= options.cache_size:
        return ""
    disk = _disk_of(options.cache_dir)
    return (
        f"the cache may use {size_text(options.cache_size)}, but the disk of {options.cache_dir} has "
        f"{size_text(disk.total)}, {size_text(disk.free)} of it free: the cache will use {size_text(usable_bytes)} "
        f"({size_text(FREE_SPACE_FLOOR_BYTES)} must stay free); see --cache-size and --cache-dir"
    )


def nearest_directory(path: Path) -> Path:
    """Return a directory, or its nearest existing parent if it does not exist yet."""
    while not path.exists():
        path = path.parent
    return path


def _disk_of(path: Path) -> Any:
    """Return the disk usage of the disk that a directory is on, or will be."""
    return shutil.disk_usage(nearest_directory(path))


_MEMORY_TYPES = frozenset({"tmpfs", "ramfs"})
_NETWORK_TYPES = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph"})


def risk_texts(options: MountOptions, endpoint: Endpoint) -> list[str]:
    """Return one text for each risk of a mount."""
    urls = dict.fromkeys((endpoint.url, *(each.url for each in options.requests.endpoints)))
    return [
        *(text for url in urls for text in _endpoint_texts(url)),
        *_cache_texts(options),
        *_promise_texts(options),
    ]


def _promise_texts(options: MountOptions) -> list[str]:
    """Return what the store cannot promise."""
    if options.kind is not StoreKind.GCS or options.read_only:
        return []
    return [
        "Google Cloud Storage takes no precondition for a file over 64 MiB, which is uploaded in parts: if another "
        "client replaces it in the same moment, one of the two versions is lost"
    ]


def _endpoint_texts(url: str | None) -> list[str]:
    parts = urlsplit(url or "")
    if parts.scheme != "http" or not parts.hostname or not is_public(parts.hostname):
        return []
    return [
        f"the endpoint {url} is not encrypted: everyone on the network path can read and change the data; "
        "use https:// if the store has it"
    ]


def is_public(host: str) -> bool:
    """Return whether a host name has an address on the public Internet."""
    try:
        found = {facts[4][0] for facts in socket.getaddrinfo(host, None)}
    except OSError:
        return False  # the connection will say what is wrong
    return any(ipaddress.ip_address(str(address).partition("%")[0]).is_global for address in found)


def _cache_texts(options: MountOptions) -> list[str]:
    kind = file_system_of(options.cache_dir)
    if kind in _MEMORY_TYPES and not options.read_only:
        return [
            f"the cache directory {options.cache_dir} is in memory ({kind}): a reboot loses files that wait for "
            "upload; choose a disk with --cache-dir"
        ]
    if kind in _NETWORK_TYPES:
        return [
            f"the cache directory {options.cache_dir} is on a network file system ({kind}), which is slow and may "
            "lose locks and synced writes; choose a local disk with --cache-dir"
        ]
    return []


def file_system_of(path: Path, mount_table: Path = TABLE) -> str:
    """Return the type of the file system that a path is on, by the mount table; the path need not exist."""
    types = mounted_types(mount_table.read_bytes())
    resolved = Path(os.path.realpath(path))
    return next((types[str(each)] for each in (resolved, *resolved.parents) if str(each) in types), "")


OK, WARNING, ACTION = "ok", "warning", "action"
# Debian 12's, the oldest that the tests run on.
OLDEST_KERNEL = (6, 1)
# Fewer leave too little for jobs with many open files.
FEW_OPEN_FILES = 4096
# S3 refuses signatures that are 15 minutes off.
SKEW_WARNING_SECONDS, SKEW_ACTION_SECONDS = 60.0, 900.0
DISK_BYTES, SYNCS = 64 * MIB, 10
# Below, the cache is slower than most buckets, and each close waits this long for its journal row.
SLOW_DISK_BYTES_PER_SECOND, SLOW_SYNC_SECONDS = 150e6, 0.02
READ_BYTES = 8 * MIB
UPDATEDB = Path("/etc/updatedb.conf")
ROUND_TRIPS = 5
SLOW_ROUND_TRIP_SECONDS = 0.5
_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line: how it is (OK, WARNING, ACTION), what was looked at, and what was found, with what to do."""

    level: str
    subject: str
    text: str


def node_findings(*, allow_other: bool = False) -> Iterator[CheckResult]:
    """Check the node."""
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdecimal())
    is_old = numbers < OLDEST_KERNEL
    remedy = f": older than any that was tested; use {'.'.join(map(str, OLDEST_KERNEL))} or newer"
    yield CheckResult(WARNING if is_old else OK, "kernel", f"{platform.system()} {release}{remedy * is_old}")
    yield _checked("fuse", "/dev/fuse can be used", lambda: check_fuse(allow_other=allow_other))
    yield _fusermount()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = "no limit" if hard == resource.RLIM_INFINITY else str(hard)
    few = hard != resource.RLIM_INFINITY and hard < FEW_OPEN_FILES
    remedy = f": jobs with many open files may fail; raise it to {FEW_OPEN_FILES} or more (ulimit -Hn, LimitNOFILE=)"
    yield CheckResult(WARNING if few else OK, "open files", f"{shown} (now {soft}){remedy * few}")
    with suppress(OSError, UnicodeDecodeError):
        is_pruned = re.search(
            r'^\s*PRUNEFS\s*=.*[\s"]fuse\.fusecache[\s"]', UPDATEDB.read_text(), re.MULTILINE
        )
        remedy = "does not leave mounts out: each night, one LIST for each directory; add fuse.fusecache to its PRUNEFS"
        yield CheckResult(
            OK if is_pruned else WARNING,
            "updatedb",
            f"{UPDATEDB} {'leaves mounts out' if is_pruned else remedy}",
        )


def _fusermount() -> CheckResult:
    path = shutil.which("fusermount3")
    if path is None:
        return CheckResult(ACTION, "fusermount3", "not found: install it, as root: apt-get install fuse3")
    if os.geteuid() != 0 and not os.stat(path).st_mode & stat.S_ISUID:
        return CheckResult(
            ACTION, "fusermount3", f"{path} is not setuid root: chmod u+s {path}, or mount as root"
        )
    return CheckResult(OK, "fusermount3", path)


def mountpoint_finding(options: MountOptions) -> CheckResult:
    """Check the mountpoint."""
    mountpoint = options.mountpoint
    if mount_state(mountpoint) is MountState.LIVE:
        return CheckResult(OK, "mountpoint", f"{mountpoint}: mounted; see `fusecache status {mountpoint}`")
    return _checked(
        "mountpoint",
        f"{mountpoint} is an empty directory",
        lambda: check_mountpoint(mountpoint, allow_other=options.allow_other),
    )


def cache_findings(options: MountOptions) -> Iterator[CheckResult]:
    """Check the cache's disk, and the sizes beside what the node has."""
    place = nearest_directory(options.cache_dir)
    free = shutil.disk_usage(place).free
    kind = file_system_of(place) or "unknown"
    yield _checked(
        "cache disk",
        f"{options.cache_dir}: {size_text(free)} free ({kind})",
        lambda: check_disk(options),
    )
    usable = free - FREE_SPACE_FLOOR_BYTES
    if usable < options.cache_size:  # what the cache holds already is not free, and yet its own
        usable += _held_bytes(options.cache_dir)
    short = shortage_text(options, usable)
    yield CheckResult(
        WARNING if short else OK,
        "cache size",
        short or f"{size_text(options.cache_size)}; --cache-size sets it",
    )
    memory = min(available_memory(), memory_bytes())
    is_tight = 2 * options.memory > memory
    yield CheckResult(
        WARNING if is_tight else OK,
        "memory",
        f"{size_text(options.memory)} for buffers, {size_text(memory)} free"
        + ": choose a smaller --memory" * is_tight,
    )
    try:
        yield _disk_speed(place, free)
    except OSError as exc:
        yield CheckResult(ACTION, "disk speed", f"{place}: {exc.strerror}; choose another --cache-dir")


def _held_bytes(directory: Path) -> int:
    """Return the bytes of a directory on its disk."""
    held = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            with suppress(OSError):
                held += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return held


def _disk_speed(place: Path, free: int) -> CheckResult:
    if free < 2 * DISK_BYTES:
        return CheckResult(WARNING, "disk speed", f"not measured: {size_text(free)} free")
    block = os.urandom(MIB)
    with tempfile.TemporaryFile(dir=place) as file:
        began = time.perf_counter()
        for _ in range(DISK_BYTES // MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = DISK_BYTES / (time.perf_counter() - began)
        times = []
        for _ in range(SYNCS):
            began = time.perf_counter()
            os.pwrite(file.fileno(), block[:4096], 0)
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    is_slow = rate < SLOW_DISK_BYTES_PER_SECOND or median(times) > SLOW_SYNC_SECONDS
    return CheckResult(
        WARNING if is_slow else OK,
        "disk speed",
        f"writes {size_text(rate)}/s, a sync takes {seconds_text(median(times))}"
        + ": slow for a cache; choose a local NVMe disk with --cache-dir" * is_slow,
    )


def bucket_findings(options: MountOptions) -> Iterator[CheckResult]:
    """Check endpoint, clock, keys and network, each with a few small requests."""
    endpoint = endpoint_of(options)
    url = endpoint.url or f"https://s3.{endpoint.region or 'us-east-1'}.amazonaws.com"
    for text in risk_texts(options, endpoint):
        yield CheckResult(WARNING, "risk", text)
    yield _clock(url, f"/{options.bucket}/{quote(options.prefix)}{PROBE_NAME}")
    try:
        with closing(open_stores(options, endpoint, Transport(2))) as remote:
            yield from _answers(options, endpoint, url, remote)
    except FusecacheError as exc:
        yield CheckResult(ACTION, "keys", str(exc))


def peer_findings(options: MountOptions) -> Iterator[CheckResult]:
    """Ask each node that `peers` names."""
    entries = options.requests.peers
    try:
        peers = open_peers(options)
        nodes = tuple(sorted(set(nodes_of(entries, os.environ))))
    except (FusecacheError, OSError, ValueError) as exc:
        yield CheckResult(ACTION, "peers", f"{','.join(entries)}: {exc}")
        return
    if peers is None:
        return
    with closing(peers):
        peers.set_nodes(nodes, "")
        for node in nodes:
            try:
                answer = peers.test(node, options.prefix)
            except RemoteError as exc:
                yield CheckResult(WARNING, f"peer {node}", f"{cause_of(exc)}{_peer_remedy(exc)}")
                continue
            rate = f"; no rate: its first {TEST_OBJECTS} names are of no object with bytes"
            if answer.nbytes:
                speed = size_text(answer.nbytes / max(answer.seconds, 1e-6))
                rate = f"; sends {size_text(answer.nbytes)} of {answer.key} at {speed}/s"
            yield CheckResult(OK, f"peer {node}", f"lists in {seconds_text(answer.list_seconds)}{rate}")


def _peer_remedy(error: RemoteError) -> str:
    """Return what helps against what a node answered, if the answer does not say it itself."""
    if not error.status:
        return "; run `fusecache serve` there, and see that no firewall is between; or name the node's right port"
    if error.status in (403, 503):
        return ""  # its own words
    return "; does another program listen there? name the port of `fusecache serve`"


def _clock(url: str, path: str) -> CheckResult:
    """Compare the clock with the header Date, in whole seconds, of the answer to a request without keys."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        trusted = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or None)
        connection = http.client.HTTPSConnection(host, parts.port, timeout=_TIMEOUT_SECONDS, context=trusted)
    else:
        connection = http.client.HTTPConnection(host, parts.port, timeout=_TIMEOUT_SECONDS)
    with closing(connection):
        try:
            connection.request("HEAD", path)
            date = connection.getresponse().headers["Date"]
            ahead = time.time() - parsedate_to_datetime(date).timestamp()
        except (OSError, http.client.HTTPException) as exc:
            return CheckResult(
                WARNING, "clock", f"not compared, as {url} cannot be reached without a proxy: {exc}"
            )
        except (TypeError, ValueError):
            return CheckResult(WARNING, "clock", f"{url} sends no date to compare with")
    text = f"{seconds_text(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} {host}"
    if abs(ahead) < SKEW_WARNING_SECONDS:
        return CheckResult(OK, "clock", f"within {seconds_text(max(1.0, abs(ahead)))} of {host}")
    is_refused = abs(ahead) >= SKEW_ACTION_SECONDS
    remedy = "the bucket refuses every request; " if is_refused else ""
    return CheckResult(
        ACTION if is_refused else WARNING,
        "clock",
        f"{text}: {remedy}set it, with chrony or timedatectl set-ntp true",
    )


def _answers(
    options: MountOptions, endpoint: Endpoint, url: str, remote: ReadWriteSplit
) -> Iterator[CheckResult]:
    """Ask as a mount asks when it starts; then measure."""
    try:
        found = remote.list_page(options.prefix, limit=1000).objects
        trips = []
        for _ in range(ROUND_TRIPS):
            began = time.perf_counter()
            remote.list_page(options.prefix, limit=1)
            trips.append(time.perf_counter() - began)
    except RemoteError as exc:
        is_refused = isinstance(exc, AccessDenied)
        remedy = "" if is_refused else "; check the URL, the network, proxy and firewall"
        yield CheckResult(ACTION, "keys" if is_refused else "endpoint", f"{url}: {exc}{remedy}")
        return
    yield CheckResult(OK, "endpoint", f"{url}{' (R2)' * endpoint.is_r2} answers for {options.source}")
    question = empty_text(options.source, is_empty=not found)
    if question:
        yield CheckResult(WARNING, "prefix", question)
    yield _keys(options, remote)
    is_far = median(trips) > SLOW_ROUND_TRIP_SECONDS
    yield CheckResult(
        WARNING if is_far else OK,
        "round trip",
        f"{seconds_text(median(trips))} for a LIST"
        + ": use a bucket in a nearer region, or larger files" * is_far,
    )
    yield _bandwidth(max(found, key=lambda each: each.size, default=None), remote)


def _keys(options: MountOptions, remote: ReadWriteSplit) -> CheckResult:
    source = "public bucket" if options.requests.unsigned else ""
    if options.kind is StoreKind.S3 and not source:
        source = keys_from(options.profile, os.environ, credentials_file=options.credentials_file)
    source = f" ({source})" * bool(source)
    if options.read_only:
        return CheckResult(OK, "keys", f"may list{source}")
    try:
        remote.probe_write(options.prefix)
    except RemoteError as exc:
        return CheckResult(
            ACTION, "keys", f"may list, not write: {exc}; use --read-only, or keys that may write"
        )
    return CheckResult(
        OK, "keys", f"may list and write{source}; all rights: fusecache access {options.source}"
    )


def _bandwidth(largest: ObjectInfo | None, remote: ReadWriteSplit) -> CheckResult:
    """Read up to READ_BYTES of the largest object of the first page, over one connection."""
    if largest is None or not largest.size:
        return CheckResult(OK, "bandwidth", "not measured: the first 1 000 keys have no object with content")
    extent = Extent(0, min(READ_BYTES, largest.size))
    began = time.perf_counter()
    try:
        remote.get_into(largest.object_id, extent, memoryview(bytearray(extent.stop)), lambda _: None)
    except RemoteError as exc:
        return CheckResult(ACTION, "bandwidth", f"{largest.object_id.key}: {exc}")
    rate = extent.stop / (time.perf_counter() - began)
    small = "; too small to say much" * (extent.stop < READ_BYTES)
    text = f"{size_text(rate)}/s over one connection, reading {size_text(extent.stop)}{small}"
    return CheckResult(OK, "bandwidth", text)


def _checked(subject: str, good: str, check: Callable[[], None]) -> CheckResult:
    """Return what a check that raises a FusecacheError with a remedy found."""
    try:
        check()
    except FusecacheError as exc:
        return CheckResult(ACTION, subject, str(exc))
    return CheckResult(OK, subject, good)
