"""Connects a mount to its bucket: creates the stores and checks the credentials before anything is mounted.

Not here: the choice of the endpoint (`remote.endpoints`), and the reload of keys while the daemon runs (`credentials`).
"""

import base64
import binascii
import configparser
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from fusecache.config.option_groups import EndpointOptions
from fusecache.config.options import MountOptions
from fusecache.disk.state_directory import StateDirectory, recorded_conditions
from fusecache.model.errors import (
    AccessDenied,
    ConfigError,
    CredentialsMissing,
    LocalDiskError,
    MountError,
    RemoteError,
    Unavailable,
    Untrusted,
)
from fusecache.mount.sd_notify import notify
from fusecache.remote.endpoint_group import EndpointGroup, EndpointReader, within
from fusecache.remote.endpoints import (
    AZURE_ACCOUNT_VARIABLES,
    CUSTOMER_KEY_BYTES,
    URL_VARIABLES,
    Credentials,
    Endpoint,
    RequestSettings,
    StoreKind,
    Transport,
    UploadPace,
    choose_endpoint,
    read_key_file,
)
from fusecache.remote.read_write_split import ReadWriteSplit
from fusecache.remote.s3.store import S3Store
from fusecache.remote.store import ConditionalWrites, ReadStore

log = logging.getLogger(__name__)
# What a store does with the conditions of writes, if a later mount need not test it again.
_PROVEN = frozenset({ConditionalWrites.KEPT.value, ConditionalWrites.NOT_OF_PARTS.value})
T = TypeVar("T")

# A mount that can start without the bucket waits this long for its first answer.
START_SECONDS = 10.0
# Pause of `start_without = "nothing"` between two attempts.
RETRY_SECONDS = 2.0
KEY_ERRORS = (AccessDenied, CredentialsMissing)


@dataclass(frozen=True, slots=True)
class StartConnection:
    """The stores of a mount, and how the bucket answered at the start.

    failure: why the mount starts without the bucket; None if it answered. write_refusal: the keys may read, not write.
    is_empty: the mount's prefix has no object.
    """

    remote: ReadWriteSplit
    failure: RemoteError | None = None
    write_refusal: RemoteError | None = None
    is_empty: bool = False

    @property
    def are_keys_refused(self) -> bool:
        """Whether the bucket refused the keys also for reading, or none were found."""
        return self.write_refusal is None and isinstance(self.failure, KEY_ERRORS)


def connect(
    options: MountOptions,
    endpoint: Endpoint,
    *,
    transport: Transport,
    was_used: bool,
    is_one_of_several: bool = False,
    is_beside_others: bool = False,
    known: ConditionalWrites | None = None,
    proven: ConditionalWrites | None = None,
) -> StartConnection:
    """Create the stores, and check with one LIST and one write probe that the credentials suffice for the mount.

    was_used: an earlier mount with this cache directory has reached the bucket, so that this one can start without it.
    is_one_of_several: the command mounts others, which wait for START_SECONDS at most. is_beside_others: some of them
    are mounted, so this one starts whatever its bucket answers.
    known: what the bucket told to an earlier daemon of the same mount. Then no check is made, because programs wait;
    what the bucket refuses now shows at the first request.
    proven: what an earlier mount with this cache directory found the store to do with the conditions of writes.
    Raises MountError or RemoteError if the mount must not start, ConfigError.
    """
    remote = open_stores(options, endpoint, transport)
    if known is not None:
        remote.take_conditions(known)
        return StartConnection(remote)
    try:
        connection = _first_answers(options, remote, is_optional=was_used or is_one_of_several)
    except RemoteError as exc:
        if is_beside_others:
            return StartConnection(remote, failure=exc)
        if not isinstance(exc, (Unavailable, *KEY_ERRORS)):
            raise
        if was_used and options.requests.start_without != "nothing" and not isinstance(exc, Untrusted):
            return StartConnection(remote, failure=exc)
        if isinstance(exc, Unavailable):
            raise MountError(
                f"{options.source}: cannot reach the bucket: {exc}; check the endpoint {endpoint.url or 'AWS'} "
                f"({_endpoint_source(endpoint.kind)}) and the network, proxy and firewall"
            ) from exc
        raise
    if connection.failure is not None or options.read_only:
        return connection
    if proven is not None and remote.conditional_writes is ConditionalWrites.KEPT:
        remote.take_conditions(proven)
    else:
        check_conditions(options, remote)
    return connection


