"""Links that can be checked without a network: those between built pages, and those of Markdown files on GitHub.

    python tools/check_links.py build/docs README.md CONTRIBUTING.md

A directory is searched for HTML pages; every link, picture and script in them must be there, and so must the place in
the page after a `#`. A Markdown file's relative links must lead to files of the repository. Ends with 1 and a list of
the links that lead nowhere, with the page that has them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_MARKDOWN_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


class _Page(HTMLParser):
    """What a page links to, and the places in it that can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {"", "top"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value for name in ("href", "src") if (value := given.get(name))]
        self.places |= {value for name in ("id", "name") if (value := given.get(name))}


@cache
def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def broken_in_pages(root: Path) -> Iterator[str]:
    """Links of all pages below `root` that lead nowhere. Raises FileNotFoundError where there is no page at all."""
    pages = sorted(root.rglob("*.html"))
    if not pages:
        raise FileNotFoundError(f"{root}: no HTML page; build them first with make docs")
    for page in pages:
        for link in _read(page).links:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            path = (page.parent / unquote(target.path)).resolve() if target.path else page
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file():
                yield f"{page.relative_to(root)}: {link}: no such file"
            elif path.suffix == ".html" and unquote(target.fragment) not in _read(path).places:
                yield f"{page.relative_to(root)}: {link}: no such place in the page"


def broken_in_markdown(file: Path) -> Iterator[str]:
    """Relative links of a Markdown file that lead to no file."""
    for link in _MARKDOWN_LINK.findall(file.read_text(encoding="utf-8")):
        target = urlsplit(link)
        if not target.scheme and target.path and not (file.parent / unquote(target.path)).exists():
            yield f"{file}: {link}: no such file"


def main(arguments: list[str]) -> int:
    """Check directories of pages and Markdown files; 1 if a link is broken."""
    if not arguments:
        raise SystemExit(__doc__)
    broken = [
        fault
        for path in map(Path, arguments)
        for fault in (broken_in_pages(path) if path.is_dir() else broken_in_markdown(path))
    ]
    print("\n".join(broken) or f"No broken link in {', '.join(arguments)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
