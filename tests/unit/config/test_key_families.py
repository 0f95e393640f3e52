"""Families of variables: one bucket, its endpoint, its keys for reading and for writing."""

import pytest

from fusecache.config.endpoint_options import family_names, key_family
from fusecache.model.errors import ConfigError
from fusecache.remote.endpoints import Credentials

WHOLE = {
    "R2_DATASET_ACCOUNT_ID": "0a1b",
    "R2_DATASET_BUCKET_NAME": "dataset",
    "R2_DATASET_READ_ACCESS_KEY_ID": "reader",
    "R2_DATASET_READ_SECRET_ACCESS_KEY": "secret one",
    "R2_DATASET_WRITE_ACCESS_KEY_ID": "writer",
    "R2_DATASET_WRITE_SECRET_ACCESS_KEY": "secret two",
    "R2_DATASETS_BUCKET_NAME": "of another family",
}


def test_whole_family_has_bucket_endpoint_and_keys() -> None:
    found = key_family("R2_DATASET", WHOLE)
    assert (found.bucket, found.missing) == ("dataset", ())
    assert found.url == "https://0a1b.r2.cloudflarestorage.com"
    assert found.read_keys == Credentials("reader", "secret one")
    assert found.write_keys == Credentials("writer", "secret two")


def test_endpoint_of_the_family_wins_over_account() -> None:
    environment = {**WHOLE, "R2_DATASET_ENDPOINT_URL": "http://127.0.0.1:9000", "S3_ENDPOINT_URL": "http://x"}
    assert key_family("R2_DATASET", environment).url == "http://127.0.0.1:9000"
    del environment["R2_DATASET_ACCOUNT_ID"]
    found = key_family("R2_DATASET", environment)
    assert (found.url, found.missing) == ("http://127.0.0.1:9000", ())


def test_missing_variables_are_named() -> None:
    environment = {**WHOLE, "R2_DATASET_READ_SECRET_ACCESS_KEY": " "}
    del environment["R2_DATASET_ACCOUNT_ID"], environment["R2_DATASET_WRITE_ACCESS_KEY_ID"]
    found = key_family("R2_DATASET", environment)
    assert (found.url, found.read_keys, found.write_keys) == ("", None, None)
    assert found.missing == (
        "R2_DATASET_ACCOUNT_ID",
        "R2_DATASET_ENDPOINT_URL",
        "R2_DATASET_READ_SECRET_ACCESS_KEY",
        "R2_DATASET_WRITE_ACCESS_KEY_ID",
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ACCOUNT_ID", "a/b"), ("ENDPOINT_URL", "host"), ("ENDPOINT_URL", "http://x/path")],
)
def test_malformed_endpoint_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^R2_DATASET_{variable} "):
        key_family("R2_DATASET", {**WHOLE, f"R2_DATASET_{variable}": value})


def test_secrets_are_not_shown() -> None:
    assert "secret" not in repr(key_family("R2_DATASET", WHOLE))


def test_families_with_a_bucket_and_a_key_are_found() -> None:
    assert family_names(WHOLE) == ["R2_DATASET"]
    assert family_names({**WHOLE, "R2_BUCKET_NAME": "b", "R2_WRITE_ACCESS_KEY_ID": "k"}) == [
        "R2",
        "R2_DATASET",
    ]
    assert (
        family_names(
            {"BUCKET_NAME": "b", "_BUCKET_NAME": "b", "X_BUCKET_NAME": " ", "X_READ_ACCESS_KEY_ID": "k"}
        )
        == []
    )