def proven_conditions(cache_dir: Path, identity: str) -> ConditionalWrites | None:
    """Return what earlier runs with a cache directory found the store to do; None if it must be tested."""
    recorded = recorded_conditions(cache_dir).get(identity)
    return ConditionalWrites(recorded) if recorded in _PROVEN else None


def record_conditions(directory: StateDirectory, identity: str, found: ConditionalWrites) -> None:
    """Spare the next run the test of the store, unless it may end better then."""
    if found is not ConditionalWrites.UNKNOWN:
        with suppress(LocalDiskError):  # a full disk
            directory.record_conditions(identity, found.value if found.value in _PROVEN else "")


def open_stores(options: MountOptions, endpoint: Endpoint, transport: Transport) -> ReadWriteSplit:
    """Create the stores of a mount. Makes no request. Raises ConfigError."""
    transport = replace(transport, upload_pace=UploadPace(options.requests.upload_rate))
    if endpoint.kind is StoreKind.S3:
        endpoints = options.requests.endpoints or (options.own_endpoint(endpoint.url),)
        return open_remote(options, endpoints, transport)
    from fusecache.remote.clouds.opening import (
        open_cloud_store,
    )  # S3's daemons need neither Google's nor Azure's

    store = open_cloud_store(
        options.bucket, endpoint, os.environ, transport=transport, is_unsigned=options.requests.unsigned
    )
    return ReadWriteSplit(store, None if options.read_only else store, prefix=options.prefix)


def endpoint_of(options: MountOptions) -> Endpoint:
    """Return the endpoint of a mount. Raises ConfigError."""
    return choose_endpoint(
        os.environ,
        source=options.source,
        endpoint_url=options.endpoint_url,
        region=options.region,
    )


def identity_of(options: MountOptions, endpoint: Endpoint) -> str:
    """Return a bucket in one line, as the cache directory of a mount, or a folder, records it."""
    return f"{endpoint.url or 'AWS'} {options.kind.value}://{options.bucket}/{options.prefix}"


def open_remote(
    options: MountOptions, endpoints: Sequence[EndpointOptions], transport: Transport
) -> ReadWriteSplit:
    """Create the stores of a data set: a reader of all its endpoints, and a writer to the first. Makes no request.

    Raises ConfigError.
    """
    settings = request_settings(options)
    primary = endpoints[0]

    def open_store(each: EndpointOptions, profile: str | None, keys: Credentials | None = None) -> S3Store:
        return S3Store(
            each.bucket,
            choose_endpoint({}, endpoint_url=each.url or None, region=each.region),
            credentials=keys,
            profile=profile,
            credentials_file=each.credentials_file,
            transport=transport,
            settings=settings,
        )

    stores = [open_store(each, each.profile, each.read_keys) for each in endpoints]
    reader: ReadStore | EndpointGroup = stores[0]
    if len(endpoints) > 1:
        reader = EndpointGroup(
            [
                EndpointReader(
                    each.place,
                    store,
                    weight=each.weight,
                    prefix=primary.prefix or "",
                    prefix_there=each.prefix or "",
                )
                for each, store in zip(endpoints, stores, strict=True)
            ]
        )
    writer = None if options.read_only else stores[0]
    if writer is not None and (options.write_profile or primary.write_keys):
        keys = None if options.write_profile else primary.write_keys
        writer = open_store(primary, options.write_profile, keys)
    return ReadWriteSplit(reader, writer, prefix=options.prefix)


