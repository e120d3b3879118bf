"""All hidden states of a prompt: no decoder row is trimmed, after a hit and over chunks alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from oracle import after_hit
from traffic import prompt_ids

from sglang_ced.engine.offline import OfflineEngine

if TYPE_CHECKING:
    from servers import Server

pytestmark = pytest.mark.slow

CHUNK = 256
LAUNCH = {"arguments": ("--enable-return-hidden-states", "--page-size", "16", "--chunked-prefill-size", str(CHUNK))}


@pytest.mark.parametrize(("length", "hit"), [(200, 0), (300, 160), (600, 0)])
def test_hidden_states_give_the_logits(server: Server, bounded: OfflineEngine, length: int, hit: int) -> None:
    prompt = prompt_ids(length, 8)
    assert server.post("/flush_cache").status_code == 200
    if hit:
        server.generate(prompt[: hit + 1], 1)
    answer = server.generate(prompt, 3, return_hidden_states=True)
    assert answer["meta_info"]["cached_tokens"] == hit
    # Outputs from 0: the decoder runs every row that the encoder does, replayed ones too.
    tokens, logits = after_hit(bounded, prompt, 3, hit, outputs_from=0)
    assert answer["output_ids"] == tokens
    prefill, *decoded = answer["meta_info"]["hidden_states"]
    # SGLang keeps those of the last chunk.
    first = hit + (length - hit - 1) // CHUNK * CHUNK
    hidden = torch.tensor(prefill + decoded, dtype=torch.bfloat16)
    assert len(hidden) == length - first + 2
    torch.testing.assert_close(bounded.model.logits(hidden), logits[first - hit :], rtol=0, atol=0)
