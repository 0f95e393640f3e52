"""ListObjectsV2: order, pages, prefixes."""

from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.s3server import ServerProcess
from tests.unit.s3server.refusals import refusal

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

BUCKET = "bucket"


def pages(client: "S3Client", **arguments: Any) -> tuple[list[str], list[str], int]:
    """Return (keys, common prefixes, number of pages) of a whole listing."""
    keys: list[str] = []
    prefixes: list[str] = []
    count = 0
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, **arguments):
        count += 1
        assert page["KeyCount"] == len(page.get("Contents", [])) + len(page.get("CommonPrefixes", []))
        keys += [row["Key"] for row in page.get("Contents", [])]
        prefixes += [row["Prefix"] for row in page.get("CommonPrefixes", [])]
    return keys, prefixes, count


def test_order_is_that_of_utf8_bytes(server: ServerProcess, client: "S3Client") -> None:
    keys = ["\U0001f600", "\uff61", "z", "a/b", "a", "a.b", "Z", "é", "a/", "a\x01"]
    for key in keys:
        server.control.put(key, b"x")
    assert pages(client)[0] == sorted(keys, key=str.encode)


def test_start_after_is_exclusive_and_still_names_a_prefix_it_lies_in(
    server: ServerProcess, client: "S3Client"
) -> None:
    for key in ("a/1", "a/2", "a!", "b"):
        server.control.put(key, b"x")
    assert pages(client, StartAfter="a/1")[0] == ["a/2", "b"]
    assert pages(client, StartAfter="a/1", Delimiter="/") == (["b"], ["a/"], 1)
    assert pages(client, StartAfter="a/2", Delimiter="/") == (["b"], [], 1)


def test_at_most_a_thousand_a_page(server: ServerProcess, client: "S3Client") -> None:
    for number in range(1001):
        server.control.add_synthetic(f"{number:04}", 1, number)
    keys, _, count = pages(client)
    assert (len(keys), count) == (1001, 2)
    assert client.list_objects_v2(Bucket=BUCKET, MaxKeys=5000)["MaxKeys"] == 1000


def test_max_keys_zero_is_an_empty_page_without_another(server: ServerProcess, client: "S3Client") -> None:
    server.control.put("k", b"x")
    page = client.list_objects_v2(Bucket=BUCKET, MaxKeys=0)
    assert (page["KeyCount"], page["IsTruncated"]) == (0, False)


def test_a_made_up_token_is_refused(client: "S3Client") -> None:
    refused = refusal(client.list_objects_v2, Bucket=BUCKET, ContinuationToken="\N{SNOWMAN}")
    assert refused == (400, "InvalidArgument")


names = st.text(alphabet="ab/!é", min_size=1, max_size=6)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.sets(names, max_size=12), prefix=st.text(alphabet="ab/", max_size=2), size=st.integers(1, 4))
def test_small_pages_say_what_one_page_says(
    server: ServerProcess, client: "S3Client", keys: set[str], prefix: str, size: int
) -> None:
    server.control.reset()
    for key in keys:
        server.control.put(key, b"x")
    found = sorted((key for key in keys if key.startswith(prefix)), key=str.encode)
    folded = {key[: key.index("/", len(prefix)) + 1] for key in found if "/" in key[len(prefix) :]}
    plain = [key for key in found if "/" not in key[len(prefix) :]]
    assert pages(client, Prefix=prefix, PaginationConfig={"PageSize": size})[0] == found
    keys_found, prefixes, _ = pages(client, Prefix=prefix, Delimiter="/", PaginationConfig={"PageSize": size})
    assert (keys_found, prefixes) == (plain, sorted(folded, key=str.encode))
