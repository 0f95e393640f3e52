"""Which word was meant, and what the counters say of waits."""

import pytest

from fusecache.cli.main import main
from fusecache.model.format_text import count_text, nearest_text, printable


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["statsu"], "did you mean 'status'?"),
        (["unmuont"], "did you mean 'unmount'?"),
        (["mount", "s3://b", "/m", "--cach-dir=/x"], "did you mean '--cache-dir'?"),
        (["status", "--jsno"], "did you mean '--json'?"),
        (["warm", ".", "--wiat"], "did you mean '--wait'?"),
        (["xyzzy"], "known are mount, run, unmount"),
    ],
)
def test_a_misspelt_command_or_option_is_answered_with_the_one_meant(
    capsys: pytest.CaptureFixture[str], words: list[str], meant: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert meant in said
    assert said.count("\n") == 1


def test_help_shows_sizes_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mount", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "[256 MiB, at most 1/8 of the memory" in said
    assert "268435456" not in said


def test_help_says_that_lists_of_names_stand_instead_of_the_defaults_and_what_an_unmount_removes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["mount", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("your list replaces this one") == 3
    assert "an unmount applies them at once" in said


def test_counts_are_words() -> None:
    assert [count_text(count, "file") for count in (0, 1, 12345)] == ["0 files", "1 file", "12 345 files"]
    assert nearest_text("nothing like it", ["a", "b"]) == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b/é 漢.pt", "a b/é 漢.pt"),
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nWARNING b", "a\\nWARNING b"),
        ("txt.\u202eexe", "txt.\\u202eexe"),
        ("\x7f\x9b\u2028", "\\x7f\\x9b\\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_printable_text_is_one_harmless_line(text: str, shown: str) -> None:
    assert printable(text) == shown
