"""Single ops against the same arithmetic done op by op in plain torch: what fusing, packing and choosing buy."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from benchmark.measure import interleaved
from torch import Tensor
from torch.nn import functional as F

from sglang_ced.config import CedConfig
from sglang_ced.formats import Record
from sglang_ced.kernels import attention, mhc, moe, rope
from sglang_ced.kernels.linear import linear
from sglang_ced.kernels.records import round_index
from sglang_ced.model.attention import Selector
from sglang_ced.model.context import RopeTables
from sglang_ced.model.transformer import Transformer

Figures = dict[str, float]
ROWS = (1, 512)  # a decode step of one request, a prefill chunk


def ratios(times: dict[str, float], of: str) -> Figures:
    """How many times `of` is faster than each other case."""
    return {name: each / times[of] for name, each in times.items() if name != of}


# -- choice of groups -------------------------------------------------------------------------------------------------


class PlainSelector:
    """The choice of one decode row over all keys, op by op in float32: nothing fused, no candidates.

    keys: packed records, unpacked at every call, or float32 [G, D].
    """

    def __init__(self, selector: Selector, keys: Tensor) -> None:
        self.selector, self.keys = selector, keys

    def select(self, x: Tensor, q_lora: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        s = self.selector
        q = round_index(rope.rotate(linear(q_lora, s.wq_b).unflatten(-1, (s.heads, s.dim)), *angles)).float()
        weights = (linear(x, s.weights_proj) * (s.dim**-0.5 * s.heads**-0.5)).float()
        keys = self.keys if self.keys.dtype == torch.float32 else Record(s.dim, "index").decode(self.keys).float()
        dots = torch.einsum("thd,gd->thg", q, keys)
        scores = (dots.relu() * weights.unsqueeze(-1)).sum(1)
        return scores.topk(min(s.top_k, len(keys)), dim=-1).indices.sort(-1).values


def index_ratios(model: Transformer, groups: int, budget: float) -> Figures:
    """All index layers of the decoder for one row that sees `groups` keys -> how much faster than plain torch.

    packed: plain torch starts from the packed keys, as ours does. float: from keys that lie there as float32.
    """
    selectors = [
        block.attention.selector
        for block in model.blocks
        if block.plan.is_decoder and block.attention.selector is not None
    ]
    config, (first, *_) = model.config, selectors
    source = first.plan.kv_source
    keys = Record(first.dim, "index").encode(torch.randn(groups, first.dim))
    positions = torch.tensor([groups - 1])
    angles = rope.angles(positions, RopeTables(config).compressed)
    x = torch.randn(1, config.hidden_size).to(torch.bfloat16)
    q_lora = torch.randn(1, config.q_lora_rank).to(torch.bfloat16)
    reach = SimpleNamespace(groups={1: torch.arange(groups)}, first=0, last=1)

    def ours() -> None:
        context = SimpleNamespace(
            compressed=angles,
            positions=positions,
            reach=(reach,),
            candidates={},
            state=SimpleNamespace(global_kv=SimpleNamespace(index={source: keys})),
        )
        for selector in selectors:
            selector.select(x, q_lora, context)

    def plain(stored: Tensor) -> None:
        for selector in selectors:
            PlainSelector(selector, stored).select(x, q_lora, angles)

    wide = Record(first.dim, "index").decode(keys).float()
    cases = {"ours": ours, "packed": lambda: plain(keys), "float": lambda: plain(wide)}
    return ratios(interleaved(cases, budget), "ours")


# -- hyper-connections and gate ---------------------------------------------------------------------------------------


def mhc_ratios(config: CedConfig, budget: float) -> Figures:
    """One site: mixes, collapse and expand -> how much faster than op by op in float32, by rows."""
    n, d = config.hc_mult, config.hidden_size
    site = (torch.randn(n * (n + 2), n * d) / (n * d) ** 0.5, torch.randn(n * (n + 2)), torch.randn(3))
    loops = (config.hc_sinkhorn_iters, config.hc_eps)
    out = {}
    for rows in ROWS:
        streams, y = torch.randn(rows, n, d).to(torch.bfloat16), torch.randn(rows, d).to(torch.bfloat16)

        def ours(streams: Tensor = streams, y: Tensor = y) -> None:
            pre, post, comb = mhc.mixes(streams, *site, *loops)
            mhc.collapse(streams, pre)
            mhc.expand(y, streams, post, comb)

        def plain(streams: Tensor = streams, y: Tensor = y) -> None:
            _plain_site(streams, y, *site, *loops)

        out[str(rows)] = ratios(interleaved({"ours": ours, "plain": plain}, budget), "ours")["plain"]
    return out


def _plain_site(
    streams: Tensor, y: Tensor, fn: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float
) -> tuple[Tensor, Tensor]:
    n, wide = streams.shape[-2], streams.float()
    flat = wide.flatten(-2)
    mixes = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-20)
    pre, post, comb = mixes.split((n, n, n * n), -1)
    pre = torch.sigmoid(pre * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
    comb = torch.softmax((comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    collapsed = (wide * pre.unsqueeze(-1)).sum(-2).to(torch.bfloat16)
    mixed = (comb.unsqueeze(-1) * wide.unsqueeze(-2)).sum(-3)
    return collapsed, (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(torch.bfloat16)


def gate_ratios(config: CedConfig, budget: float) -> Figures:
    """Router: logits, scores, top-k, weights -> how much faster than op by op in float32, by rows."""
    weight = torch.randn(config.n_routed_experts, config.hidden_size).to(torch.bfloat16)
    bias, top_k, scale = torch.randn(len(weight)), config.num_experts_per_tok, config.routed_scaling_factor
    out = {}
    for rows in ROWS:
        x = torch.randn(rows, config.hidden_size).to(torch.bfloat16)

        def ours(x: Tensor = x) -> None:
            moe.route(x, weight, bias, top_k, scale)

        def plain(x: Tensor = x) -> None:
            scores = F.softplus(F.linear(x.float(), weight.float())).sqrt()
            chosen = (scores + bias).topk(top_k, dim=-1).indices
            picked = scores.gather(-1, chosen)
            _ = picked / (picked.sum(-1, keepdim=True) + 1e-20) * scale

        out[str(rows)] = ratios(interleaved({"ours": ours, "plain": plain}, budget), "ours")["plain"]
    return out


# -- packed keys ------------------------------------------------------------------------------------------------------


def attention_ratio(config: CedConfig, slots: int, budget: float) -> float:
    """One decode row over its window and `index_topk` groups out of a pool of `slots`: time with bfloat16 records over
    time with packed ones. Every call reads other groups, as layers and steps do, so records come from memory."""
    heads, dim, window, top_k = config.num_attention_heads, config.head_dim, config.sliding_window, config.index_topk
    values = torch.randn(slots, dim)
    pools = {"packed": Record(dim, "global").encode(values), "bfloat16": Record(dim, "global_bf16").encode(values)}
    q, near = torch.randn(1, heads, dim).to(torch.bfloat16), torch.randn(window, dim).to(torch.bfloat16)
    sink, first = torch.randn(heads), torch.arange(window)
    lists = [torch.cat((first, torch.randperm(slots)[:top_k].sort().values + window))[None] for _ in range(32)]

    def run(pool: Tensor) -> None:
        for keys in lists:
            attention.attend(q, near, pool, keys, sink)

    times = interleaved({name: lambda pool=pool: run(pool) for name, pool in pools.items()}, budget)
    return times["bfloat16"] / times["packed"]
