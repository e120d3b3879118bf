"""Mooncake JSONL, as aiperf reads it: one request a line.

With `session_id`, a line holds what its turn adds: `input_length` new tokens in the blocks `hash_ids`, of which the
last may be shorter, after what was said before; `delay` is the time in ms since the answer before. Without, a line is
a request of its own. A block stands for the same tokens wherever its id stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.trace import Piece, Request, Trace, answer_piece

# Sizes that are looked for where a file does not say how many tokens a block has.
BLOCKS = tuple(1 << power for power in range(3, 12))


def write_mooncake(trace: Trace, file: Path) -> None:
    """Write `trace`; what `read_mooncake` reads is equal to it.

    Raises BenchError if a turn does not begin with the turn before and its answer, or has blocks of other sizes: this
    form cannot say that.
    """
    lines = []
    for index, (session, requests) in enumerate(trace.sessions.items()):
        said: tuple[Piece, ...] = ()
        for request in requests:
            new = request.prompt[len(said) :]
            if request.prompt[: len(said)] != said or not _whole(new, trace.block):
                raise BenchError(
                    f"session {session!r}, turn {request.turn}, cannot be written as Mooncake JSONL: it does not go on "
                    f"from the turn before in blocks of {trace.block} tokens"
                )
            row = {
                "session_id": session,
                "input_length": sum(piece.size for piece in new),
                "output_length": request.output,
                "hash_ids": [piece.id for piece in new],
                "block_size": trace.block,
            }
            lines.append(json.dumps(row | ({"delay": request.delay_ms} if request.turn else {})))
            said = (*request.prompt, answer_piece(index, request.turn, request.output))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _whole(pieces: tuple[Piece, ...], block: int) -> bool:
    return bool(pieces) and all(p.size == block for p in pieces[:-1]) and pieces[-1].size <= block and pieces[0].id >= 0


def read_mooncake(file: Path, block: int | None = None) -> Trace:
    """A trace from Mooncake JSONL, of sessions or of single requests.

    block: tokens of a block, if lines have no `block_size` and the lengths leave more than one power of two.
    Raises BenchError, naming the line.
    """
    rows = list(_rows(file))
    block = _block(file, [row for _, row in rows], block)
    sessions: dict[str, list[Request]] = {}
    for number, row in rows:
        name = str(row.get("session_id") or f"line{number}")
        turns = sessions.setdefault(name, [])
        index = list(sessions).index(name) if turns else len(sessions) - 1
        said: tuple[Piece, ...] = ()
        if turns:
            said = (*turns[-1].prompt, answer_piece(index, turns[-1].turn, turns[-1].output))
        new = _pieces(row["input_length"], row["hash_ids"], block, f"{file}:{number}")
        delay = float(row.get("delay") or 0.0)
        turns.append(Request(name, len(turns), said + new, row["output_length"], delay))
    return Trace(tuple(request for turns in sessions.values() for request in turns), block)


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise BenchError(f"{file}:{number}: no JSON: {error}") from None
            missing = [key for key in ("input_length", "output_length", "hash_ids") if not row.get(key)]
            if missing:
                raise BenchError(
                    f"{file}:{number}: no {', '.join(missing)}: prompts are made from lengths and hash_ids"
                )
            yield number, row
    if file.stat().st_size == 0:
        raise BenchError(f"{file} is empty")


def _block(file: Path, rows: list[dict[str, Any]], given: int | None) -> int:
    said = {row["block_size"] for row in rows if "block_size" in row}
    if len(said) > 1:
        raise BenchError(f"{file}: block_size is {', '.join(map(str, sorted(said)))}: one file, one size")
    if given is not None and said and said != {given}:
        raise BenchError(f"{file} has blocks of {said.pop()} tokens, not {given}")
    if given is not None or said:
        return given if given is not None else int(said.pop())
    fit = [size for size in BLOCKS if all(-(-row["input_length"] // size) == len(row["hash_ids"]) for row in rows)]
    if len(fit) != 1:
        raise BenchError(
            f"{file}: blocks of {' or '.join(map(str, fit)) or 'no power of two'} tokens fit: give --block"
        )
    return fit[0]


def _pieces(tokens: int, ids: list[int], block: int, where: str) -> tuple[Piece, ...]:
    last = tokens - (len(ids) - 1) * block
    if not 0 < last <= block:
        raise BenchError(f"{where}: {tokens} tokens do not end in the last of {len(ids)} blocks of {block}")
    return (*(Piece(i, block) for i in ids[:-1]), Piece(ids[-1], last))
