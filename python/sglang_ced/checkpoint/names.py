"""Names, shapes and stored forms of the published checkpoint (docs: reference/checkpoint.md)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from sglang_ced.config import QUANT_BLOCK, CedConfig


class CheckpointError(ValueError):
    """A checkpoint lacks something, holds something unexpected, or cannot be read. The message names it."""


class Kind(StrEnum):
    """How a tensor is stored."""

    PLAIN = "bf16 or f32"
    BF16 = "bf16"
    F32 = "f32"
    FP8 = "fp8"  # F8_E4M3, and `.scale` F8_E8M0 with one byte per 32x32 tile
    FP4 = "fp4"  # I8 with two e2m1 per byte, and `.scale` F8_E8M0 with one byte per 32 inputs
    TABLE = "fp8 rows"  # F8_E4M3, and `.scale` F8_E8M0 with one byte per 32 along the row


@dataclass(frozen=True)
class StoredSpec:
    """One tensor of a safetensors file: any of these dtypes (in its own spelling), exactly this shape."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of the model: its shape in elements and its stored form. `optional`: may be absent."""

    shape: tuple[int, ...]
    kind: Kind
    optional: bool = False

    def stored(self, name: str) -> dict[str, StoredSpec]:
        """The tensors that hold it in a file: `name`, and its scale where the kind has one."""
        if self.kind is Kind.PLAIN:
            return {name: StoredSpec(("BF16", "F32"), self.shape)}
        if self.kind is Kind.BF16:
            return {name: StoredSpec(("BF16",), self.shape)}
        if self.kind is Kind.F32:
            return {name: StoredSpec(("F32",), self.shape)}
        rows, cols = self.shape
        blocks = math.ceil(cols / QUANT_BLOCK)
        scale_rows = math.ceil(rows / QUANT_BLOCK) if self.kind is Kind.FP8 else rows
        fp4 = self.kind is Kind.FP4
        weight = StoredSpec(("I8",), (rows, cols // 2)) if fp4 else StoredSpec(("F8_E4M3",), self.shape)
        return {name: weight, scale_name(name): StoredSpec(("F8_E8M0",), (scale_rows, blocks))}


def scale_name(name: str) -> str:
    """`a.b.weight` -> `a.b.scale`."""
    return name.removesuffix("weight") + "scale"


# -- what a checkpoint must hold -----------------------------------------------------------------------------


def expected_tensors(config: CedConfig) -> dict[str, TensorSpec]:
    """Every text tensor of the published layout, by the name of its main stored tensor.

    Scales have no entry of their own, `TensorSpec.stored` gives them. Draft and vision tensors have none.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    out = {
        "embed.weight": TensorSpec((vocab, hidden), Kind.BF16),
        "head.weight": TensorSpec((vocab, hidden), Kind.BF16),
        "norm.weight": TensorSpec((hidden,), Kind.PLAIN),
    }
    for index in range(config.num_hidden_layers):
        out |= {f"layers.{index}.{name}": spec for name, spec in _layer(config, index)}
    return out


_LINEAR = {"fp8": Kind.FP8, "bf16": Kind.BF16}
_EXPERT = {"fp4": Kind.FP4, "fp8": Kind.FP8, "bf16": Kind.BF16}

_Named = Iterator[tuple[str, TensorSpec]]


def _layer(c: CedConfig, index: int) -> _Named:
    plan, hidden = c.layers[index], c.hidden_size
    if plan.has_engram:
        yield from _engram(c, c.engram_num_embeddings[c.engram_layer_ids.index(index)])
    mixes = c.hc_mult * (2 + c.hc_mult)
    for site in ("attn", "ffn"):
        yield f"hc_{site}_fn", TensorSpec((mixes, c.hc_mult * hidden), Kind.F32)
        yield f"hc_{site}_base", TensorSpec((mixes,), Kind.F32)
        yield f"hc_{site}_scale", TensorSpec((3,), Kind.F32)
        yield f"{site}_norm.weight", TensorSpec((hidden,), Kind.PLAIN)
    yield from _attention(c)
    if plan.owns_kv:
        yield from _compressor(c, plan.ratio)
    if plan.owns_selection:
        yield from _indexer(c, plan.owns_kv)
    yield from _moe(c)


def _attention(c: CedConfig) -> _Named:
    linear, q_width = _LINEAR[c.linear_format], c.num_attention_heads * c.head_dim
    out_rank = c.o_groups * c.o_lora_rank
    yield "attn.wq_a.weight", TensorSpec((c.q_lora_rank, c.hidden_size), linear)
    yield "attn.q_norm.weight", TensorSpec((c.q_lora_rank,), Kind.PLAIN)
    yield "attn.wq_b.weight", TensorSpec((q_width, c.q_lora_rank), linear)
    yield "attn.wkv.weight", TensorSpec((c.head_dim, c.hidden_size), linear)
    yield "attn.kv_norm.weight", TensorSpec((c.head_dim,), Kind.PLAIN)
    yield "attn.attn_sink", TensorSpec((c.num_attention_heads,), Kind.F32)
    yield "attn.wo_a.weight", TensorSpec((out_rank, q_width // c.o_groups), linear)
    yield "attn.wo_b.weight", TensorSpec((c.hidden_size, out_rank), linear)


def _compressor(c: CedConfig, ratio: int) -> _Named:
    yield "attn.compressor.wkv.weight", TensorSpec((c.head_dim, c.hidden_size), Kind.BF16)
    yield "attn.compressor.norm.weight", TensorSpec((c.head_dim,), Kind.PLAIN)
    if ratio > 1:  # a group of one token has nothing to weigh
        yield "attn.compressor.wgate.weight", TensorSpec((c.head_dim, c.hidden_size), Kind.BF16)


def _indexer(c: CedConfig, owns_keys: bool) -> _Named:
    width = c.index_n_heads * c.index_head_dim
    yield "attn.indexer.wq_b.weight", TensorSpec((width, c.q_lora_rank), _LINEAR[c.linear_format])
    yield "attn.indexer.weights_proj.weight", TensorSpec((c.index_n_heads, c.hidden_size), Kind.BF16)
    if owns_keys:
        yield "attn.indexer.wk.weight", TensorSpec((c.index_head_dim, c.head_dim), Kind.BF16)
        yield "attn.indexer.k_norm.weight", TensorSpec((c.index_head_dim,), Kind.PLAIN)


def _moe(c: CedConfig) -> _Named:
    yield "ffn.gate.weight", TensorSpec((c.n_routed_experts, c.hidden_size), Kind.BF16)
    yield "ffn.gate.bias", TensorSpec((c.n_routed_experts,), Kind.F32)
    # Routes image tokens only, so text-only checkpoints may come without it.
    yield "ffn.gate.bias_vl", TensorSpec((c.n_routed_experts,), Kind.F32, optional=True)
    experts = [("shared_experts", c.moe_intermediate_size * c.n_shared_experts, _LINEAR[c.linear_format])]
    routed = _EXPERT[c.expert_format]
    experts += [(f"experts.{e}", c.moe_intermediate_size, routed) for e in range(c.n_routed_experts)]
    for base, inner, kind in experts:
        yield f"ffn.{base}.w1.weight", TensorSpec((inner, c.hidden_size), kind)
        yield f"ffn.{base}.w2.weight", TensorSpec((c.hidden_size, inner), kind)
        yield f"ffn.{base}.w3.weight", TensorSpec((inner, c.hidden_size), kind)


def _engram(c: CedConfig, rows: int) -> _Named:
    width = c.engram_rows_per_token * c.engram_head_dim
    yield "engram.embed.weight", TensorSpec((rows, c.engram_head_dim), Kind.TABLE)
    # One key per stream, then one value.
    yield "engram.wkv.weight", TensorSpec(((c.hc_mult + 1) * c.hidden_size, width), _LINEAR[c.linear_format])
    yield "engram.q_weight", TensorSpec((c.hc_mult, c.hidden_size), Kind.BF16)
    yield "engram.k_weight", TensorSpec((c.hc_mult, c.hidden_size), Kind.BF16)


# -- parts of the model --------------------------------------------------------------------------------------

DRAFT, VISION, UNKNOWN = "draft", "vision", "unknown"
NOT_LOADED = (DRAFT, VISION)

# The first pattern that matches decides; every norm of the text model is a norm, wherever it sits.
_PARTS = tuple(
    (part, re.compile(pattern))
    for part, pattern in (
        (DRAFT, r"mtp\."),
        (VISION, r"(vision|aligner)\.|image_(start|end|newline)$"),
        ("embed", r"embed\.weight$"),
        ("head", r"head\.weight$"),
        ("norms", r"(layers\.\d+\.([a-z_]+\.)*[a-z_]*)?norm\.weight$"),
        ("indexer", r"layers\.\d+\.attn\.indexer\."),
        ("compressor", r"layers\.\d+\.attn\.compressor\."),
        ("attention", r"layers\.\d+\.attn\."),
        ("router", r"layers\.\d+\.ffn\.gate\."),
        ("shared experts", r"layers\.\d+\.ffn\.shared_experts\."),
        ("routed experts", r"layers\.\d+\.ffn\.experts\."),
        ("mHC", r"layers\.\d+\.hc_(attn|ffn)_(fn|base|scale)$"),
        ("Engram tables", r"layers\.\d+\.engram\.embed\."),
        ("Engram projections", r"layers\.\d+\.engram\."),
    )
)
PARTS = (*(part for part, _ in _PARTS[2:]), DRAFT, VISION)


def part_of(name: str) -> str:
    """The part of the model that a stored tensor belongs to: one of `PARTS`, or `UNKNOWN`."""
    return next((part for part, pattern in _PARTS if pattern.match(name)), UNKNOWN)
