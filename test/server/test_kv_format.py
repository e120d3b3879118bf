"""`--ced-kv-format bfloat16`: the answers of an engine that stores what the publisher stores, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from oracle import after_hit
from traffic import prompt_ids

from sglang_ced.engine.offline import OfflineEngine

if TYPE_CHECKING:
    from servers import Server

LAUNCH = {
    "arguments": (
        *("--ced-kv-format", "bfloat16", "--enable-return-hidden-states"),
        *("--page-size", "16", "--max-total-tokens", "4096"),
    ),
}


@pytest.mark.parametrize(("length", "hit"), [(200, 0), (300, 160)])
def test_a_server_of_bfloat16_gives_the_logits_of_a_published_engine(
    server: Server, bounded: OfflineEngine, length: int, hit: int
) -> None:
    prompt = prompt_ids(length, 9)
    assert server.post("/flush_cache").status_code == 200
    if hit:
        server.generate(prompt[: hit + 1], 1)
    answer = server.generate(prompt, 6, return_hidden_states=True)
    assert answer["meta_info"]["cached_tokens"] == hit
    tokens, logits = after_hit(bounded, prompt, 6, hit, outputs_from=0)
    assert answer["output_ids"] == tokens
    prefill, *decoded = answer["meta_info"]["hidden_states"]
    hidden = torch.tensor(prefill + decoded, dtype=torch.bfloat16)
    assert torch.equal(bounded.model.logits(hidden), logits)


def test_the_launch_says_the_format_and_its_bytes(server: Server) -> None:
    assert "KV format bfloat16, 288.0 bytes a token" in server.output()
    assert bool(server.generate(prompt_ids(5, 1), 2)["output_ids"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ced-kv-format", "fp8"), "argument --ced-kv-format: invalid choice: 'fp8'"),
        (("--kv-cache-dtype", "bfloat16"), "--kv-cache-dtype bfloat16: leave it out; --ced-kv-format chooses"),
    ],
)
def test_a_wrong_format_is_refused_by_name(
    launch: Callable[..., tuple[int, str]], model: Path, words: tuple[str, ...], says: str
) -> None:
    code, output = launch(model, *words)
    assert code != 0
    assert says in output
