"""The shared key signature of Azure, compared with Microsoft's own library."""

import base64
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusecache.remote.clouds.opening import sign_by_shared_key

authentication = pytest.importorskip("azure.storage.blob._shared.authentication")
KEY = bytes(range(64))
NAMES = st.text("abcz019_", min_size=1, max_size=8)
VALUES = st.text("abc%-/ ", max_size=8).map(str.strip)


def library_signature(method: str, path: str, query: str, headers: dict[str, str]) -> str:
    """What azure-storage-blob sends. It has no `Range` header, and calls its own header `byte_range`."""
    request = SimpleNamespace(
        method=method,
        url=f"https://account.blob.core.windows.net{path}",
        query=dict(parse_qsl(query, keep_blank_values=True)),
        headers={"byte_range" if name == "range" else name: value for name, value in headers.items()},
    )
    policy: Any = authentication.SharedKeyCredentialPolicy("account", base64.b64encode(KEY).decode())
    policy.on_request(SimpleNamespace(http_request=request, context=SimpleNamespace(transport=None)))
    return str(request.headers["Authorization"])


@given(
    method=st.sampled_from(["GET", "PUT", "HEAD", "DELETE"]),
    metadata=st.dictionaries(NAMES.map("x-ms-meta-{}".format), VALUES),
    length=st.sampled_from([None, 0, 5, 100]),
    others=st.dictionaries(
        st.sampled_from(
            ["range", "if-match", "if-none-match", "content-md5", "x-ms-date", "x-ms-copy-source"]
        ),
        VALUES,
    ),
    query=st.sampled_from(
        ["", "comp=block&blockid=AA%2B%3D", "restype=container&comp=list&prefix=a%20b&marker="]
    ),
)
def test_the_signature_is_the_librarys(
    method: str, metadata: dict[str, str], length: int | None, others: dict[str, str], query: str
) -> None:
    headers = {
        "host": "h",
        **metadata,
        **others,
        **({} if length is None else {"content-length": str(length)}),
    }
    path = "/container/a%20b/%C3%A4"
    sent_query, signed = sign_by_shared_key("account", KEY)(method, path, query, headers, "")
    assert sent_query == query
    assert signed["authorization"] == library_signature(method, path, query, headers)
