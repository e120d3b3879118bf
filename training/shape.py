"""The shape of `ced-tiny`: the published structure in small."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from sglang_ced.checkpoint.make_toy import toy_config

WINDOW = 16


def config(tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json for a tokenizer: eight layers, encoder and decoder of four, every mechanism."""
    raw = toy_config(tokenizer)
    raw["text_config"].update(
        hidden_size=128,
        moe_intermediate_size=64,
        sliding_window=WINDOW,
        index_topk=16,
        candidate_topk_blocks=16,
        candidate_block_size=4,
        hc_sinkhorn_iters=8,
        engram_vocab_size=2003,
        engram_num_embeddings=[12126, 12436],
    )
    return raw
