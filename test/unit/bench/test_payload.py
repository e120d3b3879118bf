"""Bodies as aiperf sends them: token-exact, whichever way prompts go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sglang_ced.bench.payload import PROMPTS, Prompts, words, write_payloads
from sglang_ced.bench.shapes import generate
from sglang_ced.cli.models import bundled_path

MODEL = bundled_path("ced-tiny")


@pytest.mark.parametrize("prompts", PROMPTS)
def test_every_body_has_the_tokens_of_its_request(tmp_path: Path, prompts: Prompts) -> None:
    trace = generate("agentx", 3, 0.01, seed=2, block=16, max_turns=3)
    write_payloads(trace, tmp_path / "p.jsonl", MODEL, "ced", prompts)
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    sent: dict[str, list[int]] = {}
    for row, request in zip(rows, trace.requests, strict=True):
        body = row["payload"]
        text = body["messages"][0]["content"] if prompts == "chat" else body["prompt"]
        tokens = text if prompts == "ids" else tokenizer.encode(text, add_special_tokens=False).ids
        assert len(tokens) == request.input
        assert (row["session_id"], row.get("delay", 0.0)) == (request.session, request.delay_ms)
        assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (request.output, True, True)
        before = sent.get(request.session, [])
        assert tokens[: len(before)] == before  # a turn begins with all of the turn before
        sent[request.session] = tokens


def test_answers_are_made_of_words_only(tmp_path: Path) -> None:
    write_payloads(generate("agentx", 1, 0.01, max_turns=1), tmp_path / "p.jsonl", MODEL, "ced")
    body = json.loads((tmp_path / "p.jsonl").read_text().splitlines()[0])["payload"]
    allowed = {int(token) for token in body["logit_bias"]}
    assert 16 <= len(allowed) <= 128
    assert allowed <= set(words(MODEL).tolist())
