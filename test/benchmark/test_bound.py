"""benchmark/kernels/bound.py: the bytes of a decode step, counted in other ways."""

from __future__ import annotations

import pytest
from benchmark.kernels.bound import decode_bytes

from sglang_ced.cache.layout import CacheLayout
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.cli.models import bundled_path


@pytest.fixture(scope="module")
def toy() -> Checkpoint:
    return Checkpoint.open(bundled_path("ced-toy"))


def test_weights_are_all_but_unused_experts_rows_and_routing_of_images(toy: Checkpoint) -> None:
    config, parts = toy.config, toy.nbytes_by_part()
    unused = parts["routed experts"] * (1 - config.num_experts_per_tok / config.n_routed_experts)
    unused += parts["embed"] * (1 - 1 / config.vocab_size)
    for rows in config.engram_num_embeddings:
        row = config.engram_head_dim + config.engram_head_dim // 32
        unused += row * (rows - config.engram_rows_per_token)
    unused += sum(toy.tensor(f"layers.{i}.ffn.gate.bias_vl").nbytes for i in range(config.num_hidden_layers))
    found = decode_bytes(toy.path, config, 100)["weights"]
    assert found == pytest.approx(sum(parts.values()) - unused, abs=1)


def test_cache_of_a_short_context_is_read_whole(toy: Checkpoint) -> None:
    """Below the window and the top-k, every layer reads its window, its groups, and index layers all keys."""
    config, layout, context = toy.config, CacheLayout(toy.config), 32
    expected = config.num_hidden_layers * context * layout.window_record.nbytes
    for plan in config.layers:
        if plan.ratio:
            expected += context // plan.ratio * layout.global_record.nbytes
        if plan.owns_selection:
            expected += context // plan.ratio * layout.index_record.nbytes
    assert decode_bytes(toy.path, config, context)["cache"] == expected


def test_long_context_adds_index_keys_only(toy: Checkpoint) -> None:
    config, layout = toy.config, CacheLayout(toy.config)
    scored_whole = [p for p in config.layers if p.owns_selection and p.candidate_source is None]
    grown = decode_bytes(toy.path, config, 6000)["cache"] - decode_bytes(toy.path, config, 4000)["cache"]
    assert grown == sum(2000 // plan.ratio for plan in scored_whole) * layout.index_record.nbytes
