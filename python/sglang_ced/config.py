"""What a checkpoint is (`CedConfig`) and what each of its layers owns, reads and shares (`LayerPlan`).

Pure data: read from a published `config.json` (`config_file.py`), checked field by field, imported by every other room.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sglang_ced.config_file import (
    INTS,
    MODEL_TYPES,
    QUANT_BLOCK,
    ConfigError,
    ConfigReader,
    RopeScaling,
    read_config_file,
)

__all__ = [
    "MODEL_TYPES",
    "QUANT_BLOCK",
    "CedConfig",
    "ConfigError",
    "EngramHash",
    "LayerPlan",
    "RopeScaling",
]

ENGRAM_SEED = 10007


@dataclass(frozen=True)
class LayerPlan:
    """What layer `index` owns and where it reads from. Layer ids are absolute.

    ratio: tokens per global KV group of this layer (0 = window only).
    kv_source / index_source: the layers whose global KV and whose top-k selection this layer reads; None if ratio 0.
    candidate_source: the layer whose candidate blocks bound this layer's own selection; None = all visible groups.
    """

    index: int
    ratio: int
    kv_source: int | None
    index_source: int | None
    candidate_source: int | None
    is_decoder: bool
    has_engram: bool

    @property
    def owns_kv(self) -> bool:
        """Has a compressor and writes global KV and index keys."""
        return self.kv_source == self.index

    @property
    def owns_selection(self) -> bool:
        """Scores groups itself and picks its top-k."""
        return self.index_source == self.index

    @property
    def mode(self) -> str:
        """`window`, `full`, `reindex` or `reuse`, as the technical report names the layers."""
        if self.ratio == 0:
            return "window"
        if self.owns_kv:
            return "full"
        return "reindex" if self.owns_selection else "reuse"


@dataclass(frozen=True)
class EngramHash:
    """Constants of the n-gram hash of one Engram layer (architecture.md 5.2).

    multipliers: [max_ngram]; primes: [max_ngram - 1][heads]; offsets: exclusive prefix sums in the same order, flat.
    """

    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]

    @cached_property
    def moduli(self) -> tuple[int, ...]:
        return tuple(p for row in self.primes for p in row)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        out, total = [], 0
        for prime in self.moduli:
            out.append(total)
            total += prime
        return tuple(out)

    @property
    def num_rows(self) -> int:
        return sum(self.moduli)


@dataclass(frozen=True)
class CedConfig:
    """The architecture of a checkpoint. Field names are those of the published `text_config`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: RopeScaling | None
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    gate_temp: float
    sliding_window: int
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    candidate_source_layer_id: int | None
    candidate_topk_blocks: int
    candidate_block_size: int
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_vocab_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_pad_token_id: int
    engram_compressed_vocab_size: int
    num_nextn_predict_layers: int
    linear_format: str  # "fp8" | "bf16": attention, shared-expert and Engram projections
    expert_format: str  # "fp4" | "fp8" | "bf16": routed experts
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    image_token_id: int | None
    has_vision: bool
    unknown_fields: tuple[str, ...]

    # -- reading ------------------------------------------------------------------------------------------------

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str], overrides: dict[str, Any] | None = None) -> CedConfig:
        """Read `<path>/config.json`; `overrides` replaces top-level or text fields by name.

        Raises FileNotFoundError (no such file) or ConfigError (not JSON, or a field that cannot be served).
        """
        file = Path(path) / "config.json"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no config.json here; --model-path wants a checkpoint directory")
        raw = read_config_file(file, overrides or {})
        try:
            return cls.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> CedConfig:
        """Build from a parsed `config.json`, nested (`text_config`) or flat. Raises ConfigError naming the field."""
        reader = ConfigReader(raw)
        config = cls(**reader.values(), unknown_fields=reader.unknown())
        _check(config)
        return config

    # -- derived ------------------------------------------------------------------------------------------------

    @cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """One plan per layer."""
        return tuple(self._plan(i) for i in range(self.num_hidden_layers))

    def _plan(self, index: int) -> LayerPlan:
        ratio = self.compress_ratios[index]
        kv = max((s for s in self.kv_source_layer_ids if s <= index), default=None) if ratio else None
        select = max((s for s in self.index_source_layer_ids if s <= index), default=None) if ratio else None
        source = self.candidate_source_layer_id
        bounded = select == index and source is not None and index > source
        return LayerPlan(
            index=index,
            ratio=ratio,
            kv_source=kv,
            index_source=select,
            candidate_source=source if bounded else None,
            is_decoder=index >= self.first_decoder_layer,
            has_engram=index in self.engram_layer_ids,
        )

    @property
    def first_decoder_layer(self) -> int:
        """The last KV source: it and all later layers are the decoder."""
        return self.kv_source_layer_ids[-1]

    @property
    def num_encoder_layers(self) -> int:
        return self.first_decoder_layer

    @property
    def num_decoder_layers(self) -> int:
        return self.num_hidden_layers - self.first_decoder_layer

    @property
    def max_ratio(self) -> int:
        return max(self.compress_ratios[: self.num_hidden_layers])

    @property
    def engram_rows_per_token(self) -> int:
        return (self.engram_max_ngram_size - 1) * self.engram_n_heads

    @cached_property
    def engram_hashes(self) -> dict[int, EngramHash]:
        """Hash constants by layer id. Primes ascend through all layers, n-gram orders and heads, none used twice."""
        import numpy as np

        orders, heads = self.engram_max_ngram_size - 1, self.engram_n_heads
        bound = max(1, (2**63 - 1) // max(1, self.engram_compressed_vocab_size) // 2)
        candidate = self.engram_vocab_size - 1
        out = {}
        for layer in self.engram_layer_ids:
            primes = []
            for _ in range(orders):
                row = []
                for _ in range(heads):
                    candidate = _next_prime(candidate)
                    row.append(candidate)
                primes.append(tuple(row))
            draw = np.random.default_rng(ENGRAM_SEED * layer).integers(0, bound, orders + 1, dtype=np.int64)
            multipliers = tuple(int(m) * 2 + 1 for m in draw)
            out[layer] = EngramHash(multipliers=multipliers, primes=tuple(primes))
        return out


# -- checks ----------------------------------------------------------------------------------------------------------


def _check(c: CedConfig) -> None:
    """Raise ConfigError where fields contradict each other or the architecture."""

    def need(ok: bool, field: str, why: str) -> None:
        if not ok:
            raise ConfigError(f"{field}: {why}")

    for name in INTS:
        need(getattr(c, name) > 0 or name in ("n_shared_experts", "hc_sinkhorn_iters"), name, "must be positive")
    for name in ("hidden_size", "head_dim", "q_lora_rank", "moe_intermediate_size", "index_head_dim"):
        need(getattr(c, name) % QUANT_BLOCK == 0, name, f"{getattr(c, name)} is not a multiple of {QUANT_BLOCK}")
    rope = c.qk_rope_head_dim
    need(rope % 2 == 0 and rope <= min(c.head_dim, c.index_head_dim), "qk_rope_head_dim", f"{rope} is odd or too wide")
    need(c.num_attention_heads % c.o_groups == 0, "o_groups", f"{c.o_groups} does not divide num_attention_heads")
    need(
        c.o_groups * c.o_lora_rank % QUANT_BLOCK == 0,
        "o_lora_rank",
        f"o_groups * o_lora_rank must be a multiple of {QUANT_BLOCK}",
    )
    need(c.n_shared_experts == 1, "n_shared_experts", f"{c.n_shared_experts} is not supported, only 1")
    need(c.num_experts_per_tok <= c.n_routed_experts, "num_experts_per_tok", "more than n_routed_experts")
    need(c.hc_sinkhorn_iters >= 1, "hc_sinkhorn_iters", "must be at least 1")

    n = c.num_hidden_layers
    ratios = c.compress_ratios
    need(
        n <= len(ratios),
        "compress_ratios",
        f"{len(ratios)} entries for {n} layers and {c.num_nextn_predict_layers} draft stages",
    )
    need(set(ratios) <= {0, 1, 2}, "compress_ratios", f"only 0, 1 and 2 are supported, found {sorted(set(ratios))}")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        ids = getattr(c, name)
        need(all(0 <= i < n for i in ids), name, f"{list(ids)} goes outside the {n} layers")
        need(list(ids) == sorted(set(ids)), name, f"{list(ids)} is not ascending")
    need(bool(c.kv_source_layer_ids), "kv_source_layer_ids", "empty: a causal encoder-decoder needs a global KV source")
    stray = set(c.kv_source_layer_ids) - set(c.index_source_layer_ids)
    need(not stray, "index_source_layer_ids", f"KV sources {sorted(stray)} must also be index sources")
    for plan in c.layers:
        if plan.ratio == 0:
            need(
                plan.index not in c.index_source_layer_ids,
                "compress_ratios",
                f"layer {plan.index} is a source with ratio 0",
            )
            continue
        need(
            plan.kv_source is not None,
            "kv_source_layer_ids",
            f"layer {plan.index} has ratio {plan.ratio} but no source before it",
        )
        need(
            ratios[plan.kv_source or 0] == plan.ratio,
            "compress_ratios",
            f"layer {plan.index} has ratio {plan.ratio}, its KV source {plan.kv_source} another",
        )
        need(
            (plan.index_source or 0) >= (plan.kv_source or 0),
            "index_source_layer_ids",
            f"layer {plan.index} selects from another source",
        )
    if c.candidate_source_layer_id is not None:
        need(
            c.candidate_source_layer_id == c.first_decoder_layer,
            "candidate_source_layer_id",
            f"{c.candidate_source_layer_id} is not the last KV source {c.first_decoder_layer}",
        )
        need(
            c.candidate_topk_blocks > 0 and c.candidate_block_size > 0,
            "candidate_topk_blocks",
            "blocks must be positive",
        )
    if c.engram_layer_ids:
        need(
            c.engram_head_dim % QUANT_BLOCK == 0,
            "engram_head_dim",
            f"{c.engram_head_dim} is not a multiple of {QUANT_BLOCK}",
        )
        need(
            c.engram_pad_token_id < c.vocab_size,
            "engram_pad_token_id",
            f"{c.engram_pad_token_id} is not in the vocabulary",
        )
        need(c.engram_max_ngram_size >= 2, "engram_max_ngram_size", "must be at least 2")
        rows = tuple(c.engram_hashes[i].num_rows for i in c.engram_layer_ids)
        need(
            rows == c.engram_num_embeddings,
            "engram_num_embeddings",
            f"{list(c.engram_num_embeddings)} but the hash needs {list(rows)}",
        )


def _next_prime(above: int) -> int:
    candidate = above + 1
    while candidate < 2 or any(candidate % d == 0 for d in range(2, int(candidate**0.5) + 1)):
        candidate += 1
    return candidate
