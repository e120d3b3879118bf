"""Blocks of README and pages that a reader can run as they are, and what they are said to print.

A block is runnable if an HTML comment stands right before it:

    <!-- run -->           run it; lines after "$ " are commands and the others their output, Python blocks are files
    <!-- run: slow -->     the same, but for `make test-docs` alone
    <!-- run: server -->   likewise, with a server of ced-tiny on port 30000
    <!-- output -->        what the runnable block before it prints

In outputs, "..." stands for anything. White space does not count, so that a page may break long lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_BLOCK = re.compile(
    r"^(?P<indent> *)<!-- (?P<mark>run|run: slow|run: server|output) -->\n"
    r"(?P=indent)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_COMMENT = re.compile(r"^ *<!-- *(run|output)\b[^>]*-->", re.MULTILINE)


@dataclass
class Step:
    """One command, or one Python file, and what it prints; expected None = not told."""

    command: str
    is_python: bool
    expected: str | None = None


@dataclass
class Block:
    """A runnable block of a page."""

    page: Path
    line: int
    kind: str  # quick, slow or server
    steps: list[Step] = field(default_factory=list)


class PageError(ValueError):
    """A mark that belongs to no block."""


def blocks_of(page: Path) -> list[Block]:
    """Runnable blocks of a page, in order. Raises PageError for a mark that is not right before a block."""
    text = page.read_text(encoding="utf-8")
    found, out = list(_BLOCK.finditer(text)), list[Block]()
    if len(found) != len(_COMMENT.findall(text)):
        raise PageError(f"{page}: a mark is not right before a block, or is misspelt: <!-- run -->")
    for match in found:
        line = text.count("\n", 0, match.start()) + 2
        body = _dedent(match["text"], len(match["indent"]))
        if match["mark"] == "output":
            if not out or not out[-1].steps[-1].is_python:
                raise PageError(f"{page}:{line}: an output without a Python block before it")
            out[-1].steps[-1].expected = body
            continue
        block = Block(page, line, match["mark"].partition(": ")[2] or "quick")
        block.steps = [Step(body, True)] if match["language"] == "python" else list(_commands(body, page, line))
        out.append(block)
    return out


def _commands(body: str, page: Path, line: int) -> Iterator[Step]:
    """Commands and outputs of a session; a block without any "$ " is one script."""
    lines = body.splitlines()
    if not any(each.startswith("$ ") for each in lines):
        yield Step(body, False)
        return
    if not lines[0].startswith("$ "):
        raise PageError(f"{page}:{line}: a session begins with a command")
    starts = [i for i, each in enumerate(lines) if each.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        stop = start + 1
        while stop < end and _is_open("\n".join(lines[start:stop])):
            stop += 1
        yield Step("\n".join(lines[start:stop])[2:], False, "\n".join(lines[stop:end]))


def _is_open(command: str) -> bool:
    """Whether a command goes on in the next line: an open quote, or a backslash at its end."""
    return command.count("'") % 2 == 1 or command.endswith("\\")


def _dedent(text: str, indent: int) -> str:
    return "\n".join(line[indent:] for line in text.splitlines())


def matches(expected: str, printed: str) -> bool:
    """Whether a program printed what a page says."""
    parts = ["".join(part.split()) for part in expected.split("...")]
    pattern = ".*".join(re.escape(part) for part in parts)
    return re.fullmatch(pattern, "".join(printed.split()), re.DOTALL) is not None
