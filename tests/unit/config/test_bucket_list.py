"""A list of buckets in one variable: what is taken, and how a wrong list is refused without its secrets."""

import json

import pytest

from fusecache.config.endpoint_options import KeyedBucket, bucket_list
from fusecache.model.errors import ConfigError
from fusecache.remote.endpoints import Credentials

READ = {"access_key_id": "reader", "secret_access_key": "S3CRET"}
WRITE = {"access_key_id": "writer", "secret_access_key": "S3CRET2"}
READER, WRITER = Credentials("reader", "S3CRET"), Credentials("writer", "S3CRET2")
FIRST = KeyedBucket("https://abc.r2.cloudflarestorage.com", "one", READER, WRITER)
SECOND = KeyedBucket("https://s3.example.org", "two", READER)


def test_a_list_and_an_object_say_the_same() -> None:
    first = {"account_id": "abc", "name": "one", "credentials": {"read": READ, "write": WRITE}}
    second = {"endpoint_url": "https://s3.example.org", "bucket_name": "two", "credentials": {"read": READ}}
    assert bucket_list(json.dumps([first, second]), "X_BUCKET_LIST") == (FIRST, SECOND)
    named = {"one": {**first, "name": None}, "any": {**second, "note": "ignored"}}
    assert bucket_list(json.dumps(named), "X_BUCKET_LIST") == (FIRST, SECOND)


def test_a_bucket_without_keys_has_the_mounts() -> None:
    (found,) = bucket_list('[{"account_id": "abc", "name": "one"}]', "X")
    assert (found.read_keys, found.write_keys) == (None, None)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("{", "X is not valid JSON"),
        ("3", "X: allowed is a list of buckets"),
        ("[]", "X lists no bucket"),
        ("[3]", "X, bucket 1: allowed is an object"),
        (
            '[{"account_id": "a", "name": "b"}, {"name": "b"}]',
            "X, bucket 2: account_id is missing; add it, or end",
        ),
        ('{"b": {"name": "b"}}', "X, 'b': account_id is missing"),
        ('[{"account_id": "a"}]', "X, bucket 1: name is missing"),
        ('[{"account_id": "a/b", "name": "b"}]', "account_id 'a/b' is not an account id"),
        ('[{"account_id": 7, "name": "b"}]', "X, bucket 1: account_id: allowed is a string"),
        ('[{"endpoint_url": "ftp://x", "name": "b"}]', "endpoint_url = 'ftp://x': allowed is a URL"),
        ('[{"account_id": "a", "name": "b", "credentials": "S3CRET"}]', "credentials: allowed is an object"),
        (
            '[{"account_id": "a", "name": "b", "credentials": {"read": "S3CRET"}}]',
            "credentials.read: allowed",
        ),
        (
            '[{"account_id": "a", "name": "b", "credentials": {"read": {"access_key_id": "S3CRET"}}}]',
            "X, bucket 1: credentials.read.secret_access_key is missing",
        ),
        (
            '[{"account_id": "a", "name": "b", "credentials": {"write": {"secret_access_key": ["S3CRET"]}}}]',
            "credentials.write.secret_access_key: allowed is a string",
        ),
    ],
)
def test_what_is_wrong_is_named_without_secrets(value: str, cause: str) -> None:
    with pytest.raises(ConfigError) as error:
        bucket_list(value, "X")
    assert cause in str(error.value)
    assert "S3CRET" not in str(error.value)


def test_keys_do_not_show_in_a_repr() -> None:
    assert "S3CRET" not in repr(FIRST)
