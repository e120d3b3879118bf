"""AgentX ("Weka") traces: one JSON object a line, or a file, per coding session, with sub-agents inside.

A request has all of its input: `in` tokens, of which `hash_ids` names blocks from the start; tokens beyond them are its
own. Ids hold within one object. A sub-agent becomes a session of its own, as one trace of sessions cannot say that it
starts beside one turn and ends before another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.trace import TURNS, Piece, Request, Trace

REQUESTS = ("n", "s")


def read_weka(path: Path) -> Trace:
    """A trace from a JSONL file, a JSON file, or a directory of JSON files. Raises BenchError, naming the file."""
    files = sorted(path.glob("*.json*")) if path.is_dir() else [path]
    if not files:
        raise BenchError(f"{path} has no JSON files")
    reader = _Reader()
    for file in files:
        for number, raw in _objects(file):
            try:
                reader.add(raw)
            except (KeyError, TypeError) as error:
                raise BenchError(f"{file}, object {number}: not as AgentX writes it: {error!r}") from None
    return Trace(tuple(reader.requests), reader.block)


def _objects(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    text = file.read_text(encoding="utf-8")
    try:
        yield 1, json.loads(text)
        return
    except json.JSONDecodeError:
        pass
    for number, line in enumerate(filter(str.strip, text.splitlines()), 1):
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise BenchError(f"{file}, object {number}: no JSON: {error}") from None


class _Reader:
    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.block = 0
        self.base = 0  # of the ids of the object at hand: those of two objects mean different blocks
        self.sessions = 0

    def add(self, raw: dict[str, Any]) -> None:
        if raw["hash_id_scope"] != "local":
            raise BenchError(f"session {raw['id']!r}: hash_id_scope {raw['hash_id_scope']!r}: only local can be read")
        if self.block not in (0, raw["block_size"]):
            raise BenchError(f"session {raw['id']!r}: blocks of {raw['block_size']} tokens, {self.block} before")
        self.block = raw["block_size"]
        entries = raw["requests"]
        self._session(raw["id"], [entry for entry in entries if entry["type"] in REQUESTS])
        for number, entry in enumerate(entry for entry in entries if entry["type"] == "subagent"):
            self._session(f"{raw['id']}::sa:{number}", entry["requests"])
        inner = [r for entry in entries for r in (entry["requests"] if entry["type"] == "subagent" else [entry])]
        self.base += 1 + max((i for r in inner for i in r.get("hash_ids", [])), default=0)

    def _session(self, name: str, entries: list[dict[str, Any]]) -> None:
        before: dict[str, Any] | None = None
        for turn, entry in enumerate(entries):
            prompt = self._prompt(entry, turn)
            self.requests.append(Request(name, turn, prompt, max(1, entry["out"]), _delay(before, entry)))
            before = entry
        self.sessions += 1

    def _prompt(self, entry: dict[str, Any], turn: int) -> tuple[Piece, ...]:
        tokens, pieces = max(1, entry["in"]), []
        for i in entry.get("hash_ids", []):
            size = min(self.block, tokens)
            if size:
                pieces.append(Piece(self.base + i, size))
            tokens -= size
        own = Piece(-(self.sessions * TURNS + turn + 1), tokens)
        return (*pieces, own) if tokens else tuple(pieces)


def _delay(before: dict[str, Any] | None, entry: dict[str, Any]) -> float:
    """Milliseconds between an answer and the next request: think_time, or what the times leave of the gap."""
    if before is None:
        return 0.0
    if entry.get("think_time") is not None:
        seconds = float(entry["think_time"])
    else:
        seconds = float(entry["t"] - before["t"] - (before.get("api_time") or 0.0))
    return round(1e3 * max(0.0, seconds), 3)
