"""Single operations against the publisher's numbers, at the limits of test/golden/data/README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_ced import formats, reference
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.config import CedConfig
from sglang_ced.formats import E2m1Weight, E4m3Weight
from sglang_ced.kernels import attention, compressor, engram, indexer, linear, mhc, moe, norm, rope
from sglang_ced.reference import Numerics

Ops = dict[str, Tensor]


def assert_bits(ours: Tensor, theirs: Tensor) -> None:
    """Equal to the bit, the sign of zero included."""
    view = {torch.bfloat16: torch.int16, torch.float32: torch.int32}.get(theirs.dtype, theirs.dtype)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours.contiguous().view(view), theirs.contiguous().view(view))


def assert_near(ours: Tensor, theirs: Tensor, ulps: int = 1, exact: float = 0.98) -> None:
    """Within `ulps` bfloat16 units of the row's largest value, and mostly exact."""
    error = (ours.float() - theirs.float()).abs().amax(-1)
    assert (error <= ulps * 2**-8 * theirs.float().abs().amax(-1)).all()
    assert (ours == theirs).float().mean() >= exact


def assert_same_choice(scores: Tensor, ours: Tensor, theirs: Tensor) -> None:
    """Equal sets of visible groups per row, but for entries within one bfloat16 unit of the cut."""
    for row, mine, other in zip(scores.float(), ours.tolist(), theirs.tolist(), strict=True):
        mine, other = ({group for group in ids if group >= 0 and row[group] > -torch.inf} for ids in (mine, other))
        cut = min((float(row[group]) for group in mine), default=0.0)
        assert all(abs(float(row[group]) - cut) <= 2**-8 * abs(cut) for group in mine ^ other)


def weight(ops: Ops, name: str) -> formats.Weight:
    codes, scales = ops[f"{name}_weight"].view(torch.uint8), ops[f"{name}_scale"].view(torch.uint8)
    return E2m1Weight(codes, scales) if ops[f"{name}_weight"].dtype == torch.int8 else E4m3Weight(codes, scales)


def test_quantisers_give_the_publishers_codes_scales_and_values(golden_ops: Ops) -> None:
    x = golden_ops["quant/x"]
    for name, quantize, fake, codes, scales in (
        ("fp8", formats.quantize_e4m3, formats.fake_quant_e4m3, "codes", "scale_ue8m0"),
        ("fp4_b32", formats.quantize_e2m1_ue8m0, formats.fake_quant_e2m1_ue8m0, "packed", "scale_ue8m0"),
        ("fp4_b16", formats.quantize_e2m1_e4m3, formats.fake_quant_e2m1_e4m3, "packed", "scale_e4m3"),
    ):
        ours = quantize(x)
        assert_bits(ours[0], golden_ops[f"quant/{name}_{codes}"])
        assert_bits(ours[1], golden_ops[f"quant/{name}_{scales}"])
        assert_bits(fake(x), golden_ops[f"quant/{name}_dequant"])


def test_rms_norm(golden_ops: Ops) -> None:
    out = norm.rms_norm(golden_ops["rmsnorm/x"], golden_ops["rmsnorm/weight"], 1e-20)
    assert_near(out, golden_ops["rmsnorm/out"])


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_linear(golden_ops: Ops, kind: str) -> None:
    assert_near(
        linear.linear(golden_ops["linear/x"], weight(golden_ops, f"linear/{kind}")), golden_ops[f"linear/{kind}_out"]
    )


@pytest.mark.parametrize("width", [64, 16, 8])
def test_rope_tables(golden_ops: Ops, width: int) -> None:
    plain = rope.frequencies(width, 10000.0)
    compressed = rope.frequencies(width, 160000.0, 16.0, 32.0, 1.0, 65536)
    for name, freq in (("plain", plain), ("compress", compressed)):
        cos, sin = rope.angles(golden_ops["rope/positions"], freq)
        assert (cos - golden_ops[f"rope/{name}{width}_cos"]).abs().max() <= 1e-6
        assert (sin - golden_ops[f"rope/{name}{width}_sin"]).abs().max() <= 1e-6


@pytest.mark.parametrize(("name", "inverse"), [("fwd", False), ("inv", True)])
def test_rotation_and_its_inverse(golden_ops: Ops, name: str, inverse: bool) -> None:
    x, theirs = golden_ops["rope/apply_x"], golden_ops[f"rope/apply_{name}_compress16"]
    positions = torch.arange(len(x)) + int(golden_ops["rope/apply_pos0"])
    freq = rope.frequencies(16, 160000.0, 16.0, 32.0, 1.0, 65536)
    assert_near(rope.rotate(x, *rope.angles(positions, freq), inverse=inverse), theirs)
    ours = reference.rotate(x.unsqueeze(0), positions, freq, inverse=inverse)
    assert_near(ours[0], theirs)


