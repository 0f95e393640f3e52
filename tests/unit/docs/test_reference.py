"""docs/reference.md is what the code says; each JSON key of `status` has a meaning there, and no other has."""

from fusecache.model.facts import ENGINE_FACTS
from scripts.reference import ON_DISK, PAGE, on_disk, page, status_keys


def test_the_page_is_written_from_the_code_as_it_is() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.reference"


def test_the_picture_of_the_states_is_drawn_from_the_table_of_transitions() -> None:
    assert ON_DISK.read_text() == on_disk(), "run: python -m scripts.reference"


def test_every_json_key_of_the_engine_is_described() -> None:
    assert status_keys() == set(ENGINE_FACTS)
