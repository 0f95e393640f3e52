"""From a request's head to the end of its answer: who asks, for what, which fault meets it."""

import contextlib
import gzip
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate

from tests.s3server import reads, writes
from tests.s3server.accounts import WRITES, Account
from tests.s3server.bodies import OpenBody
from tests.s3server.errors import ConnectionEnded, S3Error
from tests.s3server.faults import Fault, FaultAction
from tests.s3server.manners import bad_manners
from tests.s3server.metadata import SETTINGS
from tests.s3server.request_log import LogEntry
from tests.s3server.s3xml import error_document
from tests.s3server.signature import check_signature
from tests.s3server.state import Exchange, State
from tests.s3server.target import Target, arrived_key, find_target
from tests.s3server.wire import Answer, Body, BytesBody, Connection, Request

log = logging.getLogger(__name__)

OPERATIONS: dict[str, Callable[[Exchange], Answer]] = {
    "ListBuckets": reads.list_buckets,
    "HeadBucket": reads.head_bucket,
    "CreateBucket": writes.create_bucket,
    "ListObjectsV2": reads.list_objects,
    "HeadObject": reads.get_object,
    "GetObject": reads.get_object,
    "PutObject": writes.put_object,
    "CopyObject": writes.copy_object,
    "DeleteObject": writes.delete_object,
    "DeleteObjects": writes.delete_objects,
    "CreateMultipartUpload": writes.create_upload,
    "UploadPart": writes.upload_part,
    "UploadPartCopy": writes.upload_part_copy,
    "CompleteMultipartUpload": writes.complete_upload,
    "AbortMultipartUpload": writes.abort_upload,
    "ListMultipartUploads": reads.list_uploads,
    "ListParts": reads.list_parts,
}
LOGGED_HEADERS = frozenset(
    [
        "range",
        "authorization",
        "if-match",
        "if-none-match",
        "if-modified-since",
        "content-length",
        "content-md5",
        "content-type",
        "content-encoding",
        "accept-encoding",
        "expect",
        "transfer-encoding",
        "x-amz-content-sha256",
        "x-amz-trailer",
        "x-amz-copy-source",
        "x-amz-copy-source-if-match",
        "x-amz-copy-source-range",
        "x-amz-metadata-directive",
        *SETTINGS,
        "x-amz-request-payer",
        "cf-copy-destination-if-match",
        "cf-copy-destination-if-none-match",
    ]
)
ANONYMOUS = frozenset({"ListObjectsV2", "HeadObject", "GetObject"})
# A refused body up to this size is received for nobody, and the connection goes on; a greater one ends it.
DISCARD_BYTES = 64 << 20
# What a request did stays done, but its answer is lost.
_AFTER = (FaultAction.ANSWER_AFTER, FaultAction.DROP_AFTER, FaultAction.SILENT_AFTER)
LINGER_SECONDS = 2.0  # for a client still sending a refused body to find the answer


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a request needs of the server around it.

    checkpoint: raises ConnectionEnded during an outage. wait(seconds): sleeps; raises it at the stop. clock: what
    signatures are checked against, and what answers are dated with.
    """

    base_url: str
    checkpoint: Callable[[], None]
    wait: Callable[[float], None]
    latency: Callable[[], float]
    clock: Callable[[], float]


def serve_connection(connection: Connection, state: State, around: Surroundings) -> float:
    """Answer requests until client or fault ends the connection; return how long to linger at its close."""
    try:
        while (request := connection.read_request()) is not None:
            if not _serve_request(request, connection, state, around):
                return LINGER_SECONDS
    except ConnectionEnded as exc:
        log.debug("connection ended number=%d reason=%s", connection.number, exc)
    return 0.0


def _serve_request(request: Request, connection: Connection, state: State, around: Surroundings) -> bool:
    """Answer one request and log it; return whether the connection can go on."""
    target, problem = _target(request, state)
    entry = _log_entry(request, connection, state, target)
    part = request.query.get("partNumber", "")
    met = state.script.choose(request.method, target.operation, target.key, part)
    fault = None if met is None else met[0]
    entry.fault = "" if fault is None else fault.action.value
    state.log.add(entry)
    for words in bad_manners(request, target.operation):
        state.log.note_offence(f"{target.operation} {target.key}: {words}")
    try:
        around.wait(around.latency())
        if met is not None:
            _act_before(*met, around)
        try:
            if problem is not None:
                raise problem
            answer = _perform(request, connection, state, around, target, entry, fault)
        except S3Error as exc:
            answer = _error_answer(exc, request, entry)
        goes_on = _end_body(request, connection)
        _send(answer, request, connection, entry, around, fault=fault, goes_on=goes_on)
        return goes_on
    finally:
        if entry.status is None:
            entry.status = 0
        entry.bytes_in, entry.bytes_out = connection.bytes_in, connection.bytes_out
        state.log.finish(entry)


def _target(request: Request, state: State) -> tuple[Target, S3Error | None]:
    """Return what is asked for, its key as the bucket stores it, and what is wrong with it."""
    try:
        target = find_target(request)
    except S3Error as exc:
        return Target("Unknown", "", ""), exc
    try:
        return Target(target.operation, target.bucket, arrived_key(target.key, state.rules)), None
    except S3Error as exc:
        return target, exc


def _log_entry(request: Request, connection: Connection, state: State, target: Target) -> LogEntry:
    return LogEntry(
        number=state.log.next_number(),
        time=time.time(),
        operation=target.operation,
        method=request.method,
        bucket=target.bucket,
        key=target.key,
        query=request.query,
        headers={
            name: value
            for name, value in request.headers.items()
            if name in LOGGED_HEADERS or name.startswith("x-amz-meta-")
        },
        connection=connection.number,
        took_effect=False if target.operation in WRITES else None,
    )


def _act_before(fault: Fault, released: threading.Event, around: Surroundings) -> None:
    """Do what a fault does before the effect, except answers."""
    match fault.action:
        case FaultAction.DROP_BEFORE:
            raise ConnectionEnded("dropped by script")
        case FaultAction.DELAY:
            around.wait(fault.seconds)
        case FaultAction.HOLD:
            while not released.wait(0.05):
                around.wait(0)  # ends the request when the server stops
                around.checkpoint()


def _perform(
    request: Request,
    connection: Connection,
    state: State,
    around: Surroundings,
    target: Target,
    entry: LogEntry,
    fault: Fault | None,
) -> Answer:
    """Return the operation's answer. Raises S3Error, also for scripted error answers."""
    action = None if fault is None else fault.action
    if fault is not None and action is FaultAction.ANSWER:
        named = (
            ((("x-amz-bucket-region", fault.region),), (("Region", fault.region),))
            if fault.region
            else ((), ())
        )
        raise S3Error(fault.code, "scripted", status=fault.status, headers=named[0], details=named[1])
    account = _authorise(request, state, target, around.clock())
    entry.access_key = account.access_key
    if action in (FaultAction.IGNORE_RANGE, FaultAction.DECOMPRESS):
        request.headers.pop("range", None)
    exchange = Exchange(
        state,
        request,
        connection,
        entry,
        account,
        target.key,
        around.base_url,
        bucket_name=target.bucket,
        fault=fault,
    )
    try:
        answer = OPERATIONS[target.operation](exchange)
    except (S3Error, ConnectionEnded):
        raise
    except Exception as exc:
        log.exception("bug in operation=%s key=%r", target.operation, target.key)
        raise S3Error("InternalError", repr(exc)) from exc
    if action is FaultAction.DECOMPRESS:
        return _decompressed(answer)
    if fault is not None and action in _AFTER:
        if answer.body is not None:
            answer.body.close()
        if action is FaultAction.SILENT_AFTER:
            connection.stand_still(fault.seconds)
        if action is not FaultAction.ANSWER_AFTER:
            raise ConnectionEnded("dropped by script")
        raise S3Error(fault.code, "scripted", status=fault.status)
    return answer


