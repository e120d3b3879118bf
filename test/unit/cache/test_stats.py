from __future__ import annotations

import torch

from sglang_ced.cache.state import CacheState
from sglang_ced.cache.step import Span
from sglang_ced.config import CedConfig


def test_rows_of_a_cold_prompt_a_hit_and_a_decode_step_are_counted(config: CedConfig) -> None:
    """Window 16, 4 + 4 layers, bounded: worked out by hand."""
    state = CacheState(config, 1024, 4, replay="bounded", page_size=2)
    table = torch.arange(2048).view(4, 512)
    ids = list(range(200))

    def run(*spans: Span) -> None:
        state.commit(state.plan(spans, table))

    run(Span(0, 1, ids, 0, 100, 100, 99))
    cold = state.stats
    assert (cold.rows, cold.new_rows, cold.replay_rows) == (100, 100, 0)
    assert (cold.decoder_rows, cold.trimmed_rows, cold.hits) == (16, 84, 0)
    assert cold.layer_rows == 100 * 4 + 16 * 4

    state.stats = type(cold)()
    run(
        Span(1, 1, ids, 60, 100, 100, 99),
        Span(2, 1, ids, 64, 70, 70, 69),
        Span(0, 1, ids, 100, 101, 100, 100, decode=True),
    )
    warm = state.stats
    assert (warm.forwards, warm.hits, warm.hit_tokens) == (1, 2, 124), "all hits of a batch take one forward"
    assert (warm.rows, warm.new_rows, warm.replay_rows) == (16 + 40 + 16 + 6 + 1, 47, 32)
    assert warm.decoder_rows == 16 + 16 + 1
    assert warm.replay_layer_rows == 32 * 4 + (64 - 54) * 4
    assert warm.ring_rows_read == 2 * 15
    assert warm.replay_share == warm.replay_layer_rows / warm.layer_rows
    assert state.ring_occupancy == (24 + 24 + 22) / (4 * 24)
