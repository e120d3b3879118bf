"""SGLang's KV pool and its sizing, over our cache: the allocator hands out token slots, the bytes are
`CacheState`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator, MemoryPoolConfig
from sglang.srt.runtime_context import get_schedule

from sglang_ced.cache.state import CacheState
from sglang_ced.plugin import worker
from sglang_ced.plugin.memory import slot_bytes, token_bytes

logger = logging.getLogger(__name__)


class CedPoolConfigurator(DefaultPoolConfigurator):
    """Sizes the pool by the bytes that a token and a running request really take.

    SGLang's own cell size counts heads of every layer (model_executor/pool_configurator.py:340), which this
    model does not have: only its KV source layers store anything per token.
    """

    def __init__(self, kvc: Any) -> None:
        super().__init__(kvc)
        layout = worker.current().layout
        self._bytes_per_token = token_bytes(layout)
        # One slot more than requests: row 0 takes the writes of padded batches
        # (mem_cache/memory_pool.py:402).
        self._slots_bytes = slot_bytes(layout) * ((get_schedule().max_running_requests or 1) + 1)

    def calculate_pool_sizes(self, available_bytes: int, page_size: int) -> MemoryPoolConfig:
        """Pages that fit into `available_bytes` beside the window rings."""
        tokens = int(max(0, available_bytes - self._slots_bytes) / self._bytes_per_token)
        return MemoryPoolConfig(max_total_num_tokens=tokens // page_size * page_size)


def around_create_configurator(original: Callable[[Any], Any], kvc: Any) -> Any:
    """Ours in this process (model_executor/pool_configurator.py:1715 `create_memory_pool_configurator`)."""
    return CedPoolConfigurator(kvc) if worker.is_attached() else original(kvc)


class CedKVPool(MHATokenToKVPool):
    """A pool whose buffers are the global KV and the index keys of the source layers.

    `k_buffer[i]`: uint8 [slots / ratio, KV bytes] of source layer i; `v_buffer[i]` its index keys. Nothing is
    written through SGLang's per-layer calls: the layers write through `state`.
    """

    state: CacheState

    def _create_buffers(self) -> None:
        """Called by the stock constructor (mem_cache/memory_pool.py:2286), which knows sizes but not the
        model.
        """
        served = worker.current()
        self.state = CacheState(
            served.config,
            num_kv_slots=self.size + self.page_size,
            num_request_slots=(get_schedule().max_running_requests or 1) + 1,
            device=self.device,
            replay=served.replay,
            page_size=self.page_size,
            strict=served.options.ced_strict,
            kv_format=served.layout.kv_format,
        )
        keys, index = self.state.global_kv.kv, self.state.global_kv.index
        self.k_buffer = [keys[layer] for layer in sorted(keys)]
        self.v_buffer = [index[layer] for layer in sorted(index)]
        self._kv_buffer_descs: list[Any] = []

    def _clear_buffers(self) -> None:
        del self.k_buffer, self.v_buffer, self.state

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of global KV and of index keys."""
        return _nbytes(self.k_buffer), _nbytes(self.v_buffer)

    def _finalize_allocation_log(self, num_tokens: int) -> None:
        super()._finalize_allocation_log(num_tokens)
        layout, slots = worker.current().layout, len(self.state.slots)
        logger.info(
            "sglang-ced: KV format %s, %.1f bytes a token; %d request slots of %d bytes (rings, pending pairs): "
            "%.2f GB", layout.kv_format, layout.global_bytes_per_token,
            slots, slot_bytes(layout), slots * slot_bytes(layout) / 2**30,
        )  # fmt: skip


def _nbytes(buffers: list[torch.Tensor]) -> int:
    return sum(buffer.nbytes for buffer in buffers)
