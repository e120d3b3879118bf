"""Sliding-window KV of running requests: one ring per request slot and layer, every row tagged with its owner.

Never shared, never in the prefix cache. A read of a row that is not the request's own, or is not the position asked
for, raises: in the field that fault shows as leaked tool tags and word salad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ced.cache.layout import CacheLayout
from sglang_ced.cache.step import HalfPlan
from sglang_ced.kernels.records import exchange_records


class StaleRowError(RuntimeError):
    """Ring or pending rows were to be read that their request did not write; `rows` of them."""

    def __init__(self, message: str, rows: int) -> None:
        super().__init__(message)
        self.rows = rows


class WindowRing:
    """uint8 [layers, request slots * capacity, window record]; row of position p in slot s: s * capacity + p %
    capacity.

    Encoder and decoder layers run on different rows, so each half has its own tags.
    """

    def __init__(self, layout: CacheLayout, num_slots: int, device: str | torch.device = "cpu") -> None:
        config, self.record = layout.config, layout.window_record
        rows = num_slots * layout.ring_capacity
        self.data = torch.zeros(config.num_hidden_layers, rows, self.record.nbytes, dtype=torch.uint8, device=device)
        self.tags = torch.full((2, rows), -1, dtype=torch.int64, device=device)

    def check(self, half: int, plan: HalfPlan) -> None:
        """Raise StaleRowError unless every ring row this step will read carries its owner's tag for that position."""
        wrong = self.tags[half, plan.prior_rows] != plan.prior_tags
        if bool(wrong.any()):
            where = int(wrong.nonzero()[0])
            raise StaleRowError(
                f"window ring: {int(wrong.sum())} stale rows, first at ring row {int(plan.prior_rows[where])}: "
                f"wanted tag {int(plan.prior_tags[where])}, found {int(self.tags[half, plan.prior_rows[where]])}",
                rows=int(wrong.sum()),
            )

    def exchange(self, layer: int, plan: HalfPlan, kv: Tensor) -> Tensor:
        """Store this step's rows of one layer and give all window rows the step attends to.

        kv bfloat16 [rows of the half, head_dim], already rounded to e4m3 -> bfloat16 [prior + rows, head_dim].
        """
        rows = (plan.prior_rows, plan.kept_rows, plan.ring_rows)
        return exchange_records(self.data[layer], *rows, kv, self.record)

    def commit(self, half: int, plan: HalfPlan) -> None:
        """Tag the rows that this step wrote in every layer of the half."""
        self.tags[half, plan.ring_rows] = plan.ring_tags
