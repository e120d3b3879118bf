"""A trace as the file that aiperf replays: every line a whole request body, so that nothing is tokenized on the way.

aiperf makes prompts of hash ids by itself, but as text, which a server need not cut into the same tokens again; bodies
it sends as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.trace import TokenSource, Trace, vocabulary

Prompts = Literal["ids", "text", "chat"]
ANSWER_WORDS, ANSWER_BIAS = 128, 100.0  # answers are made of so many words: what they say is of no matter here
PROMPTS: tuple[Prompts, ...] = ("ids", "text", "chat")


def write_payloads(trace: Trace, file: Path, model: Path, name: str, prompts: Prompts = "ids", seed: int = 0) -> None:
    """Write the bodies. model: the directory of the tokenizer. name: the model's, for the server.

    prompts: `ids` sends token ids to /v1/completions; `text` is for what takes text only: words that the tokenizer cuts
    into the same tokens again; `chat` is for what has no /v1/completions: those words as one message, to which the
    server adds its template. Raises BenchError if the tokenizer has too few such words.
    """
    rows = bodies(trace, model, name, prompts, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.part")
    with part.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row) + "\n")
    part.rename(file)


def bodies(trace: Trace, model: Path, name: str, prompts: Prompts, seed: int) -> Iterator[dict[str, Any]]:
    """One row for each request, in order."""
    speakable = words(model)
    source = TokenSource(vocabulary(model) if prompts == "ids" else speakable, seed)
    # Half a character or a special token is no text, so that its event in a stream would be empty and its time lost.
    step = -(-len(speakable) // ANSWER_WORDS)
    bias = {str(token): ANSWER_BIAS for token in speakable[::step].tolist()}
    text = _Text(model) if prompts != "ids" else None
    for request, tokens in zip(trace.requests, source.prompts(trace), strict=True):
        prompt = tokens if text is None else text(tokens)
        body = {
            "model": name,
            **({"messages": [{"role": "user", "content": prompt}]} if prompts == "chat" else {"prompt": prompt}),
            "max_tokens": request.output,
            "min_tokens": request.output,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": bias,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        yield {"session_id": request.session, "payload": body} | ({"delay": request.delay_ms} if request.turn else {})


def words(model: Path) -> NDArray[np.int64]:
    """Tokens that are a space and a word, and stay so beside each other. Raises BenchError if there are under 16."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = []
    for token in vocabulary(model).tolist():
        text = tokenizer.decode([token])
        doubled = tokenizer.encode(text + text, add_special_tokens=False).ids
        if text[:1] == " " and text[1:].isalpha() and text.isascii() and doubled == [token, token]:
            found.append(token)
    if len(found) < 16:
        raise BenchError(f"the tokenizer of {model} has {len(found)} tokens that are words: prompts cannot be text")
    return np.array(found, np.int64)


class _Text:
    def __init__(self, model: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def __call__(self, tokens: list[int]) -> str:
        """The text of tokens. Raises BenchError if it is not cut into the same tokens again."""
        text = str(self._tokenizer.decode(tokens))
        if self._tokenizer.encode(text, add_special_tokens=False).ids != tokens:
            raise BenchError("a prompt's text is not cut into the same tokens again: send ids")
        return text
