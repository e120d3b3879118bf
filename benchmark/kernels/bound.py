"""The bytes that one decode step must read, from the config and the headers of the checkpoint."""

from __future__ import annotations

from pathlib import Path

from sglang_ced.cache.layout import CacheLayout
from sglang_ced.checkpoint.files import read_headers
from sglang_ced.config import CedConfig


def decode_bytes(path: Path, config: CedConfig, context: int) -> dict[str, int]:
    """Bytes of one step of one request with `context` tokens behind it: {"weights": ..., "cache": ...}.

    weights: every stored weight once, scales included; of the routed experts those of one token, of the embedding and
    the n-gram tables one token's rows. cache: window, chosen groups, and the index keys that are scored.
    """
    return {"weights": _weights(path, config), "cache": _cache(config, context)}


def _weights(path: Path, c: CedConfig) -> int:
    total = 0.0
    for name, stored in read_headers(path).items():
        if ".ffn.experts." in name:
            total += stored.nbytes * c.num_experts_per_tok / c.n_routed_experts
        elif name == "embed.weight":
            total += stored.nbytes / c.vocab_size
        elif ".engram.embed." in name:
            total += stored.nbytes * c.engram_rows_per_token / stored.shape[0]
        elif not name.endswith("bias_vl"):  # routes image tokens
            total += stored.nbytes
    return round(total)


def _cache(c: CedConfig, context: int) -> int:
    layout, total = CacheLayout(c), 0
    for plan in c.layers:
        total += min(c.sliding_window, context) * layout.window_record.nbytes
        groups = context // plan.ratio if plan.ratio else 0
        total += min(c.index_topk, groups) * layout.global_record.nbytes
        if plan.owns_selection:
            limit = groups if plan.candidate_source is None else c.candidate_topk_blocks * c.candidate_block_size
            total += min(groups, limit) * layout.index_record.nbytes
    return total
