"""How much memory a process may still take, and what a running request takes of it."""

from __future__ import annotations

from pathlib import Path

import psutil

from sglang_ced.cache.layout import CacheLayout

# Per token slot of the pool SGLang keeps ids, positions and cache slots of the largest batch there could be,
# all int64 (model_executor/runner/eager_runner.py:118; three more positions for image models).
STOCK_BYTES_PER_TOKEN = 6 * 8

_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def free_bytes() -> int:
    """Bytes available on this machine, within the limit of the container if there is one."""
    free = psutil.virtual_memory().available
    for limit_file, used_file in _CGROUP_FILES:
        try:
            limit, used = limit_file.read_text().strip(), int(used_file.read_text())
        except (OSError, ValueError):
            continue
        if limit.isdigit():
            free = min(free, max(0, int(limit) - used))
    return int(free)


def slot_bytes(layout: CacheLayout) -> int:
    """Bytes that one running request takes beside its tokens: window rings of all layers and the pending
    pair.
    """
    return layout.window_bytes_per_slot + layout.pending_bytes_per_slot


def token_bytes(layout: CacheLayout) -> float:
    """Bytes that one token slot takes: its global KV and index keys, and SGLang's own buffers."""
    return layout.global_bytes_per_token + STOCK_BYTES_PER_TOKEN
