"""The answer to a LIST: keys as they are in the bucket, and nothing taken for a listing that is none."""

import pytest

from fusecache.model.objects import ObjectInfo
from fusecache.remote.protocol.responses import parse_listing

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


def answer(
    *inner: str, namespace: str = NAMESPACE, truncated: str = "<IsTruncated>false</IsTruncated>"
) -> bytes:
    """Return an answer's body."""
    space = f' xmlns="{namespace}"' if namespace else ""
    body = f"<ListBucketResult{space}>{truncated}{''.join(inner)}</ListBucketResult>"
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()


def contents(key: str) -> str:
    """Return an object's element."""
    return (
        f"<Contents><Key>{key}</Key><LastModified>2026-01-02T03:04:05.250Z</LastModified>"
        "<ETag>&quot;abc&quot;</ETag><Size>5497558138880</Size><StorageClass>STANDARD</StorageClass></Contents>"
    )


@pytest.mark.parametrize("namespace", [NAMESPACE, ""])
def test_objects_and_prefixes_are_read(namespace: str) -> None:
    page = parse_listing(
        answer(
            contents("a&amp;b"), "<CommonPrefixes><Prefix>d/</Prefix></CommonPrefixes>", namespace=namespace
        )
    )
    assert page.objects == (ObjectInfo("a&b", "abc", 5 << 40, 1767323045.25),)
    assert page.prefixes == ("d/",)
    assert page.next_token is None


@pytest.mark.parametrize(
    ("encoded", "key"),
    [
        ("a%20b+c%2Bd", "a b c+d"),
        ("%E6%97%A5%00%0A", "日\0\n"),
        ("100%25", "100%"),
        ("..%2F..%2Fx", "../../x"),
        ("a//b/", "a//b/"),
    ],
)
def test_encoded_keys_are_decoded(encoded: str, key: str) -> None:
    page = parse_listing(
        answer(
            "<EncodingType>url</EncodingType>",
            contents(encoded),
            f"<CommonPrefixes><Prefix>{encoded}</Prefix></CommonPrefixes>",
        )
    )
    assert page.objects[0].key == page.prefixes[0] == key


def test_keys_that_were_not_encoded_stay_as_they_are() -> None:
    assert parse_listing(answer(contents("50%25+x"))).objects[0].key == "50%25+x"


def test_a_page_that_is_not_the_last_names_the_next() -> None:
    truncated = "<IsTruncated>true</IsTruncated><NextContinuationToken>t+1</NextContinuationToken>"
    assert parse_listing(answer(truncated=truncated)).next_token == "t+1"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        answer(contents("a"))[:-10],
        b"<html>Sign in</html>",
        b"<Error><Code>SlowDown</Code></Error>",
        answer(truncated=""),
        answer(truncated="<IsTruncated>true</IsTruncated>"),
        answer("<Contents><Key>a</Key></Contents>"),
        answer(
            "<Contents><Key>a</Key><LastModified>soon</LastModified><ETag>e</ETag><Size>1</Size></Contents>"
        ),
    ],
)
def test_what_is_no_whole_listing_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # its words are for nobody: botocore's are shown
        parse_listing(body)
