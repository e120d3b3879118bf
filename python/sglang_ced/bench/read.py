"""Traces by any of the forms that can be read."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_ced.bench.agentic_trace import read_agentic_trace
from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.mooncake import read_mooncake
from sglang_ced.bench.trace import Trace
from sglang_ced.bench.weka import read_weka

FORMS = ("mooncake", "weka", "agentic-trace")


def form_of(path: Path) -> str:
    """The form of a file or directory, from its first JSON object. Raises BenchError if it is none of them."""
    if path.is_dir():
        return "weka"
    with path.open(encoding="utf-8") as file:
        head = file.read(1 << 16)
    line = head.lstrip().split("\n", 1)[0]
    if '"conversations"' in head:
        return "agentic-trace"
    if '"hash_id_scope"' in head:
        return "weka"
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = {}
    if isinstance(row, dict) and "input_length" in row:
        return "mooncake"
    raise BenchError(f"{path}: none of {', '.join(FORMS)}: name the form with --form")


def read_trace(path: Path, form: str | None = None, block: int | None = None, model: Path | None = None) -> Trace:
    """A trace. form: one of FORMS, else told from the file. block, model: see the readers."""
    if not path.exists():
        raise BenchError(f"no trace at {path}")
    form = form or form_of(path)
    if form == "mooncake":
        return read_mooncake(path, block)
    if form == "weka":
        return read_weka(path)
    if form == "agentic-trace":
        return read_agentic_trace(path, model)
    raise BenchError(f"form {form!r}: there is {', '.join(FORMS)}")
