"""checkpoint/names.py: which tensors a config asks for, in which form, and what part each belongs to."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from sglang_ced.checkpoint.names import (
    DRAFT,
    PARTS,
    UNKNOWN,
    VISION,
    Kind,
    StoredSpec,
    TensorSpec,
    expected_tensors,
    part_of,
)
from sglang_ced.config import CedConfig


@pytest.fixture
def released(released_config: dict[str, Any]) -> dict[str, TensorSpec]:
    return expected_tensors(CedConfig.from_dict(released_config))


def test_released_parameter_counts_are_the_published_ones(released: dict[str, TensorSpec]) -> None:
    count: Counter[str] = Counter()
    for name, spec in released.items():
        count[part_of(name)] += math.prod(spec.shape)
    assert round(count["routed experts"] / 1e9, 1) == 543.6
    assert count["Engram tables"] == (384006168 + 384016682) * 256
    assert round(sum(n for part, n in count.items() if part != "Engram tables") / 1e9) == 552
    assert not count[UNKNOWN]


def test_released_shapes_are_the_published_ones(released: dict[str, TensorSpec]) -> None:
    assert released["layers.0.attn.wo_a.weight"] == TensorSpec((8192, 4096), Kind.FP8)
    assert released["layers.39.attn.wq_b.weight"] == TensorSpec((32768, 1280), Kind.FP8)
    assert released["layers.24.attn.indexer.wq_b.weight"] == TensorSpec((4096, 1280), Kind.FP8)
    assert released["layers.2.attn.indexer.wk.weight"] == TensorSpec((128, 512), Kind.BF16)
    assert released["layers.14.engram.wkv.weight"] == TensorSpec((25600, 6144), Kind.FP8)
    assert released["layers.7.hc_ffn_fn"] == TensorSpec((24, 20480), Kind.F32)
    assert released["layers.3.ffn.gate.bias_vl"] == TensorSpec((384,), Kind.F32, optional=True)


def test_layers_own_what_their_plan_says(released: dict[str, TensorSpec]) -> None:
    def layers_with(suffix: str) -> list[int]:
        return [int(name.split(".")[1]) for name in released if name.endswith(suffix)]

    assert layers_with("attn.compressor.wkv.weight") == [2, 8, 14, 20]
    assert layers_with("attn.compressor.wgate.weight") == [2, 8, 14]
    assert layers_with("attn.indexer.wq_b.weight") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert layers_with("attn.indexer.k_norm.weight") == [2, 8, 14, 20]
    assert layers_with("engram.embed.weight") == [1, 14]


@pytest.mark.parametrize(
    ("kind", "shape", "scale"),
    [
        (Kind.FP8, (321, 96), (11, 3)),
        (Kind.FP8, (6, 32), (1, 1)),
        (Kind.TABLE, (660, 64), (660, 2)),
        (Kind.FP4, (48, 96), (48, 3)),
    ],
)
def test_scale_has_one_byte_per_block(kind: Kind, shape: tuple[int, int], scale: tuple[int, int]) -> None:
    stored = TensorSpec(shape, kind).stored("a.weight")
    assert stored["a.scale"] == StoredSpec(("F8_E8M0",), scale)
    packed = (shape[0], shape[1] // 2)
    assert stored["a.weight"] == StoredSpec(*((("I8",), packed) if kind is Kind.FP4 else (("F8_E4M3",), shape)))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("embed.weight", "embed"),
        ("head.weight", "head"),
        ("norm.weight", "norms"),
        ("layers.0.attn_norm.weight", "norms"),
        ("layers.0.attn.kv_norm.weight", "norms"),
        ("layers.2.attn.compressor.norm.weight", "norms"),
        ("layers.2.attn.indexer.k_norm.weight", "norms"),
        ("layers.0.attn.wq_a.scale", "attention"),
        ("layers.0.attn.attn_sink", "attention"),
        ("layers.2.attn.indexer.wq_b.scale", "indexer"),
        ("layers.2.attn.compressor.wgate.weight", "compressor"),
        ("layers.0.ffn.gate.bias_vl", "router"),
        ("layers.0.ffn.shared_experts.w1.weight", "shared experts"),
        ("layers.0.ffn.experts.7.w2.scale", "routed experts"),
        ("layers.0.hc_attn_base", "mHC"),
        ("layers.1.engram.embed.scale", "Engram tables"),
        ("layers.1.engram.wkv.weight", "Engram projections"),
        ("layers.1.engram.q_weight", "Engram projections"),
        ("mtp.0.attn_norm.weight", DRAFT),
        ("mtp.2.markov_head.embed.weight", DRAFT),
        ("vision.blocks.0.wqkv.weight", VISION),
        ("aligner.w1.bias", VISION),
        ("image_newline", VISION),
        ("layers.0.made_up.weight", UNKNOWN),
        ("model.embed_tokens.weight", UNKNOWN),
        ("image_other", UNKNOWN),
    ],
)
def test_name_tells_its_part(name: str, part: str) -> None:
    assert part_of(name) == part
    assert part in (*PARTS, UNKNOWN)
