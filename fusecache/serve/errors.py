"""Errors as S3 answers them."""

from typing import Self
from xml.sax.saxutils import escape

_CODES = {
    400: "InvalidArgument",
    403: "AccessDenied",
    404: "NoSuchKey",
    412: "PreconditionFailed",
    416: "InvalidRange",
    501: "NotImplemented",
}
USE_THE_MOUNT = "this endpoint only reads: use the mount for everything else"


class S3Error(Exception):
    """A request that is not carried out. status: of HTTP; code: S3's word for it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @classmethod
    def of_status(cls, status: int, message: str) -> Self:
        """Return the error with S3's usual code for a status."""
        return cls(status, _CODES.get(status, "ServiceUnavailable"), message)

    def body(self) -> bytes:
        """Return the document that S3 sends."""
        text = f"<Error><Code>{self.code}</Code><Message>{escape(str(self))}</Message></Error>"
        return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()


def unavailable(message: str) -> S3Error:
    """Return an error after which clients try again."""
    return S3Error(503, "ServiceUnavailable", message)


def too_much(message: str) -> S3Error:
    """Return an error after which clients try again, and ask less often."""
    return S3Error(503, "SlowDown", message)


def not_implemented(what: str) -> S3Error:
    """Return the error for what this endpoint does not do."""
    return S3Error.of_status(501, f"{what}: {USE_THE_MOUNT}")
