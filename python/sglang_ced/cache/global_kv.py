"""Global KV and index keys, addressed by KV slot; shared through the prefix cache and written once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_ced.cache.layout import CacheLayout
from sglang_ced.kernels.records import write_records


class GlobalKv:
    """One pool per source layer, in the records of the layout.

    kv[source]: uint8 [ceil(slots / ratio), global record]; index[source]: uint8 [ceil(slots / ratio), index record].
    Group of token slot s: s // ratio, so both tokens of a pair must sit side by side (an even page size sees to it).
    """

    def __init__(self, layout: CacheLayout, num_kv_slots: int, device: str | torch.device = "cpu") -> None:
        self.layout, self.num_kv_slots = layout, num_kv_slots
        rows = {source: -(-num_kv_slots // layout.ratio(source)) for source in layout.sources}
        kv, index = layout.global_record.nbytes, layout.index_record.nbytes
        self.kv = {s: _zeros(n, kv, device) for s, n in rows.items()}
        self.index = {s: _zeros(n, index, device) for s, n in rows.items()}

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in (*self.kv.values(), *self.index.values()))

    def write(self, source: int, groups: Tensor, latents: Tensor, index_keys: Tensor) -> None:
        """Store groups (pool rows int64 [G]) of one source: rotated latents [G, head_dim], keys [G, index_head_dim]."""
        write_records(self.kv[source], groups, latents, self.layout.global_record)
        write_records(self.index[source], groups, index_keys, self.layout.index_record)


def _zeros(rows: int, nbytes: int, device: str | torch.device) -> Tensor:
    """uint8 [rows, nbytes]. On a CPU, numpy's zeros take memory as it is written, page by page."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(np.zeros((rows, nbytes), dtype=np.uint8))
    return torch.zeros(rows, nbytes, dtype=torch.uint8, device=device)
