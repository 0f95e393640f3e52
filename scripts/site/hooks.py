"""What mkdocs does not do by itself: pages that lie outside of docs, lists of folders, links between all of them."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
# Pages of the site that lie elsewhere, where people look for them in a checkout.
ELSEWHERE = {
    "index.md": ROOT / "README.md",
    "deploy.md": ROOT / "examples" / "deploy" / "README.md",
    "service.md": ROOT / "systemd" / "README.md",
    "benchmarks.md": ROOT / "benchmarks" / "README.md",
    "changelog.md": ROOT / "CHANGELOG.md",
}
STYLE = "extra.css"
_URIS = {path: uri for uri, path in ELSEWHERE.items()}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder where the navigation names it."""
    config.nav = _with_pages(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie elsewhere, and the style."""
    for uri, path in ELSEWHERE.items():
        files.append(File.generated(config, uri, content=path.read_text()))
    files.append(File.generated(config, STYLE, content=Path(__file__).with_name(STYLE).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to the pages of the site, and turn links to other files into their names."""
    place = page.file.src_uri
    folder = ELSEWHERE.get(place, DOCS / place).parent

    def link(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        if not target.exists():
            return found[0]  # mkdocs names it, and fails
        uri = _URIS.get(target, "")
        if target.suffix == ".md" and target.is_relative_to(DOCS):
            uri = target.relative_to(DOCS).as_posix()
        if not uri:
            return f"{found[1]} (`{target.relative_to(ROOT)}`)"
        return f"[{found[1]}]({posixpath.relpath(uri, posixpath.dirname(place) or '.')}{found[3] or ''})"

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
