"""The key of the nodes of one source: how the source and the endpoint are written makes no difference."""

import pytest

from fusecache.remote.protocol.signing import mount_digest, peer_secret


@pytest.mark.parametrize(
    ("endpoint", "source"),
    [
        ("https://Account.R2.cloudflarestorage.com/", "s3://b"),
        ("HTTPS://account.r2.cloudflarestorage.com:443", "s3://b/"),
    ],
)
def test_other_spellings_of_one_place_have_its_key(endpoint: str, source: str) -> None:
    plain = "https://account.r2.cloudflarestorage.com", "s3://b"
    assert peer_secret("shared", endpoint, source) == peer_secret("shared", *plain)
    assert mount_digest(endpoint, source) == mount_digest(*plain)


def test_other_places_have_other_keys() -> None:
    places = [
        ("http://a:9000", "s3://b"), ("http://a:9000", "s3://b/p"), ("http://a:9001", "s3://b"), ("AWS", "s3://b"),
        ("https://a:9000", "s3://b"), ("http://a:9000/X", "s3://b"), ("http://a:9000/x", "s3://b"),
    ]  # fmt: skip
    assert len({peer_secret("shared", *place) for place in places}) == len(places)


def test_key_of_the_plain_form_is_that_of_earlier_versions() -> None:
    """Else nodes of two versions would refuse each other."""
    assert (
        peer_secret("shared", "https://a.example", "s3://b/p")
        == "ff0680d1c012ca41795895ce2814814b37d707d39ae377dd682c2aed3aab1232"
    )
