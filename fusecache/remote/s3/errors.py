"""Conversion of botocore's errors to `fusecache.model.errors`."""

from collections.abc import Iterator
from contextlib import contextmanager

import botocore.exceptions
import botocore.parsers
import urllib3.exceptions

from fusecache.model.errors import (
    CredentialsMissing,
    FusecacheError,
    Refused,
    RemoteError,
    Unavailable,
    Untrusted,
)
from fusecache.remote.protocol.responses import error_of_response, retry_after_seconds
from fusecache.remote.statistics import RequestCounter

CREDENTIALS_HELP = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or name a profile of ~/.aws/credentials"


class RequestNames:
    """Names and counts the requests to a bucket."""

    def __init__(self, bucket: str, counter: RequestCounter) -> None:
        self._bucket = bucket
        self._counter = counter

    @contextmanager
    def named(self, verb: str, key: str, field: str) -> Iterator[str]:
        """Count a request, yield its name, and convert its errors to the model's."""
        self._counter.add(field)
        what = f"{verb} s3://{self._bucket}/{key}"
        try:
            yield what
        except botocore.exceptions.ClientError as exc:
            self._counter.add("errors")
            error, facts = exc.response.get("Error", {}), exc.response.get("ResponseMetadata", {})
            raise error_of_response(
                what,
                code=error.get("Code", ""),
                status=facts.get("HTTPStatusCode", 0),
                message=error.get("Message", ""),
                retry_after_seconds=retry_after_seconds(facts.get("HTTPHeaders", {}).get("retry-after")),
                storage_class=str(error.get("StorageClass") or exc.response.get("StorageClass") or ""),
            ) from exc
        except (
            botocore.exceptions.BotoCoreError,
            botocore.parsers.ResponseParserError,
            urllib3.exceptions.HTTPError,
        ) as exc:
            self._counter.add("errors")
            raise transport_error(what, exc) from exc
        except RemoteError:
            self._counter.add("errors")
            raise


def transport_error(what: str, exc: Exception) -> FusecacheError:
    """Return the model's error for a failure outside the bucket's responses."""
    if isinstance(exc, botocore.exceptions.HTTPClientError):
        inner = exc.kwargs.get("error")
        if isinstance(inner, FusecacheError):  # `SliceBody` could not read the file
            return inner
    if isinstance(exc, botocore.exceptions.SSLError):
        kind = Untrusted if "CERTIFICATE_VERIFY_FAILED" in str(exc) else Unavailable
        return kind(f"{what}: {exc}; for a private certificate set AWS_CA_BUNDLE to its CA file")
    missing = (
        botocore.exceptions.NoCredentialsError,
        botocore.exceptions.PartialCredentialsError,
        botocore.exceptions.CredentialRetrievalError,
        botocore.exceptions.TokenRetrievalError,
        botocore.exceptions.SSOError,
    )
    if isinstance(exc, missing):
        return CredentialsMissing(f"{what}: {exc}; {CREDENTIALS_HELP}")
    if isinstance(exc, botocore.exceptions.ParamValidationError):
        return Refused(f"{what}: {exc}")
    return Unavailable(f"{what}: {exc}")
