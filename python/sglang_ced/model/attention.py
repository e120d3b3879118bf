"""Attention of one layer: window and global KV, selection of groups, the write side of a global KV source."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.config import CedConfig, LayerPlan
from sglang_ced.kernels import attention, compressor, indexer, projection, rope
from sglang_ced.kernels.linear import linear, matmul
from sglang_ced.kernels.norm import rms_norm
from sglang_ced.kernels.records import round_index
from sglang_ced.model.context import HalfContext, RopeTables

SELECT_ROWS = 64  # rows scored at once: bounds the score table to SELECT_ROWS x groups


class GlobalSource:
    """Makes global KV and index keys of new rows. Only KV sources have one."""

    def __init__(self, checkpoint: Checkpoint, plan: LayerPlan, tables: RopeTables) -> None:
        name, self.layer, self.ratio = f"layers.{plan.index}.attn", plan.index, plan.ratio
        self.wkv, self.norm = (checkpoint.tensor(f"{name}.compressor.{part}.weight") for part in ("wkv", "norm"))
        self.wgate = checkpoint.tensor(f"{name}.compressor.wgate.weight") if plan.ratio == 2 else None
        self.wk, self.k_norm = (checkpoint.tensor(f"{name}.indexer.{part}.weight") for part in ("wk", "k_norm"))
        self.eps, self.freq = checkpoint.config.rms_norm_eps, tables.compressed

    def write(self, x: Tensor, context: HalfContext) -> None:
        """x bfloat16 [rows of the step, d]: replay rows never write; a pair writes when its second token is new."""
        step, state = context.step, context.state
        if self.wgate is None:
            latents, groups = linear(x[step.new_rows], self.wkv), step.new_slots
            positions = step.positions[step.new_rows]
        else:
            assert step.pairs is not None
            kv_gate = torch.stack((matmul(x, self.wkv), matmul(x, self.wgate)), 1)
            pairs = state.pending.exchange(self.layer, step.pairs, kv_gate)
            latents, groups = compressor.pool_pairs(pairs[:, :, 0], pairs[:, :, 1]), step.pairs.groups
            positions = step.pairs.positions
        latents = rms_norm(latents, self.norm, self.eps)
        cos, sin = rope.angles(positions, self.freq)
        keys = rope.rotate(rms_norm(linear(latents, self.wk), self.k_norm, self.eps), cos, sin)
        state.global_kv.write(self.layer, groups, rope.rotate(latents, cos, sin), keys)


class Selector:
    """Scores the groups each row may see and keeps the best. Only index sources have one."""

    def __init__(self, checkpoint: Checkpoint, plan: LayerPlan) -> None:
        config, name, self.plan = checkpoint.config, f"layers.{plan.index}.attn.indexer", plan
        self.heads, self.dim, self.top_k = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = checkpoint.weight(f"{name}.wq_b")
        self.weights_proj = checkpoint.tensor(f"{name}.weights_proj.weight")
        self.keeps_candidates = config.candidate_source_layer_id == plan.index
        self.blocks, self.block_size = config.candidate_topk_blocks, config.candidate_block_size

    def select(self, x: Tensor, q_lora: Tensor, context: HalfContext) -> Tensor:
        """x [T, d], q_lora [T, q_lora] -> pool slots int64 [T, K], ascending by group, -1 at the end."""
        ratio, layer, source = self.plan.ratio, self.plan.index, self.plan.kv_source
        assert source is not None
        q = linear(q_lora, self.wq_b).unflatten(-1, (self.heads, self.dim))
        q = round_index(rope.rotate(q, *context.compressed))
        weights = linear(x, self.weights_proj) * (self.dim**-0.5 * self.heads**-0.5)
        pool, visible = context.state.global_kv.index[source], (context.positions + 1) // ratio
        width = min(self.top_k, max((len(reach.groups[ratio]) for reach in context.reach), default=0))
        out = torch.full((len(x), width), -1, dtype=torch.int64, device=x.device)
        kept: list[Tensor] = []
        for place, reach in enumerate(context.reach):
            slots = reach.groups[ratio]
            group_ids = torch.arange(len(slots), device=x.device)
            for start in range(reach.first, reach.last, SELECT_ROWS):
                rows = slice(start, min(start + SELECT_ROWS, reach.last))
                allowed = None
                if self.plan.candidate_source is not None:
                    of_span = context.candidates[self.plan.candidate_source][place]
                    allowed = of_span[rows.start - reach.first : rows.stop - reach.first]
                if allowed is not None and len(slots) > self.blocks * self.block_size:
                    chosen = self._choose_listed(q[rows], weights[rows], pool, slots, visible[rows], allowed)
                else:
                    scores = indexer.index_scores_at(q[rows], weights[rows], pool, slots)
                    scores = scores.masked_fill(group_ids >= visible[rows, None], -torch.inf)
                    if allowed is not None:
                        scores = scores.masked_fill(~allowed, -torch.inf)
                    if self.keeps_candidates:
                        kept.append(indexer.candidate_groups(scores, visible[rows], self.blocks, self.block_size))
                    chosen = indexer.top_groups(scores, self.top_k)
                out[rows, : chosen.shape[1]] = _at(slots, chosen)
            if self.keeps_candidates:
                context.candidates.setdefault(layer, []).append(torch.cat(kept))
                kept = []
        return out

    def _choose_listed(
        self, q: Tensor, weights: Tensor, pool: Tensor, slots: Tensor, visible: Tensor, allowed: Tensor
    ) -> Tensor:
        """The best of each row's candidates, allowed bool [T, G] -> groups int64 [T, K] as `top_groups` gives them.

        Candidates alone are scored: worth it where they are fewer than the groups.
        """
        groups = indexer.candidate_lists(allowed)
        scores = indexer.index_scores_at(q, weights, pool, _at(slots, groups))
        chosen = indexer.top_groups(scores.masked_fill(groups >= visible[:, None], -torch.inf), self.top_k)
        return torch.where(chosen < 0, -1, groups.gather(1, chosen.clamp_min(0)))


def _at(values: Tensor, index: Tensor) -> Tensor:
    """values [N] at index [...], -1 where the index is."""
    return torch.where(index < 0, -1, values[index.clamp_min(0)]) if len(values) else torch.full_like(index, -1)


class Attention:
    def __init__(self, checkpoint: Checkpoint, plan: LayerPlan, tables: RopeTables) -> None:
        config: CedConfig = checkpoint.config
        name, self.plan, self.config = f"layers.{plan.index}.attn", plan, config
        wq_a, wq_b, wkv, self.wo_a, self.wo_b = (
            checkpoint.weight(f"{name}.{part}") for part in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
        )
        q_norm, kv_norm = (checkpoint.tensor(f"{name}.{part}.weight") for part in ("q_norm", "kv_norm"))
        self.inputs = projection.InputWeights(wq_a, q_norm, wq_b, wkv, kv_norm)
        self.sink = checkpoint.tensor(f"{name}.attn_sink")
        self.source = GlobalSource(checkpoint, plan, tables) if plan.owns_kv else None
        self.selector = Selector(checkpoint, plan) if plan.owns_selection else None

    def __call__(self, x: Tensor, context: HalfContext) -> Tensor:
        """bfloat16 [T, d] -> bfloat16 [T, d] for the rows of the half. Global KV of the step is in the pool already."""
        c, plan = self.config, self.plan
        cos, sin = context.angles(plan.ratio)
        q, q_lora, kv = projection.attention_inputs(x, self.inputs, cos, sin, c.rms_norm_eps)
        if self.selector is not None:
            groups = self.selector.select(x, q_lora, context)
            context.keys[plan.index] = attention.join_keys(context.plan.window, groups, context.plan.num_window_rows)
        window = context.state.window.exchange(plan.index, context.plan, kv)
        pool, keys = None, context.plan.window
        if plan.kv_source is not None and plan.index_source is not None:
            pool, keys = context.state.global_kv.kv[plan.kv_source], context.keys[plan.index_source]
        out = attention.attend(q, window, pool, keys, self.sink)
        return projection.attention_output(out, cos, sin, self.wo_a, self.wo_b, c.o_groups)
