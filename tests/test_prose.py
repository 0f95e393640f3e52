"""Docs and code speak plain English: short sentences, and no word of the project's old private language."""

import pytest

from tests.support import ROOT
from tests.support.prose import banned_words, documents, long_sentences, texts_of

PAGES = [path.relative_to(ROOT).as_posix() for path in documents()]
MODULES = [
    path.relative_to(ROOT).as_posix()
    for package in ("fusecache", "loader")
    for path in sorted((ROOT / package).rglob("*.py"))
]


@pytest.mark.parametrize("page", PAGES)
def test_sentences_of_a_page_are_short(page: str) -> None:
    assert long_sentences((ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_banned_word(page: str) -> None:
    assert banned_words((ROOT / page).read_text()) == []


def test_no_module_has_a_banned_word() -> None:
    found = {
        f"{module}:{line}": words
        for module in MODULES
        for line, text in texts_of((ROOT / module).read_text())
        if (words := banned_words(text))
    }
    assert found == {}


def test_a_long_sentence_is_found() -> None:
    sentence = "One " + "more " * 30 + "word."
    assert long_sentences(f"Short.\n\n{sentence} Short.") == [sentence]
    assert long_sentences(f"- {sentence[:20]}.\n- {sentence[:20]}.") == []


@pytest.mark.parametrize(
    "text", ["It is kept back.", "Nobody waits.", "What is owed\nlater.", "All the\nsame."]
)
def test_a_banned_word_is_found(text: str) -> None:
    assert banned_words(text)


def test_words_in_comments_and_docstrings_are_found() -> None:
    source = '"""Somebody."""\nx = 1  # nobody reads it\nerror = f"{x} is put off"\n'
    assert [line for line, text in texts_of(source) if banned_words(text)] == [2, 3]
