"""Docstrings for the reference of the Python API: written as plain text with `code` in single backticks."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
# What reStructuredText would take for markup.
_MARKUP = re.compile(r"([*|]|(?<=\w)_(?!\w))")


def to_rst(lines: list[str]) -> list[str]:
    """Lines of a docstring as reStructuredText that shows them as they are.

    A line that ends an indented passage is set apart by an empty one, as reStructuredText wants it.
    """
    out: list[str] = []
    for line in lines:
        if out and out[-1].startswith(" ") and line and not line.startswith(" "):
            out.append("")
        out.append(_escape(line))
    return out


def _escape(line: str) -> str:
    parts = _CODE.split(line)
    return "".join(f"``{part}``" if i % 2 else _MARKUP.sub(r"\\\1", part) for i, part in enumerate(parts))


def _process(_app: Sphinx, _what: str, _name: str, _obj: object, _options: object, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}
