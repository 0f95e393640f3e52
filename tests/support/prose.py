"""What a person reads in this project: sentences of the documentation, and the words of docs and code.

Two rules: a sentence has at most 30 words, and words of the project's old private language stay away.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

WORDS_PER_SENTENCE_MAX = 30

# Each of these made readers stop: the actor is missing, or the field has a standard term.
BANNED = re.compile(
    r"""\b(
      so\s+(many|much|long|often)\s+(as|that|of) | nobody | somebody | who(m)?ever | kept\s+back | keeps\s+back
    | set\s+aside | sets\s+aside | put(s)?\s+off | all\s+the\s+same | those\s+that | that\s+which | anew | meanwhile
    | what\s+is\s+(told|kept|owed|said|begun) | who\s+(reads|writes|asks|looks|comes) | is\s+told\s+of | in\s+vain
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)


def documents() -> list[Path]:
    """The pages for users and engineers."""
    return sorted(
        [
            ROOT / "README.md",
            ROOT / "CHANGELOG.md",
            *(ROOT / "docs").rglob("*.md"),
            *ROOT.glob("systemd/*.md"),
        ]
    )


def long_sentences(text: str) -> list[str]:
    """Sentences of a Markdown page that are too long. Code, and lists of links, are no sentences."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    found = []
    for block in re.split(r"\n\s*\n|\n\s*[-*\d.]+ |\||\n(?=\|)|\n#+ ", text):
        for sentence in re.split(r"(?<=[.!?:;])\)?\s+", " ".join(block.split())):
            words = re.findall(r"[^\s`]*\w[^\s`]*", re.sub(r"`[^`]*`", "code", sentence))
            if len(words) > WORDS_PER_SENTENCE_MAX and sentence.count(" · ") < 3:
                found.append(sentence)
    return found


def banned_words(text: str) -> list[str]:
    """Words of the old dialect in a text, with what stands around them."""
    return [
        text[max(0, match.start() - 30) : match.end() + 30].replace("\n", " ")
        for match in BANNED.finditer(text)
    ]


def texts_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each comment and each string of a module that holds more than one word."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
