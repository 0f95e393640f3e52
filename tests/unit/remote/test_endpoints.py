"""Which endpoint is chosen."""

import pytest

from fusecache.model.errors import ConfigError
from fusecache.remote.endpoints import Credentials, Endpoint, choose_endpoint


@pytest.mark.parametrize(
    ("environment", "endpoint"),
    [
        ({}, Endpoint(None)),
        ({"R2_ACCOUNT_ID": "abc"}, Endpoint("https://abc.r2.cloudflarestorage.com", "auto", is_r2=True)),
        (
            {"R2_ACCOUNT_ID": "abc", "R2_JURISDICTION": "eu"},
            Endpoint("https://abc.eu.r2.cloudflarestorage.com", "auto", is_r2=True),
        ),
        ({"AWS_ENDPOINT_URL": "http://a", "R2_ACCOUNT_ID": "abc"}, Endpoint("http://a")),
        ({"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_S3": "http://b"}, Endpoint("http://b")),
        ({"AWS_ENDPOINT_URL_S3": "http://b", "S3_ENDPOINT_URL": "http://c"}, Endpoint("http://c")),
        (
            {"S3_ENDPOINT_URL": "https://x.r2.cloudflarestorage.com", "AWS_REGION": "eu-west-1"},
            Endpoint("https://x.r2.cloudflarestorage.com", "auto", is_r2=True),
        ),
    ],
)
def test_the_environment_names_the_endpoint(environment: dict[str, str], endpoint: Endpoint) -> None:
    assert choose_endpoint(environment) == endpoint


def test_the_option_goes_first() -> None:
    environment = {"S3_ENDPOINT_URL": "http://c", "R2_ACCOUNT_ID": "abc"}
    assert choose_endpoint(environment, endpoint_url="http://d", region="r") == Endpoint("http://d", "r")


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"R2_ACCOUNT_ID": "abc/def"}, "R2_ACCOUNT_ID"),
        ({"R2_ACCOUNT_ID": "abc", "R2_JURISDICTION": "moon"}, "eu, fedramp"),
        ({"S3_ENDPOINT_URL": "localhost:9000"}, "is not a URL"),
        ({"S3_ENDPOINT_URL": "https://host/bucket"}, "contains a path"),
    ],
)
def test_what_cannot_be_an_endpoint_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_endpoint(environment)


def test_a_name_that_only_looks_like_r2_is_not() -> None:
    assert not choose_endpoint({}, endpoint_url="https://evilr2.cloudflarestorage.com").is_r2


def test_secrets_are_not_shown() -> None:
    assert "hidden" not in repr(Credentials("key", "hidden", "hidden"))


# ---- other clouds

ACCOUNT = {"AZURE_STORAGE_ACCOUNT": "account1"}


@pytest.mark.parametrize(
    ("source", "url", "environment", "found"),
    [
        ("gs://b", None, {"S3_ENDPOINT_URL": "http://s3"}, ("https://storage.googleapis.com", "")),
        ("gs://b", "http://127.0.0.1:1", {}, ("http://127.0.0.1:1", "")),
        ("az://b", None, ACCOUNT, ("https://account1.blob.core.windows.net", "account1")),
        (
            "az://b",
            None,
            ACCOUNT | {"AZURE_STORAGE_ACCOUNT_NAME": "first"},
            ("https://first.blob.core.windows.net", "first"),
        ),
        ("az://b", "http://127.0.0.1:1", ACCOUNT, ("http://127.0.0.1:1", "account1")),
        ("az://b", "https://other.blob.example.cn", {}, ("https://other.blob.example.cn", "other")),
    ],
)
def test_each_cloud_has_its_endpoint(
    source: str, url: str | None, environment: dict[str, str], found: tuple[str, str]
) -> None:
    endpoint = choose_endpoint(environment, source=source, endpoint_url=url)
    assert (endpoint.url, endpoint.account, endpoint.kind.value) == (*found, source[:2])


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:1", "http://localhost:1"])
def test_a_missing_storage_account_is_named(url: str | None) -> None:
    with pytest.raises(ConfigError, match="set AZURE_STORAGE_ACCOUNT_NAME to its name"):
        choose_endpoint({}, source="az://b", endpoint_url=url)
