"""Connects a mount to its bucket: creates the stores and checks the credentials before anything is mounted.

Not here: the choice of the endpoint (`remote.endpoints`), and the reload of credentials while the daemon runs (`main`).
"""

import base64
import binascii
import configparser
import logging
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fusecache.config.options import MountOptions
from fusecache.model.errors import AccessDenied, ConfigError, MountError, Unavailable
from fusecache.remote.endpoints import URL_VARIABLES, Endpoint, Transport
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.request_settings import CUSTOMER_KEY_BYTES, RequestSettings
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import ConditionalWrites

log = logging.getLogger(__name__)


def connect(options: MountOptions, endpoint: Endpoint, *, max_connections: int) -> ReadWriteSplit:
    """Create the stores, and check with one LIST and one write probe that the credentials suffice for the mount."""
    transport = Transport(max_connections=max_connections)

    settings = request_settings(options)

    def open_store(profile: str | None) -> S3Store:
        return S3Store(
            options.bucket,
            endpoint,
            profile=profile,
            credentials_file=options.credentials_file,
            transport=transport,
            settings=settings,
        )

    reader = open_store(options.profile)
    try:
        reader.list_page(options.prefix, limit=1)
    except Unavailable as exc:
        raise MountError(
            f"{options.source}: cannot reach the bucket: {exc}; check the endpoint {endpoint.url or 'AWS'} "
            f"(--endpoint-url, else {', '.join(URL_VARIABLES)} or R2_ACCOUNT_ID) "
            "and the network, proxy and firewall"
        ) from exc
    if options.read_only:
        return ReadWriteSplit([reader], None)
    writer = reader
    if options.write_profile is not None:
        writer = open_store(options.write_profile)
    try:
        writer.probe_write(options.prefix)
    except AccessDenied as exc:
        raise MountError(
            f"{options.source}: the credentials allow reads but not writes ({exc}); "
            f"mount with --read-only, or use credentials that allow writes"
        ) from exc
    remote = ReadWriteSplit([reader], writer, prefix=options.prefix)
    remote.conditional_writes = _check_conditions(options, writer)
    return remote


def _check_conditions(options: MountOptions, writer: S3Store) -> ConditionalWrites:
    """Find out whether the store honours preconditions of writes. Raises MountError if the mount relies on them."""
    found = writer.probe_conditions(options.prefix)
    if found not in (ConditionalWrites.REFUSED, ConditionalWrites.IGNORED):
        return found
    verb = "refuses" if found is ConditionalWrites.REFUSED else "ignores"
    if options.writeback.conflict != "last-wins":
        raise MountError(
            f"{options.source}: the store {verb} If-Match, so a write could replace another client's version "
            "unnoticed; accept that with --conflict last-wins, or mount with --read-only"
        )
    log.warning(
        "the store %s If-Match: writes may replace another client's version unnoticed conflict=last-wins",
        verb,
    )
    writer.send_no_conditions()
    return found


def request_settings(options: MountOptions) -> RequestSettings:
    """Return what every request to the bucket carries by option. Raises ConfigError for options that contradict."""
    if options.requests.unsigned and not options.read_only:
        raise ConfigError(
            "unsigned = true: a mount without keys cannot write; add read_only = true (--read-only)"
        )
    if options.requests.sse_key is not None and options.requests.sse not in ("aws:kms", "customer"):
        raise ConfigError(
            "sse_key: only sse = aws:kms and sse = customer take a key; choose one of them, or remove it"
        )
    if options.requests.sse != "customer":
        sse, kms_key_id, customer_key = options.requests.sse or "", options.requests.sse_key or "", b""
    elif options.requests.sse_key is None:
        raise ConfigError("sse = customer: name the file with your key as sse_key")
    else:
        sse, kms_key_id, customer_key = "", "", _customer_key(Path(options.requests.sse_key).expanduser())
    return RequestSettings(
        sse=sse,
        kms_key_id=kms_key_id,
        customer_key=customer_key,
        storage_class=options.requests.storage_class or "",
        requester_pays=options.requests.requester_pays,
        is_unsigned=options.requests.unsigned,
    )


def _customer_key(path: Path) -> bytes:
    """Read a key of SSE-C: 32 bytes, as they are or in base64. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            is_open = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
            data = file.read(1024)
    except OSError as exc:
        raise ConfigError(f"sse_key = {path}: {exc.strerror}") from exc
    if is_open:
        raise ConfigError(f"sse_key = {path}: other users may access this key; run `chmod 600 {path}`")
    if len(data) == CUSTOMER_KEY_BYTES:
        return data
    with suppress(binascii.Error):
        decoded = base64.b64decode(data.strip(), validate=True)
        if len(decoded) == CUSTOMER_KEY_BYTES:
            return decoded
    raise ConfigError(
        f"sse_key = {path}: it does not hold a key of {CUSTOMER_KEY_BYTES} bytes, as they are or in base64; make one "
        f"with `openssl rand {CUSTOMER_KEY_BYTES}`"
    )


def keys_from(
    profile: str | None, environ: Mapping[str, str], *, credentials_file: Path | None = None
) -> str:
    """Return the source of the credentials: `environment`, the path of a file, or "" for another link of the chain."""
    if credentials_file is not None:
        return str(credentials_file)
    if profile is None and "AWS_ACCESS_KEY_ID" in environ:
        return "environment"
    path = os.path.expanduser(environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"))
    profiles = configparser.RawConfigParser()
    profiles.read(path)
    section = profile or environ.get("AWS_PROFILE", "default")
    return path if profiles.has_option(section, "aws_access_key_id") else ""
