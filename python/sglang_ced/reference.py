"""The whole architecture in one file: plain, differentiable PyTorch over full sequences.

No cache, no replay, no stored formats, O(n^2) work. This is the definition that the engine is tested against and
what the bundled checkpoint is trained with. Section numbers refer to `docs/explanation/architecture.md`. Parameter
names are those of the published checkpoint, so a state dict is a checkpoint. Shapes: B sequences, T tokens, n
streams (hc_mult), d hidden.

Rounding points are the publisher's. Long sums and transcendental functions are taken in `Numerics.accumulate` and
then rounded to float32; short ones are float32 in a written order. With float64 neither the order of a sum nor the
vector width of an `exp` shows after rounding, which lets this file, the engine and the server agree bit for bit
whatever the batch looks like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sglang_ced import formats
from sglang_ced.config import CedConfig, EngramHash, LayerPlan

HC_NORM_EPS = 1e-20


@dataclass(frozen=True)
class Numerics:
    """Where and how values are rounded.

    fake_quant: round to fp8 / fp4 where the published model does (straight-through gradients).
    storage: dtype of activations between operations. accumulate: dtype of sums.
    partial_sums: quantised linears add float32 partial sums of 32 inputs in order, as the publisher's kernels do.
    softmax_block: keys per online-softmax block, after which probabilities are rounded to `storage`.
    """

    fake_quant: bool = True
    storage: torch.dtype = torch.bfloat16
    accumulate: torch.dtype = torch.float64
    partial_sums: bool = True
    softmax_block: int = 64

    def quant(self, fake: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return x + (fake(x.detach()) - x.detach()) if self.fake_quant else x

    def apply(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A sum or transcendental function of x, as float32."""
        return function(x.to(self.accumulate)).float()

    def matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., K] by weight [N, K], float32."""
        return F.linear(x.to(self.accumulate), weight.to(self.accumulate)).float()

    def block_matmul(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same for quantised operands, whose blocks of 32 inputs share a scale. float32."""
        if not self.partial_sums:
            return self.matmul(x, weight)
        blocks = zip(x.split(formats.BLOCK, -1), weight.split(formats.BLOCK, -1), strict=True)
        parts = (self.matmul(x_block, w_block) for x_block, w_block in blocks)
        return sum(parts, torch.zeros((), device=x.device))


@dataclass(frozen=True)
class Bounds:
    """Bounded replay (docs/explanation/replay.md), for rows at or above a floor: they see no window key below it.

    encoder, decoder: floors of the two halves. hit: tokens whose global KV is taken from `cached`, the state after a
    forward over (at least) them.
    """

    encoder: int = 0
    decoder: int = 0
    hit: int = 0
    cached: Shared | None = None


@dataclass
class Shared:
    """What layers hand to later layers of the same forward, by source layer. `ids` [B, T]."""

    ids: Tensor
    bounds: Bounds = Bounds()
    latents: dict[int, Tensor] = field(default_factory=dict)  # [B, G, head_dim], rotated and fp4-rounded
    index_keys: dict[int, Tensor] = field(default_factory=dict)  # [B, G, index_head_dim]
    selected: dict[int, Tensor] = field(default_factory=dict)  # [B, T, k] group ids, ascending, -1 = none
    candidates: dict[int, Tensor] = field(default_factory=dict)  # [B, T, G] bool
    trace: dict[str, Tensor] | None = None

    def note(self, name: str, value: Tensor) -> None:
        if self.trace is not None:
            self.trace[name] = value


# -- small pieces -----------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """y = x W^T. `quantized` linears see their input rounded to e4m3 per 32 (section 4.1). No bias anywhere."""

    def __init__(self, n_in: int, n_out: int, fmt: str, numerics: Numerics) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in))
        self.fmt, self.numerics = fmt, numerics

    def forward(self, x: Tensor) -> Tensor:
        num, weight = self.numerics, self.weight
        if self.fmt == "bf16":
            return num.matmul(x, weight).to(num.storage)
        x = num.quant(formats.fake_quant_e4m3, x)
        if weight.requires_grad:  # a loaded weight lies on the grid already
            weight = num.quant(fake_weight_e4m3 if self.fmt == "fp8" else formats.fake_quant_e2m1_ue8m0, weight)
        return num.block_matmul(x, weight).to(num.storage)