def _endpoint_source(kind: StoreKind) -> str:
    """Return where the endpoint of a mount is set."""
    if kind is StoreKind.S3:
        return f"--endpoint-url, else {', '.join(URL_VARIABLES)} or R2_ACCOUNT_ID"
    return "--endpoint-url" + (f", else {AZURE_ACCOUNT_VARIABLES[0]}" if kind is StoreKind.AZURE else "")


def _first_answers(options: MountOptions, remote: ReadWriteSplit, *, is_optional: bool) -> StartConnection:
    """Probe the bucket; return what it answered. Raises RemoteError.

    is_optional: the mount starts without the bucket if it is silent for START_SECONDS.
    """
    if options.requests.start_without == "nothing":
        return _patiently(options, partial(_probe, options, remote))
    return within(START_SECONDS, partial(_probe, options, remote)) if is_optional else _probe(options, remote)


def _probe(options: MountOptions, remote: ReadWriteSplit) -> StartConnection:
    try:
        page = remote.list_page(options.prefix, limit=1)
    except Unavailable:
        if len(options.requests.endpoints) < 2:
            raise
        # After two failures of the primary in a row, another endpoint answers.
        page = remote.list_page(options.prefix, limit=1)
    refusal: RemoteError | None = None
    if not options.read_only:
        try:
            remote.probe_write(options.prefix)
        except AccessDenied as exc:
            refusal = exc
    return StartConnection(remote, refusal, refusal, is_empty=not page.objects and page.next_token is None)


def _patiently(options: MountOptions, call: Callable[[], T]) -> T:
    """Repeat a call until the bucket has answered. Raises what it answered, and Untrusted."""
    is_told = False
    while True:
        try:
            return call()
        except Untrusted:
            raise
        except Unavailable as exc:
            if not is_told:
                log.warning("waiting for the bucket source=%s error=%s", options.source, exc)
                notify(STATUS=f"waiting for the bucket: {exc}")
                is_told = True
            time.sleep(RETRY_SECONDS)


def refuse_without_writes(options: MountOptions, refusal: RemoteError) -> NoReturn:
    """Raise MountError: the keys may not write, and nothing waits for upload."""
    raise MountError(
        f"{options.source}: the credentials allow reads but not writes ({refusal}); "
        f"mount with --read-only, or use credentials that allow writes"
    ) from refusal


def check_conditions(options: MountOptions, remote: ReadWriteSplit) -> None:
    """Find out whether the store honours preconditions of writes. Raises MountError if the mount relies on them."""
    found = remote.probe_conditions(options.prefix)
    if found not in (ConditionalWrites.REFUSED, ConditionalWrites.IGNORED):
        return
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
    remote.send_no_conditions()


def request_settings(options: MountOptions) -> RequestSettings:
    """Return what every request to the bucket carries by option. Raises ConfigError for options that contradict."""
    if options.requests.unsigned and not options.read_only:
        raise ConfigError(
            "unsigned = true: a mount without keys cannot write; add read_only = true (--read-only)"
        )
    sse, kms_key_id, customer_key = options.requests.sse or "", "", b""
    if sse.startswith("customer:"):
        customer_key, sse = _customer_key(Path(sse.removeprefix("customer:")).expanduser()), ""
    elif sse.startswith("aws:kms:"):
        kms_key_id, sse = sse.removeprefix("aws:kms:"), "aws:kms"
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
    data, _ = read_key_file("sse", path)
    if len(data) == CUSTOMER_KEY_BYTES:
        return data
    with suppress(binascii.Error):
        decoded = base64.b64decode(data.strip(), validate=True)
        if len(decoded) == CUSTOMER_KEY_BYTES:
            return decoded
    raise ConfigError(
        f"sse = customer:{path}: it does not hold a key of {CUSTOMER_KEY_BYTES} bytes, as they are or in base64; make "
        f"one with `openssl rand {CUSTOMER_KEY_BYTES}`"
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
