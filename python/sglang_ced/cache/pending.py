"""First halves of ratio-2 pairs whose second token has not come yet."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ced.cache.layout import PENDING_RING, CacheLayout
from sglang_ced.cache.step import PairPlan
from sglang_ced.cache.window import StaleRowError


class PendingPairs:
    """float32 [pair sources, request slots * ring, 2 (kv, gate), head_dim], tagged like the window ring."""

    def __init__(self, layout: CacheLayout, num_slots: int, device: str | torch.device = "cpu") -> None:
        self.place = {source: i for i, source in enumerate(layout.pair_sources)}
        rows = num_slots * PENDING_RING
        self.data = torch.zeros(len(self.place), rows, 2, layout.config.head_dim, device=device)
        self.tags = torch.full((rows,), -1, dtype=torch.int64, device=device)

    def check(self, plan: PairPlan) -> None:
        """Raise StaleRowError unless every half that this step completes was left by its own request."""
        wrong = int((self.tags[plan.prior_rows] != plan.prior_tags).sum())
        if wrong:
            raise StaleRowError(f"pending pair: {wrong} first halves were not left by their request", rows=wrong)

    def exchange(self, source: int, plan: PairPlan, kv_gate: Tensor) -> Tensor:
        """Keep unpaired halves and give whole pairs: float32 [rows, 2, D] (kv, gate) -> [pairs, 2 tokens, 2, D]."""
        pool = self.data[self.place[source]]
        rows = torch.cat((pool[plan.prior_rows], kv_gate))
        pairs = torch.stack((rows[plan.first], rows[plan.second]), 1)
        pool[plan.ring_rows] = kv_gate[plan.kept_rows]
        return pairs

    def commit(self, plan: PairPlan) -> None:
        self.tags[plan.ring_rows] = plan.ring_tags
