"""The conversations that SGLang's benchmark calls `agentic-trace`: one JSON file of messages.

    {"conversations": [[{"messages": [{"role", "content"}, ...], "prompt_tokens": N}, ...], ...]}

A turn holds the messages since the answer before it. Only lengths and what is shared are kept: a message becomes a
piece that equal messages at the same place share. Times are not in the file; turns follow each other at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.trace import Piece, Request, Trace, answer_piece

OUTPUT = 220  # tokens of an answer, which the file does not have; SGLang takes as many


def read_agentic_trace(file: Path, model: Path | None = None, output: int = OUTPUT) -> Trace:
    """A trace of the conversations. model: the directory of the tokenizer that counts messages.

    Without it, `prompt_tokens` of each turn must be there: its growth since the turn before, less the answer, is shared
    out among the turn's messages by their characters. Raises BenchError, naming conversation and turn.
    """
    conversations = json.loads(file.read_text(encoding="utf-8")).get("conversations")
    if not conversations:
        raise BenchError(f"{file} has no conversations")
    count = _counter(model)
    requests = []
    for number, turns in enumerate(conversations):
        prompt: tuple[Piece, ...] = ()
        chain = ""
        for turn, entry in enumerate(turn for turn in turns if turn.get("messages")):
            said = sum(piece.size for piece in prompt)
            if turn:
                prompt = (*prompt, answer_piece(number, turn - 1, output))
            texts = [_text(message) for message in entry["messages"]]
            if count is not None:
                sizes = [max(1, count(text)) for text in texts]
            elif entry.get("prompt_tokens"):
                sizes = _share(entry["prompt_tokens"] - said - (output if turn else 0), [len(text) for text in texts])
            else:
                raise BenchError(f"{file}: conversation {number}, turn {turn}: no prompt_tokens: give --model to count")
            for text, size in zip(texts, sizes, strict=True):
                chain = hashlib.sha256(f"{chain}\0{size}\0{text}".encode()).hexdigest()
                prompt = (*prompt, Piece(int(chain[:15], 16), size))
            requests.append(Request(f"c{number}", turn, prompt, output))
    return Trace(tuple(requests), 1)


def _text(message: dict[str, Any]) -> str:
    content = message.get("content", "")
    return f"{message.get('role', '')}\n{content if isinstance(content, str) else json.dumps(content, sort_keys=True)}"


def _counter(model: Path | None) -> Callable[[str], int] | None:
    if model is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _share(tokens: int, characters: list[int]) -> list[int]:
    """`tokens` in proportion, at least one each."""
    total, out = sum(characters), []
    for number in characters:
        out.append(max(1, tokens * number // total))
    out[-1] = max(1, tokens - sum(out[:-1]))
    return out
