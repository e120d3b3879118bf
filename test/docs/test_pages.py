"""What pages promise of the code: warnings explained, links that lead somewhere, one version."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tools.check_links import broken_in_markdown, broken_in_pages

from sglang_ced.plugin.seams import EXPECTED_VERSION

ROOT = Path(__file__).parents[2]

SOURCES = sorted((ROOT / "python" / "sglang_ced").rglob("*.py"))
OPERATE = (ROOT / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")


def warnings_in_the_code() -> list[str]:
    """The text of every `logger.warning` of the package, without its placeholders."""
    calls = [
        node for source in SOURCES for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)
    ]
    return [
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("warning", "error")
        and "logger" in ast.dump(call.func)
    ]


def test_every_warning_is_explained() -> None:
    found = warnings_in_the_code()
    assert len(found) >= 2
    for text in found:
        pieces = [piece.strip() for piece in re.split(r"%[-.\d]*\w|%%|[;:]", text) if len(piece.strip()) > 8]
        assert pieces, text
        assert all(piece in OPERATE for piece in pieces), f"docs/how-to/operate.md does not explain: {text}"


def test_messages_that_troubleshooting_quotes_are_in_the_code() -> None:
    """The first column of "The launch stops". A version in a message is a variable in the code."""
    page = (ROOT / "docs" / "how-to" / "troubleshoot.md").read_text(encoding="utf-8")
    section = page.split("## The launch stops")[1].split("## ")[0]
    quoted = [
        piece
        for line in section.splitlines()
        for message in re.findall(r"`([^`]+)`", line.partition("|")[2].partition("|")[0])
        for piece in re.split(rf"{re.escape(EXPECTED_VERSION)}|deepseek\w+", message)
        if " " in piece.strip()
    ]
    nodes = [node for source in SOURCES for node in ast.walk(ast.parse(source.read_text()))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert len(quoted) >= 7
    missing = [piece for piece in quoted if not any(piece.strip() in text for text in texts)]
    assert missing == ["address already in use"]  # that is the system's


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_markdown_files_lead_somewhere(name: str) -> None:
    assert list(broken_in_markdown(ROOT / name)) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">b</a> <a href="c.html">c</a> <a href="#here">h</a>')
    (tmp_path / "b.html").write_text('<p id="somewhere">text</p>')
    found = list(broken_in_pages(tmp_path))
    assert [line.split(": ")[1] for line in found] == ["b.html#there", "c.html", "#here"]
    (tmp_path / "page.md").write_text("[one](a.html) [two](nowhere.md) [three](https://example.org/x)")
    assert [line.split(": ")[1] for line in broken_in_markdown(tmp_path / "page.md")] == ["nowhere.md"]


def test_every_page_is_in_the_navigation() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")} - {"index"}
    assert {page for page in pages if not re.search(rf"^{re.escape(page)}$", index, re.MULTILINE)} == set()


def test_spelling_is_checked_by_lint() -> None:
    """A misspelt word ends codespell with an error; `make lint` runs it."""
    words = "a " + "langau" + "ge model\n"  # apart, so that this file itself passes
    done = subprocess.run(
        [Path(sys.executable).with_name("codespell"), "-"], input=words, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "language" in done.stdout
    assert "codespell" in (ROOT / "Makefile").read_text()
