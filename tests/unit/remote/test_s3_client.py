"""What the client does with answers before botocore parses them."""

from types import SimpleNamespace
from typing import Any

import pytest
from botocore import handlers

from fusecache.remote.endpoints import Credentials, Endpoint, Transport
from fusecache.remote.s3.client import PAGE, open_access
from tests.unit.remote.test_list_response import answer, contents

ERROR = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"


def answered(operation: str, body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what is left of an answer of status 200, and what was taken out of it."""
    access = open_access(
        Endpoint("http://127.0.0.1:9", "auto"),
        Transport(),
        credentials=Credentials("key", "secret"),
        profile=None,
        count_read=lambda _: None,
    )
    left: dict[str, Any] = {"status_code": 200, "headers": {}, "body": body}
    taken: dict[str, Any] = {}
    model = access.client.meta.service_model.operation_model(operation)
    access.client.meta.events.emit(
        f"before-parse.s3.{operation}",
        operation_model=model,
        response_dict=left,
        customized_response_dict=taken,
    )
    return left, taken


def test_a_listing_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsers: list[object] = []
    monkeypatch.setattr(handlers, "ETree", SimpleNamespace(XMLParser=parsers.append))
    left, taken = answered("ListObjectsV2", answer(contents("a")))
    assert [each.key for each in taken[PAGE].objects] == ["a"]
    assert left == {"status_code": 200, "headers": {}, "body": b""}
    assert not parsers


@pytest.mark.parametrize("operation", ["ListObjectsV2", "CompleteMultipartUpload", "CopyObject"])
def test_an_error_behind_a_status_of_200_is_an_error(operation: str) -> None:
    left, taken = answered(operation, ERROR)
    assert left["status_code"] == 500
    assert PAGE not in taken
