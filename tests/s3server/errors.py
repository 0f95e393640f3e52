"""What the server can answer instead of success."""

STATUS = {
    "AccessDenied": 403,
    "BadDigest": 400,
    "BucketAlreadyOwnedByYou": 409,
    "EntityTooLarge": 400,
    "EntityTooSmall": 400,
    "IncompleteBody": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidDigest": 400,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "InvalidObjectState": 403,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidURI": 400,
    "KeyTooLongError": 400,
    "MalformedXML": 400,
    "MetadataTooLarge": 400,
    "MethodNotAllowed": 405,
    "MissingContentLength": 411,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NotImplemented": 501,
    "NotModified": 304,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "ServiceUnavailable": 503,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "TooManyRequests": 429,
    "Unauthorized": 401,
    "XAmzContentSHA256Mismatch": 400,
}


class S3Error(Exception):
    """An answer that is an error: its code, HTTP status and message; `headers` go with it, `details` into its XML."""

    def __init__(
        self,
        code: str,
        message: str = "",
        *,
        status: int | None = None,
        headers: tuple[tuple[str, str], ...] = (),
        details: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message or code
        self.status = STATUS.get(code, 500) if status is None else status
        self.headers = headers
        self.details = details


class ConnectionEnded(Exception):
    """The client went away, or we drop it; nothing more can be said on this connection."""
