"""Photographs of the built pages, at desktop and phone width, light and dark, to look at before a release.

    make docs
    .venv/bin/python tools/look_at_docs.py build/docs build/look --browser /usr/bin/chromium

Needs `pip install playwright` and a Chromium: its own (`playwright install chromium`), or --browser. Ends with 1 and
the names of the pages that are wider than a screen, or whose scripts failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

VIEWS = {"desktop": (1280, 900, "light"), "dark": (1280, 900, "dark"), "phone": (390, 844, "light")}
# Lets a page that is too wide be told from a table or a drawing that scrolls within it.
TOO_WIDE = "document.documentElement.scrollWidth > document.documentElement.clientWidth + 1"


def main() -> int:
    """Photograph every page in every view."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, help="directory of built pages")
    parser.add_argument("out", type=Path, help="directory for the PNG files")
    parser.add_argument("--browser", help="path of a Chromium; default: playwright's own")
    parser.add_argument("--only", default="", help="pages whose path holds this text")
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=list(VIEWS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    faults = list(photograph(args.pages, args.out, args.browser, args.only, args.views))
    print("\n".join(faults) or f"No fault seen; the pictures are in {args.out}")
    return 1 if faults else 0


def photograph(pages: Path, out: Path, browser: str | None, only: str, views: list[str]) -> Iterator[str]:
    """Write one PNG per page and view; yield what is wrong with them."""
    from playwright.sync_api import sync_playwright

    paths = [path for path in sorted(pages.rglob("*.html")) if only in str(path.relative_to(pages))]
    if not paths:
        raise SystemExit(f"{pages}: no page whose path holds {only!r}")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for view in views:
            width, height, theme = VIEWS[view]
            context = chromium.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
            for path in paths:
                name, page, errors = str(path.relative_to(pages)), context.new_page(), list[str]()
                page.on("pageerror", lambda error, errors=errors: errors.append(str(error)))
                page.goto(path.resolve().as_uri())
                page.wait_for_load_state("load")
                if page.evaluate(TOO_WIDE):
                    yield f"{name} ({view}): wider than the screen"
                yield from (f"{name} ({view}): {error}" for error in errors)
                picture = f"{name.removesuffix('.html').replace('/', '-')}.{view}.png"
                page.screenshot(path=out / picture, full_page=True)
                page.close()
            context.close()
        chromium.close()


if __name__ == "__main__":
    sys.exit(main())
