"""The blocks of README.md, to be carried out as they stand."""

import re

from tests.support import ROOT

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def readme_blocks(language: str = "") -> list[str]:
    """Return the blocks of a language, in order; "" is the shell. Without those for people who change the project."""
    page = (ROOT / "README.md").read_text().partition("\n## Develop")[0]
    return [code for found, code in _BLOCK.findall(page) if found == language]


def readme_block(language: str, word: str) -> str:
    """Return the only block that has a word."""
    (found,) = (code for code in readme_blocks(language) if word in code)
    return found