def test_hyper_connections(golden_ops: Ops) -> None:
    x, fn, base, scale = (golden_ops[f"hc/{name}"] for name in ("x", "fn", "base", "scale"))
    mixes = mhc.mixes(x, fn, base, scale, 20, 1e-6)
    for ours, name in zip(mixes, ("pre", "post", "comb"), strict=True):
        assert (ours - golden_ops[f"hc/{name}"]).abs().max() <= 2e-6
    assert_near(mhc.collapse(x, golden_ops["hc/pre_mix_in"]), golden_ops["hc/collapsed"])
    assert_near(mhc.expand(golden_ops["hc/sublayer_out"], x, *mixes[1:]), golden_ops["hc/expanded"])


def test_sinkhorn(golden_ops: Ops) -> None:
    mixes, scale, base = (golden_ops[f"sinkhorn/{name}"] for name in ("mixes", "scale", "base"))
    logits = (mixes[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4))
    assert (mhc.sinkhorn(logits, 20, 1e-6) - golden_ops["sinkhorn/comb"]).abs().max() <= 2e-6


@pytest.mark.parametrize(("name", "scale"), [("a", 1.5), ("b", 1.5), ("c", 2.0)])
def test_router(golden_ops: Ops, name: str, scale: float) -> None:
    x, w, bias, ids, weights = (
        golden_ops[f"router_{name}/{part}"] for part in ("x", "weight", "bias", "topk_idx", "topk_weight")
    )
    chosen, ours = moe.route(x, w, bias, ids.shape[1], scale)
    order, theirs_order = chosen.argsort(-1), ids.argsort(-1)
    assert torch.equal(chosen.gather(-1, order), ids.gather(-1, theirs_order).long())
    assert (ours.gather(-1, order) - weights.gather(-1, theirs_order)).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", ["fp4", "fp8"])
def test_expert(golden_ops: Ops, kind: str) -> None:
    weights = moe.ExpertWeights(*(weight(golden_ops, f"expert_{kind}/{part}") for part in ("w1", "w2", "w3")))
    x, route = golden_ops[f"expert_{kind}/x"], golden_ops[f"expert_{kind}/route_weight"][:, 0]
    assert_near(moe.expert_mlp(x, weights, 10.0), golden_ops[f"expert_{kind}/out_unweighted"], ulps=2)
    assert_near(moe.expert_mlp(x, weights, 10.0, route), golden_ops[f"expert_{kind}/out_weighted"], ulps=2)


