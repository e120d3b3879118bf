"""How much memory a process may still take, and what a running request takes of it."""

from __future__ import annotations

from sglang_ced.cache.layout import CacheLayout

# Per token slot of the pool SGLang keeps ids, positions and cache slots of the largest batch there could be,
# all int64 (model_executor/runner/eager_runner.py:118; three more positions for image models).
STOCK_BYTES_PER_TOKEN = 6 * 8


def slot_bytes(layout: CacheLayout) -> int:
    """Bytes that one running request takes beside its tokens: window rings of all layers and the pending
    pair.
    """
    return layout.window_bytes_per_slot + layout.pending_bytes_per_slot


def token_bytes(layout: CacheLayout) -> float:
    """Bytes that one token slot takes: its global KV and index keys, and SGLang's own buffers."""
    return layout.global_bytes_per_token + STOCK_BYTES_PER_TOKEN