def _decompressed(answer: Answer) -> Answer:
    """Return an answer as a proxy on the way makes it of one with Content-Encoding gzip: its bytes unpacked."""
    headers = dict(answer.headers)
    if not isinstance(answer.body, OpenBody) or headers.pop("Content-Encoding", "") != "gzip":
        return answer
    with contextlib.closing(answer.body) as body:
        data = gzip.decompress(b"".join(body.chunks(0, answer.length)))
    return Answer(answer.status, list(headers.items()), length=len(data), body=BytesBody(data))


def _authorise(request: Request, state: State, target: Target, now: float) -> Account:
    """Return the account that may do this. Raises S3Error."""
    if (
        "aws-chunked" in (request.header("content-encoding") or "")
        or request.header("x-amz-trailer") is not None
    ):
        raise S3Error("Unauthorized", "Unauthorized")
    if (request.header("x-amz-content-sha256") or "").startswith("STREAMING-"):
        raise S3Error("Unauthorized", "Unauthorized")
    if state.rules.requester_pays and request.header("x-amz-request-payer") != "requester":
        raise S3Error("AccessDenied", "Access Denied")
    if state.rules.anonymous_reads and request.header("authorization") is None:
        if target.operation not in ANONYMOUS:
            raise S3Error("AccessDenied", "Access Denied")
        return Account("", "", writable=False, bucket_calls=False)
    account = check_signature(
        request,
        state.accounts,
        now=now,
        max_skew_seconds=state.rules.max_clock_skew_seconds,
    )
    if target.operation not in OPERATIONS:
        raise S3Error("NotImplemented", "This operation is not implemented.")
    key = target.key or request.query.get("prefix", "")
    if not account.allows(target.operation, target.bucket, key):
        raise S3Error("AccessDenied", "Access Denied")
    return account


