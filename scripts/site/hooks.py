"""What mkdocs does not do by itself: README as first page, lists of whole folders, links to files outside of docs."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder where the navigation names it."""
    config.nav = _with_pages(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as the first page."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links of README.md begin in docs, and turn links to files that are not on the site into their names."""
    folder = ROOT if page.file.src_uri == "index.md" else (DOCS / page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if not target.exists():
            return found[0]  # mkdocs names it, and fails
        if target.suffix == ".md" and target.is_relative_to(DOCS):
            if folder != ROOT:
                return found[0]
            return f"[{found[1]}]({target.relative_to(DOCS)}{found[3] or ''})"
        return f"{found[1]} (`{target.relative_to(ROOT)}`)"

    return _LINK.sub(link, markdown)


def _with_pages(entries: Any) -> Any:
    found = []
    for entry in entries:
        if isinstance(entry, dict):
            found.append(
                {
                    name: _with_pages(value) if isinstance(value, list) else value
                    for name, value in entry.items()
                }
            )
        elif entry.endswith(".md"):
            found.append(entry)
        else:
            found += sorted(page.relative_to(DOCS).as_posix() for page in (DOCS / entry).glob("*.md"))
    return found
