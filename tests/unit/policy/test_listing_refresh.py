"""When lookups make a directory be listed."""

import pytest

from fusecache.policy.listing_refresh import is_listing_cheaper


def test_an_unlisted_directory_is_listed_from_the_third_name_on() -> None:
    assert [is_listing_cheaper(probes, 0, 0.0, float("inf")) for probes in range(4)] == [
        False,
        False,
        True,
        True,
    ]


def test_a_listing_of_one_page_costs_what_a_question_for_one_name_does() -> None:
    assert is_listing_cheaper(0, 1, 0.04, 0.0)


@pytest.mark.parametrize(
    ("probes", "idle_seconds", "pays"), [(999, 1000.0, False), (1000, 1000.0, True), (5000, 399.0, False)]
)
def test_a_long_listing_is_repeated_after_as_many_questions_and_ten_times_its_duration(
    *, probes: int, idle_seconds: float, pays: bool
) -> None:
    assert is_listing_cheaper(probes, 1000, 40.0, idle_seconds) is pays