def _error_answer(error: S3Error, request: Request, entry: LogEntry) -> Answer:
    entry.code = error.code
    if error.status == 304:
        return Answer(304, list(error.headers))
    body = error_document(error.code, error.message, request.path, _request_id(entry), error.details)
    headers = [("Content-Type", "application/xml"), *error.headers]
    return Answer(error.status, headers, length=len(body), body=BytesBody(body))


def _end_body(request: Request, connection: Connection) -> bool:
    """Receive what nobody wanted of the body; return whether the connection can go on behind it."""
    if request.chunked or connection.body_left > DISCARD_BYTES:
        return False
    connection.discard_body()
    return (request.header("connection") or "").lower() != "close"


def _send_head(head: Answer, extra: list[tuple[str, str]], connection: Connection, entry: LogEntry) -> None:
    """Send a head; the log has the status before the client can have read it, and 0 if it never can."""
    entry.status = head.status
    try:
        connection.send_head(head, extra)
    except BaseException:
        entry.status = 0
        raise


def _send(
    answer: Answer,
    request: Request,
    connection: Connection,
    entry: LogEntry,
    around: Surroundings,
    *,
    fault: Fault | None,
    goes_on: bool,
) -> None:
    """Send an answer, distorted by the fault."""
    body: Body = BytesBody(b"") if answer.body is None else answer.body
    try:
        extra_bytes, first_bytes, stall_seconds = 0, answer.length, 0.0
        if fault is not None:
            _distort_headers(answer, fault)
            first_bytes = answer.length
            match fault.action:
                case FaultAction.LONG_BODY:
                    extra_bytes = fault.extra_bytes
                case FaultAction.SHORT_BODY:
                    first_bytes = min(answer.length, fault.after_bytes)
                case FaultAction.STALL:
                    first_bytes, stall_seconds = min(answer.length, fault.after_bytes), fault.seconds
        head = Answer(answer.status, answer.headers, length=answer.length + extra_bytes)
        extra = [
            ("x-amz-request-id", _request_id(entry)),
            ("Date", formatdate(around.clock(), usegmt=True)),
            ("Server", "s3server"),
        ]
        if not goes_on:
            extra.append(("Connection", "close"))
        if request.method == "HEAD" or not answer.length:
            connection.stand_still(stall_seconds)
            _send_head(head, extra, connection, entry)
            return
        _send_head(head, extra, connection, entry)
        body.send(connection, answer.start, first_bytes)
        if fault is not None and fault.action is FaultAction.SHORT_BODY:
            raise ConnectionEnded("body cut by script")
        connection.stand_still(stall_seconds)
        body.send(connection, answer.start + first_bytes, answer.length - first_bytes)
        connection.send_bytes(memoryview(bytes(extra_bytes)))
    finally:
        body.close()


def _distort_headers(answer: Answer, fault: Fault) -> None:
    headers = dict(answer.headers)
    if fault.action is FaultAction.WRONG_ETAG and "ETag" in headers:
        headers["ETag"] = f'"{fault.etag}"'
    if fault.action is FaultAction.WRONG_RANGE and "Content-Range" in headers:
        size = int(headers["Content-Range"].rpartition("/")[2])
        answer.start += 1
        answer.length = min(answer.length, size - answer.start)
        headers["Content-Range"] = f"bytes {answer.start}-{answer.start + answer.length - 1}/{size}"
    answer.headers = list(headers.items())


def _request_id(entry: LogEntry) -> str:
    return f"{entry.number:016X}"