def fake_weight_e4m3(weight: Tensor) -> Tensor:
    """Round a weight to e4m3 with one power-of-two scale per 32x32 tile, and back."""
    return formats.dequantize_weight_e4m3(*formats.quantize_weight_e4m3(weight)).to(weight.dtype)


class RMSNorm(nn.Module):
    """Section 2.4: one rounding, at the end. eps 1e-20 keeps zero rows zero."""

    def __init__(self, dim: int, eps: float, numerics: Numerics) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.numerics = eps, numerics

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return (x * inverse_rms(x, self.eps, self.numerics) * self.weight).to(self.numerics.storage)


def inverse_rms(x: Tensor, eps: float, numerics: Numerics) -> Tensor:
    """float32 [..., 1]."""
    return torch.rsqrt(numerics.apply(lambda wide: wide.square().mean(-1, keepdim=True), x) + eps)


def add_up(x: Tensor, dim: int) -> Tensor:
    """Sum of a few terms, first to last, in the dtype of x; the dimension stays with size 1."""
    first, *rest = x.split(1, dim)
    for term in rest:
        first = first + term
    return first


def rope_frequencies(config: CedConfig, compressed: bool) -> Tensor:
    """Section 2.5. float32 [rope/2]; YaRN applies to the compressed table only."""
    rope = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    freq = 1.0 / theta ** (torch.arange(0, rope, 2, dtype=torch.float32) / rope)
    yarn = config.rope_scaling
    if not compressed or yarn is None:
        return freq

    def correction(rotations: float) -> float:
        return rope * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), rope - 1)
    ramp = ((torch.arange(rope // 2, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freq / yarn.factor * ramp + freq * (1 - ramp)


def rotate(x: Tensor, positions: Tensor, freq: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2*len(freq) dims of x [B, T, ..., D] in adjacent pairs by its positions [T]."""
    angle = positions.to(torch.float32)[:, None] * freq  # a float32 product: at 10^6 a wider one differs visibly
    cos, sin = angle.double().cos().float(), angle.double().sin().float()
    if inverse:
        sin = -sin
    shape = (1, len(positions), *[1] * (x.dim() - 3), len(freq))
    cos, sin = cos.view(shape), sin.view(shape)
    rope = 2 * len(freq)
    even, odd = x[..., -rope:].float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    return torch.cat((x[..., :-rope], turned.to(x.dtype)), -1)


# -- hyper-connections (2.6) ------------------------------------------------------------------------------------------


class HyperConnection(nn.Module):
    """Mixes of one site: pre (used one site later), post and comb (used here)."""

    def __init__(self, config: CedConfig, numerics: Numerics) -> None:
        super().__init__()
        n = config.hc_mult
        self.fn = nn.Parameter(torch.empty(n * (n + 2), n * config.hidden_size))
        self.base = nn.Parameter(torch.empty(n * (n + 2)))
        self.scale = nn.Parameter(torch.empty(3))
        self.n, self.iters, self.eps, self.numerics = n, config.hc_sinkhorn_iters, config.hc_eps, numerics

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """streams [B, T, n, d] -> float32 pre [B, T, n], post [B, T, n], comb [B, T, n, n] (source, destination)."""
        n, num, flat = self.n, self.numerics, streams.flatten(-2).float()
        mixes = num.matmul(flat, self.fn) * inverse_rms(flat, HC_NORM_EPS, num)
        pre, post, comb = mixes.split((n, n, n * n), -1)
        pre = num.apply(torch.sigmoid, pre * self.scale[0] + self.base[:n]) + self.eps
        post = 2 * num.apply(torch.sigmoid, post * self.scale[1] + self.base[n : 2 * n])
        comb = (comb * self.scale[2] + self.base[2 * n :]).unflatten(-1, (n, n))
        comb = num.apply(lambda wide: torch.softmax(wide, -1), comb) + self.eps
        comb = comb / (add_up(comb, -2) + self.eps)
        for _ in range(self.iters - 1):
            comb = comb / (add_up(comb, -1) + self.eps)
            comb = comb / (add_up(comb, -2) + self.eps)
        return pre, post, comb


def collapse(streams: Tensor, weights: Tensor, numerics: Numerics) -> Tensor:
    """Weighted sum of the streams: [B, T, n, d], [B, T, n] -> [B, T, d]."""
    return add_up(streams.float() * weights.unsqueeze(-1), -2).squeeze(-2).to(numerics.storage)


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, numerics: Numerics) -> Tensor:
    """Sublayer output y [B, T, d] written back to the mixed streams [B, T, n, d]."""
    mixed = add_up(comb.unsqueeze(-1) * streams.float().unsqueeze(-2), -3).squeeze(-3)
    return (post.unsqueeze(-1) * y.float().unsqueeze(-2) + mixed).to(numerics.storage)


# -- attention (3) ----------------------------------------------------------------------------------------------------


class Compressor(nn.Module):
    """Section 3.3: latents of whole groups, before rotation. Owned by KV sources only."""

    def __init__(self, config: CedConfig, ratio: int, numerics: Numerics) -> None:
        super().__init__()
        self.ratio, self.numerics = ratio, numerics
        self.wkv = Linear(config.hidden_size, config.head_dim, "bf16", numerics)
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps, numerics)
        if ratio == 2:
            self.wgate = Linear(config.hidden_size, config.head_dim, "bf16", numerics)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, d] -> [B, T // ratio, head_dim]."""
        if self.ratio == 1:
            return self.norm(self.wkv(x))
        x = x[:, : x.shape[1] // 2 * 2]
        num = self.numerics
        kv = num.matmul(x, self.wkv.weight).unflatten(1, (-1, 2))
        gate = num.matmul(x, self.wgate.weight).unflatten(1, (-1, 2))
        share = num.apply(lambda wide: torch.softmax(wide, 2), gate)  # per channel, over the two tokens
        return self.norm(add_up(share * kv, 2).squeeze(2).to(num.storage))


class Indexer(nn.Module):
    """Section 3.4: which groups a token attends to. Keys are made by KV sources, queries by every index source."""

    def __init__(self, config: CedConfig, owns_keys: bool, numerics: Numerics) -> None:
        super().__init__()
        self.heads, self.dim, self.numerics = config.index_n_heads, config.index_head_dim, numerics
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim, config.linear_format, numerics)
        self.weights_proj = Linear(config.hidden_size, self.heads, "bf16", numerics)
        if owns_keys:
            self.wk = Linear(config.head_dim, self.dim, "bf16", numerics)
            self.k_norm = RMSNorm(self.dim, config.rms_norm_eps, numerics)

    def keys(self, latents: Tensor, positions: Tensor, freq: Tensor) -> Tensor:
        """Latents before rotation [B, G, head_dim], first positions [G] -> keys [B, G, index_head_dim]."""
        keys = rotate(self.k_norm(self.wk(latents)), positions, freq)
        return self.numerics.quant(formats.fake_quant_e2m1_ue8m0, keys)

    def scores(self, x: Tensor, q_lora: Tensor, keys: Tensor, positions: Tensor, freq: Tensor) -> Tensor:
        """[B, T, d], [B, T, q_lora], [B, G, dim] -> [B, T, G], rounded to storage at each of the publisher's points."""
        num = self.numerics
        q = rotate(self.wq_b(q_lora).unflatten(-1, (self.heads, self.dim)), positions, freq)
        q = num.quant(formats.fake_quant_e2m1_ue8m0, q)
        weights = (self.weights_proj(x) * (self.dim**-0.5 * self.heads**-0.5)).to(num.storage)
        wide = num.accumulate
        dots = torch.einsum("bthd,bgd->bthg", q.to(wide), keys.to(wide)).to(num.storage)
        weighted = dots.relu() * weights.unsqueeze(-1)
        return num.apply(lambda w: w.sum(2), weighted).to(num.storage)


def top_groups(scores: Tensor, k: int) -> Tensor:
    """The k best groups of each row [..., G] -> ids [..., min(k, G)] ascending, -1 where fewer are visible.

    Hidden groups score -inf. Ties go to the lower index; NaN counts as hidden.
    """
    groups = scores.shape[-1]
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    best, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    k = min(k, groups)
    ids = torch.where(best[..., :k] == -torch.inf, groups, ids[..., :k]).sort(-1).values
    return torch.where(ids == groups, -1, ids)


def candidate_groups(scores: Tensor, visible: Tensor, blocks: int, block_size: int) -> Tensor:
    """Section 3.5: scores [B, T, G] (hidden = -inf), visible counts [T] -> bool [B, T, G] of the best blocks'
    groups."""
    groups = scores.shape[-1]
    padded = F.pad(scores, (0, -groups % block_size), value=-torch.inf)
    best = padded.unflatten(-1, (-1, block_size)).amax(-1)
    newest = torch.where(visible > 0, (visible - 1) // block_size, -1)
    pinned = torch.arange(best.shape[-1], device=scores.device) == newest[:, None]
    best = torch.where(pinned, torch.inf, best)
    chosen = top_groups(best, blocks)
    keep = torch.zeros(*best.shape[:-1], best.shape[-1] + 1, dtype=torch.bool, device=scores.device)
    keep.scatter_(-1, torch.where(chosen < 0, best.shape[-1], chosen), True)
    return keep[..., :-1].repeat_interleave(block_size, -1)[..., :groups]


def attend(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, numerics: Numerics) -> Tensor:
    """Section 3.2: one softmax over the given keys, which are also the values.

    q [B, T, H, D], keys [B, T, K, D], mask [B, T, K] (True = attend), sink [H] (denominator only) -> [B, T, H, D].
    A row without keys gives zeros.
    """
    num, wide, block = numerics, numerics.accumulate, numerics.softmax_block
    scale, sink = q.shape[-1] ** -0.5, sink.view(1, 1, -1)
    top = torch.full(q.shape[:-1], -torch.inf, device=q.device)
    total, out = torch.zeros_like(top, dtype=wide), torch.zeros_like(q, dtype=wide)
    for start in range(0, keys.shape[2], block):
        part = keys[:, :, start : start + block].to(wide)
        scores = torch.einsum("bthd,btkd->bthk", q.to(wide), part).float() * scale
        scores = scores.masked_fill(~mask[:, :, None, start : start + block], -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        base = torch.where(new_top == -torch.inf, 0.0, new_top)
        fade, p = num.apply(torch.exp, top - base), num.apply(torch.exp, scores - base.unsqueeze(-1))
        total = total * fade + p.to(wide).sum(-1)
        out = out * fade.unsqueeze(-1) + torch.einsum("bthk,btkd->bthd", p.to(num.storage).to(wide), part)
        top = new_top
    base = torch.where(top == -torch.inf, 0.0, top)
    return (out / (total + num.apply(torch.exp, sink - base)).unsqueeze(-1)).to(num.storage)


class Attention(nn.Module):
    def __init__(self, config: CedConfig, plan: LayerPlan, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.plan, self.numerics = config, plan, numerics
        c, fmt = config, config.linear_format
        heads, dim = c.num_attention_heads, c.head_dim
        self.wq_a = Linear(c.hidden_size, c.q_lora_rank, fmt, numerics)
        self.q_norm = RMSNorm(c.q_lora_rank, c.rms_norm_eps, numerics)
        self.wq_b = Linear(c.q_lora_rank, heads * dim, fmt, numerics)
        self.wkv = Linear(c.hidden_size, dim, fmt, numerics)
        self.kv_norm = RMSNorm(dim, c.rms_norm_eps, numerics)
        self.attn_sink = nn.Parameter(torch.empty(heads))
        self.wo_a = Linear(heads * dim // c.o_groups, c.o_groups * c.o_lora_rank, fmt, numerics)
        self.wo_b = Linear(c.o_groups * c.o_lora_rank, c.hidden_size, fmt, numerics)
        if plan.owns_kv:
            self.compressor = Compressor(c, plan.ratio, numerics)
        if plan.owns_selection:
            self.indexer = Indexer(c, plan.owns_kv, numerics)

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        """x [B, T, d] -> [B, T, d]. Reads and leaves global KV and selections in `shared`."""
        c, num, tokens = self.config, self.numerics, x.shape[1]
        positions = torch.arange(tokens, device=x.device)
        freq = rope_frequencies(c, compressed=self.plan.ratio > 0).to(x.device)
        q_lora = self.q_norm(self.wq_a(x))
        q = rotate(self.wq_b(q_lora).unflatten(-1, (c.num_attention_heads, c.head_dim)), positions, freq)
        kv = num.quant(formats.fake_quant_e4m3, rotate(self.kv_norm(self.wkv(x)), positions, freq))

        floor = shared.bounds.decoder if self.plan.is_decoder else shared.bounds.encoder
        lowest = torch.where(positions >= floor, floor, 0)
        window = torch.maximum(positions - c.sliding_window + 1, lowest)[:, None]
        window = window + torch.arange(c.sliding_window, device=x.device)
        mask = (window <= positions[:, None]).expand(x.shape[0], -1, -1)
        keys = kv[:, window.clamp_max(tokens - 1)]
        if self.plan.ratio:
            groups = self._select(x, q_lora, positions, freq, shared)
            latents = shared.latents[self.plan.kv_source or 0]
            batch = torch.arange(x.shape[0], device=x.device)[:, None, None]
            keys = torch.cat((keys, latents[batch, groups.clamp_min(0)]), 2)
            mask = torch.cat((mask, groups >= 0), 2)
            order = torch.sort(~mask, dim=-1, stable=True).indices  # no holes: softmax blocks count attended keys
            keys, mask = keys.take_along_dim(order.unsqueeze(-1), 2), mask.take_along_dim(order, 2)
        out = rotate(attend(q, keys, mask, self.attn_sink, num), positions, freq, inverse=True)
        return self.wo_b(self._project_groups(out))

    def _select(self, x: Tensor, q_lora: Tensor, positions: Tensor, freq: Tensor, shared: Shared) -> Tensor:
        c, plan = self.config, self.plan
        kv_source, index_source = plan.kv_source or 0, plan.index_source or 0
        if plan.owns_kv:
            latents = self.compressor(x)
            first = torch.arange(latents.shape[1], device=x.device) * plan.ratio
            index_keys = self.indexer.keys(latents, first, freq)
            latents = self.numerics.quant(formats.fake_quant_e2m1_e4m3, rotate(latents, first, freq))
            if shared.bounds.cached is not None:
                old, kept = shared.bounds.cached, shared.bounds.hit // plan.ratio
                latents = torch.cat((old.latents[plan.index][:, :kept], latents[:, kept:]), 1)
                index_keys = torch.cat((old.index_keys[plan.index][:, :kept], index_keys[:, kept:]), 1)
            shared.latents[plan.index], shared.index_keys[plan.index] = latents, index_keys
        if plan.owns_selection:
            keys = shared.index_keys[kv_source]
            visible = (positions + 1) // plan.ratio
            hidden = torch.arange(keys.shape[1], device=x.device) >= visible[:, None]
            scores = self.indexer.scores(x, q_lora, keys, positions, freq).masked_fill(hidden, -torch.inf)
            if plan.candidate_source is not None:
                scores = scores.masked_fill(~shared.candidates[plan.candidate_source], -torch.inf)
            elif plan.index == c.candidate_source_layer_id:
                shared.candidates[plan.index] = candidate_groups(
                    scores, visible, c.candidate_topk_blocks, c.candidate_block_size
                )
            shared.selected[plan.index] = top_groups(scores, c.index_topk)
            shared.note(f"layer{plan.index}_topk", shared.selected[plan.index])
        return shared.selected[index_source]

    def _project_groups(self, out: Tensor) -> Tensor:
        """wo_a, group by group. Its input is never rounded to fp8, whatever its weight's format."""
        c, num = self.config, self.numerics
        grouped = out.flatten(-2).unflatten(-1, (c.o_groups, -1)).to(num.accumulate)
        weight = self.wo_a.weight
        if self.wo_a.fmt != "bf16" and weight.requires_grad:
            weight = num.quant(fake_weight_e4m3, weight)
        weight = weight.unflatten(0, (c.o_groups, c.o_lora_rank)).to(num.accumulate)
        return torch.einsum("btgi,gri->btgr", grouped, weight).flatten(-2).to(num.storage)


# -- mixture of experts (4) -------------------------------------------------------------------------------------------


class Expert(nn.Module):
    """SwiGLU with clamps; the routing weight is applied before the down projection."""

    def __init__(self, config: CedConfig, fmt: str, numerics: Numerics) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.moe_intermediate_size
        self.w1, self.w3 = Linear(d, inner, fmt, numerics), Linear(d, inner, fmt, numerics)
        self.w2 = Linear(inner, d, fmt, numerics)
        self.limit, self.numerics = config.swiglu_limit, numerics

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x [R, d], weight [R] -> [R, d]."""
        gate = self.w1(x).float().clamp_max(self.limit)
        up = self.w3(x).float().clamp(-self.limit, self.limit)
        inner = self.numerics.apply(F.silu, gate) * up
        if weight is not None:
            inner = inner * weight.unsqueeze(-1)
        return self.w2(inner.to(self.numerics.storage))


class Gate(nn.Module):
    def __init__(self, config: CedConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.n_routed_experts))


class MoE(nn.Module):
    def __init__(self, config: CedConfig, numerics: Numerics) -> None:
        super().__init__()
        self.config, self.numerics = config, numerics
        self.gate = Gate(config)
        self.experts = nn.ModuleList(
            Expert(config, config.expert_format, numerics) for _ in range(config.n_routed_experts)
        )
        self.shared_experts = Expert(config, config.linear_format, numerics)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, d] -> expert ids [R, k], weights float32 [R, k]. The bias chooses and does not weigh."""
        c = self.config
        logits = self.numerics.matmul(x, self.gate.weight) / c.gate_temp
        scores = self.numerics.apply(lambda wide: F.softplus(wide).sqrt(), logits)
        chosen = torch.sort(scores + self.gate.bias, dim=-1, descending=True, stable=True).indices
        chosen = chosen[:, : c.num_experts_per_tok]
        weights = scores.gather(-1, chosen)
        return chosen, weights / (add_up(weights, -1) + 1e-20) * c.routed_scaling_factor

    def forward(self, x: Tensor, note: Callable[[str, Tensor], None]) -> Tensor:
        """x [B, T, d] -> [B, T, d]."""
        rows = x.flatten(0, 1)
        chosen, weights = self.route(rows)
        note("router", chosen.view(*x.shape[:2], -1))
        out = torch.zeros(rows.shape, device=x.device)
        for index, expert in enumerate(self.experts):
            row, place = (chosen == index).nonzero(as_tuple=True)
            if len(row):
                out = out.index_add(0, row, expert(rows[row], weights[row, place]).float())
        return (out + self.shared_experts(rows).float()).to(self.numerics.storage).view_as(x)


# -- Engram (5) -------------------------------------------------------------------------------------------------------


def ngram_rows(ids: Tensor, dead: Tensor, token_map: Tensor, pad: int, constants: EngramHash) -> Tensor:
    """Section 5.2: token ids [B, T] and dead (image) flags -> table rows int64 [B, T, (max_ngram - 1) * heads]."""
    pad_class = token_map[pad]
    alive = ~dead
    mixed, rows = torch.zeros_like(ids), []
    for back, multiplier in enumerate(constants.multipliers):
        past = F.pad(ids, (back, 0), value=pad)[:, : ids.shape[1]]
        # Once a step back is blocked, every older one is: `alive` only ever loses tokens.
        alive = alive & F.pad(~dead, (back, 0), value=False)[:, : ids.shape[1]]
        mixed = mixed ^ (torch.where(alive, token_map[past], pad_class) * multiplier)
        if back:
            primes = torch.tensor(constants.primes[back - 1], device=ids.device)
            rows.append(mixed.unsqueeze(-1) % primes)
    return torch.cat(rows, -1) + torch.tensor(constants.offsets, device=ids.device)


class EngramTable(nn.Module):
    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim))


class Engram(nn.Module):
    def __init__(self, config: CedConfig, layer: int, numerics: Numerics) -> None:
        super().__init__()
        c = self.config = config
        self.constants, self.numerics = c.engram_hashes[layer], numerics
        width = c.engram_rows_per_token * c.engram_head_dim
        self.embed = EngramTable(self.constants.num_rows, c.engram_head_dim)
        self.wkv = Linear(width, (c.hc_mult + 1) * c.hidden_size, c.linear_format, numerics)
        self.q_weight = nn.Parameter(torch.empty(c.hc_mult, c.hidden_size))
        self.k_weight = nn.Parameter(torch.empty(c.hc_mult, c.hidden_size))

    def forward(self, streams: Tensor, ids: Tensor, token_map: Tensor) -> Tensor:
        """streams [B, T, n, d], ids [B, T] -> streams with the n-gram memory added."""
        c, num = self.config, self.numerics
        dead = torch.zeros_like(ids, dtype=torch.bool) if c.image_token_id is None else ids == c.image_token_id
        rows = ngram_rows(ids, dead, token_map, c.engram_pad_token_id, self.constants)
        memory = F.embedding(rows, self.embed.weight).to(num.storage)
        memory = num.quant(formats.fake_quant_e4m3, memory).flatten(-2)
        keys, value = self.wkv(memory).float().split((c.hc_mult * c.hidden_size, c.hidden_size), -1)
        keys, x = keys.unflatten(-1, (c.hc_mult, -1)), streams.float()
        weighted = x * (self.q_weight * self.k_weight).float() * keys
        dot = num.apply(lambda wide: wide.sum(-1, keepdim=True), weighted)
        dot = dot * inverse_rms(x, c.rms_norm_eps, num) * inverse_rms(keys, c.rms_norm_eps, num) * c.hidden_size**-0.5
        root = num.apply(torch.sqrt, dot.abs().clamp_min(1e-6))
        gate = num.apply(torch.sigmoid, dot.sign() * root)
        gate = gate.masked_fill(dead[:, :, None, None], 0.0)
        return (x + gate * value.unsqueeze(-2)).to(num.storage)


# -- the stack (2.3) --------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, config: CedConfig, plan: LayerPlan, numerics: Numerics) -> None:
        super().__init__()
        self.plan, self.numerics = plan, numerics
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, numerics)
        self.attn = Attention(config, plan, numerics)
        self.ffn = MoE(config, numerics)
        self.hc_attn = HyperConnection(config, numerics)
        self.hc_ffn = HyperConnection(config, numerics)
        if plan.has_engram:
            self.engram = Engram(config, plan.index, numerics)

    def forward(self, streams: Tensor, pre_mix: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
        """streams [B, T, n, d] (after Engram), pre_mix [B, T, n] of the previous site -> both for the next layer."""
        num, layer = self.numerics, self.plan.index
        pre, post, comb = self.hc_attn(streams)
        out = self.attn(self.attn_norm(collapse(streams, pre_mix, num)), shared)
        shared.note(f"layer{layer}_attn_out", out)
        streams = expand(out, streams, post, comb, num)
        next_pre, post, comb = self.hc_ffn(streams)
        x = self.ffn_norm(collapse(streams, pre, num))
        out = self.ffn(x, lambda name, value: shared.note(f"layer{layer}_{name}", value))
        shared.note(f"layer{layer}_ffn_out", out)
        return expand(out, streams, post, comb, num), next_pre


class Reference(nn.Module):
    """Token ids [B, T] -> logits float32 [B, T, vocab].

    token_map: int64 [vocab], token id -> n-gram class (section 5.1); needed when the config has Engram layers.
    """

    def __init__(self, config: CedConfig, token_map: Tensor | None = None, numerics: Numerics | None = None) -> None:
        super().__init__()
        if config.engram_layer_ids and token_map is None:
            raise ValueError("this config has Engram layers: pass token_map")
        num = self.numerics = numerics or Numerics()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, plan, num) for plan in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, num)
        self.head = Linear(config.hidden_size, config.vocab_size, "bf16", num)
        empty = torch.zeros(0, dtype=torch.int64)
        self.register_buffer("token_map", empty if token_map is None else token_map, persistent=False)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load dequantised tensors by checkpoint name. Raises KeyError / RuntimeError for missing names or shapes."""
        renamed = {name: tensors[published_name(name)] for name in self.state_dict()}
        self.load_state_dict(renamed)
        self.requires_grad_(False)

    def start(
        self, ids: Tensor, trace: dict[str, Tensor] | None = None, bounds: Bounds | None = None
    ) -> tuple[Tensor, Tensor, Shared]:
        """Streams, first pre_mix (stream 0) and the shared state, before layer 0."""
        h = self.embed(ids).to(self.numerics.storage)
        streams = h.unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)
        pre_mix = F.one_hot(torch.zeros_like(ids), self.config.hc_mult).float()
        return streams, pre_mix, Shared(ids, bounds or Bounds(), trace=trace)

    def engram(self, layer: int, streams: Tensor, shared: Shared) -> Tensor:
        """The n-gram layer before block `layer`, or the streams as they are."""
        block = self.layers[layer]
        if not block.plan.has_engram:
            return streams
        streams = block.engram(streams, shared.ids, self.token_map)
        shared.note(f"layer{layer}_engram_out", streams)
        return streams

    def finish(self, streams: Tensor, pre_mix: Tensor, shared: Shared) -> Tensor:
        final = self.norm(collapse(streams, pre_mix, self.numerics))
        shared.note("final_norm", final)
        return self.numerics.matmul(final, self.head.weight)

    def forward(self, ids: Tensor, trace: dict[str, Tensor] | None = None, bounds: Bounds | None = None) -> Tensor:
        """Logits; `trace` collects what layers note, `bounds` restricts windows as bounded replay does."""
        return self.run(ids, trace, bounds)[0]

    def run(
        self, ids: Tensor, trace: dict[str, Tensor] | None = None, bounds: Bounds | None = None
    ) -> tuple[Tensor, Shared]:
        """The same, with the state that layers shared."""
        streams, pre_mix, shared = self.start(ids, trace, bounds)
        for layer, block in enumerate(self.layers):
            streams = self.engram(layer, streams, shared)
            streams, pre_mix = block(streams, pre_mix, shared)
            shared.note(f"layer{layer}_out", streams)
            shared.note(f"layer{layer}_pre_mix", pre_mix)
        return self.finish(streams, pre_mix, shared), shared


def published_name(name: str) -> str:
    """Parameter name of this file -> tensor name of the published checkpoint."""
    for site in ("hc_attn", "hc_ffn"):
        name = name.replace(f"{site}.", f"{site}_")
    return name