@pytest.mark.parametrize("ratio", [1, 2])
def test_compressor(golden_ops: Ops, ratio: int) -> None:
    x, wkv, weight_norm = (golden_ops[f"compressor_r{ratio}/{name}"] for name in ("x", "wkv", "norm"))
    if ratio == 1:
        latents = linear.linear(x, wkv)
    else:
        whole = x[: len(x) // 2 * 2]
        kv, gate = linear.matmul(whole, wkv), linear.matmul(whole, golden_ops["compressor_r2/wgate"])
        latents = compressor.pool_pairs(kv.unflatten(0, (-1, 2)), gate.unflatten(0, (-1, 2)))
    latents = norm.rms_norm(latents, weight_norm, 1e-20)
    assert_near(latents, golden_ops[f"compressor_r{ratio}/latent_pre_rope"])
    freq = rope.frequencies(16, 160000.0, 16.0, 32.0, 1.0, 65536)
    turned = rope.rotate(latents, *rope.angles(torch.arange(len(latents)) * ratio, freq))
    assert_near(formats.fake_quant_e2m1_e4m3(turned), golden_ops[f"compressor_r{ratio}/cache_entry"], ulps=64)


@pytest.mark.parametrize("ratio", [1, 2])
def test_indexer_scores_selection_and_candidates(golden_ops: Ops, ratio: int) -> None:
    q, k, w, theirs = (golden_ops[f"indexer_r{ratio}/{name}"] for name in ("q_fp4", "k_fp4", "w", "score_bf16"))
    visible = (torch.arange(len(q)) + 1) // ratio
    hidden = torch.arange(len(k)) >= visible[:, None]
    scores = indexer.index_scores(q, w, formats.Record(k.shape[-1], "index").encode(k))
    assert_bits(scores[~hidden], theirs[~hidden])
    scores = scores.masked_fill(hidden, -torch.inf)
    assert_same_choice(scores, indexer.top_groups(scores, 6), golden_ops[f"indexer_r{ratio}/topk6"])
    candidates = indexer.candidate_groups(scores, visible, 4, 3)
    assert torch.equal(
        candidates & ~hidden, golden_ops[f"indexer_r{ratio}/candidate_mask_blocks4_size3"].bool() & ~hidden
    )
    inside = scores.masked_fill(~candidates, -torch.inf)
    assert_same_choice(inside, indexer.top_groups(inside, 6), golden_ops[f"indexer_r{ratio}/topk6_in_candidates"])


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_sparse_attention(golden_ops: Ops, name: str) -> None:
    q, kv, index, sink, theirs = (
        golden_ops[f"sparse_attn_{name}/{part}"] for part in ("q", "kv", "idx", "sink", "out")
    )
    ours = attention.attend(q, kv, None, index.long(), sink)
    assert_near(ours, theirs)
    assert not ours[1].any(), "a row without keys gives zeros"
    whole = reference.attend(q[None], kv[index.clamp_min(0).long()][None], (index >= 0)[None], sink, Numerics())
    assert torch.equal(whole[0], ours)


def test_engram_hash(golden_ops: Ops, golden_dir: Path) -> None:
    config = CedConfig.from_dir(golden_dir / "toy8" / "model")
    token_map, ids, alive = (golden_ops[f"engram/{name}"] for name in ("token_map", "ids", "token_mask"))
    token_map, ids, alive = token_map.long(), ids.long(), alive.bool()
    for place, layer in enumerate(config.engram_layer_ids):
        constants = config.engram_hashes[layer]
        assert constants.multipliers == tuple(golden_ops["engram/multipliers"][place].tolist())
        assert constants.moduli == tuple(golden_ops["engram/primes"][place].flatten().tolist())
        assert constants.offsets == tuple(golden_ops["engram/offsets"][place].tolist())
        for name, dead in (("hash_rows", torch.zeros_like(alive)), ("hash_rows_masked", ~alive)):
            theirs = golden_ops[f"engram/{name}"][:, place]
            whole = reference.ngram_rows(ids[None], dead[None], token_map, config.engram_pad_token_id, constants)
            assert torch.equal(whole[0], theirs)
            classes = token_map[ids].masked_fill(dead, -1)
            history = torch.stack([_shifted(classes, back) for back in range(config.engram_max_ngram_size)], 1)
            c, pad = constants, int(golden_ops["engram/pad_compressed"][0])
            assert torch.equal(engram.ngram_rows(history, pad, c.multipliers, c.primes, c.offsets), theirs)


@pytest.mark.parametrize("masked", [False, True])
def test_engram_layer(golden_ops: Ops, golden_dir: Path, masked: bool) -> None:
    """The first n-gram layer of toy8, live and with tokens inside an image span."""
    suffix = "_masked" if masked else ""
    checkpoint = Checkpoint.open(golden_dir / "toy8" / "model")
    rows = golden_ops[f"engram/hash_rows{suffix}"][:, 0]
    memory = engram.look_up(*checkpoint.table("layers.1.engram.embed"), rows)
    if not masked:
        assert_bits(memory.unflatten(1, (6, 32)), golden_ops["engram/rows_dequant"])
    weights = [checkpoint.tensor(f"layers.1.engram.{part}_weight").float() for part in "qk"]
    alive = golden_ops["engram/token_mask"].bool() if masked else None
    keys_value = linear.linear(memory, checkpoint.weight("layers.1.engram.wkv"))
    out = engram.fuse(golden_ops["engram/layer_x"], keys_value, weights[0] * weights[1], 1e-20, alive)
    assert_near(out, golden_ops[f"engram/layer_out{suffix}"])


def _shifted(classes: Tensor, back: int) -> Tensor:
    return torch.cat((torch.full((back,), -1), classes))[: len(classes)]


def test_engram_constants_and_hash_of_the_released_model(golden_ops: Ops, released_config: dict[str, Any]) -> None:
    config = CedConfig.from_dict(released_config)
    classes = golden_ops["engram_full/compressed_ids"]
    history = torch.stack([_shifted(classes, back) for back in range(4)], 1)
    pad = int(golden_ops["engram_full/pad_compressed"][0])
    for place, layer in enumerate(config.engram_layer_ids):
        c = config.engram_hashes[layer]
        ours = engram.ngram_rows(history, pad, c.multipliers, c.primes, c.offsets)
        assert torch.equal(ours, golden_ops["engram_full/hash_rows"][:, place])
