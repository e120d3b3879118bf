"""Norm, rotation, hyper-connections and n-gram memory: the reference's bits but where a long sum comes first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ced.kernels import engram, mhc, norm, rope
from sglang_ced.kernels.triton import engram as fast_engram
from sglang_ced.kernels.triton import mhc as fast_mhc
from sglang_ced.kernels.triton import norm as fast_norm
from sglang_ced.kernels.triton import rope as fast_rope

EPS = 1e-20
FEW = settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- norm and rotation ------------------------------------------------------------------------------------------------


@FEW
@given(
    wide=st.booleans(),
    wide_weight=st.booleans(),
    rows=st.sampled_from([0, 1, 4]),
    d=st.sampled_from([1, 7, 64, 300]),
    seed=st.integers(0, 2**31),
)
def test_rms_norm_equals_reference(assert_near, make_input, move, wide, wide_weight, rows, d, seed) -> None:
    x, weight = make_input((rows, d), seed, 3), make_input((d,), seed + 1)
    x, weight = x.float() / 3 if wide else x, weight.float() / 3 if wide_weight else weight
    if rows:
        x[0] = 0
    expected = norm.rms_norm.reference(x, weight, EPS)
    error = (d + 4) * 2.0**-24 * expected.double().abs()
    assert_near(fast_norm.rms_norm(*move((x, weight)), EPS), expected, error)


def test_norm_of_a_row_wider_than_a_block(assert_near, make_input, move) -> None:
    x, weight = make_input((2, 5000)), make_input((5000,), 1)
    expected = norm.rms_norm.reference(x, weight, EPS)
    assert_near(fast_norm.rms_norm(*move((x, weight)), EPS), expected, 5004 * 2.0**-24 * expected.double().abs())


@FEW
@given(
    rows=st.sampled_from([0, 1, 3]),
    heads=st.sampled_from([0, 1, 9]),
    pairs=st.integers(1, 40),
    kept=st.integers(0, 40),
    inverse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rotate_equals_reference(assert_same, make_input, move, rows, heads, pairs, kept, inverse, seed) -> None:
    middle = (heads,) if heads else ()
    x = make_input((rows, *middle, kept + 2 * pairs), seed)
    positions = torch.randint(0, 2**20, (rows,), generator=torch.Generator().manual_seed(seed))
    cos, sin = rope.angles(positions, rope.frequencies(2 * pairs, 10000.0))
    expected = rope.rotate.reference(x, cos, sin, inverse)
    assert_same(fast_rope.rotate(*move((x, cos, sin)), inverse).cpu(), expected)
    strided = move(x).transpose(0, -1).contiguous().transpose(0, -1)
    assert_same(fast_rope.rotate(strided, *move((cos, sin)), inverse).cpu(), expected)


# -- hyper-connections ------------------------------------------------------------------------------------------------


def hyper_connection(make_input, rows: int, n: int, d: int, seed: int) -> tuple[Tensor, ...]:
    """(streams, fn, base, scale)"""
    outputs = n * (n + 2)
    fn = floats(outputs, n * d, seed=seed + 1) / (n * d) ** 0.5
    return make_input((rows, n, d), seed, 2), fn, floats(outputs, seed=seed + 2), floats(3, seed=seed + 3)


def error_of_mixes(streams: Tensor, fn: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the logits of pre, post and comb may be off by: sums of n d terms, and the norm, in float32."""
    n, flat = streams.shape[1], streams.flatten(1).double()
    inverse = norm.inverse_rms(flat.float(), mhc.NORM_EPS).double()
    off = 2 * flat.shape[1] * 2.0**-23 * (flat.abs() @ fn.double().abs().T) * inverse
    return tuple(part * s for part, s in zip(off.split((n, n, n * n), -1), scale.double().abs(), strict=True))


@FEW
@given(
    n=st.sampled_from([1, 2, 3, 4, 8]),
    iters=st.integers(1, 20),
    rows=st.sampled_from([0, 1, 5]),
    d=st.sampled_from([1, 33, 300]),
    seed=st.integers(0, 2**31),
)
def test_mixes_equal_reference(assert_near, make_input, move, n, iters, rows, d, seed) -> None:
    """A sigmoid grows by a quarter of its input. Normalising does not move matrices apart, so an entry moves by a
    factor of twice the logits' error up and down, and the roundings of each of the iterations."""
    site = hyper_connection(make_input, rows, n, d, seed)
    pre, post, comb = mhc.mixes.reference(*site, iters, 1e-6)
    of_pre, of_post, of_comb = error_of_mixes(site[0], site[1], site[3])
    actual = fast_mhc.mixes(*move(site), iters, 1e-6)
    assert_near(actual[0], pre, of_pre / 4 + 2.0**-23, equal=0.0)
    assert_near(actual[1], post, of_post / 2 + 2.0**-22, equal=0.0)
    if rows:
        relative = 4 * of_comb.amax(-1)[:, None, None] + 4 * iters * (n + 2) * 2.0**-24
        assert_near(actual[2], comb, relative * comb.double(), equal=0.0)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_mixes_equal_reference_on_equal_sums(assert_same, move, n) -> None:
    """Small integers, whose sums float32 holds: sigmoids and Sinkhorn to the bit."""
    generator = torch.Generator().manual_seed(n)
    streams = torch.randint(-3, 4, (5, n, 8), generator=generator).to(torch.bfloat16)
    fn = torch.randint(-4, 5, (n * (n + 2), 8 * n), generator=generator).float()
    site = (streams, fn, floats(n * (n + 2)), floats(3) / 4)
    for actual, expected in zip(
        fast_mhc.mixes(*move(site), 20, 1e-6), mhc.mixes.reference(*site, 20, 1e-6), strict=True
    ):
        assert_same(actual.cpu(), expected)


@FEW
@given(n=st.integers(1, 8), rows=st.sampled_from([0, 1, 3]), d=st.integers(1, 80), seed=st.integers(0, 2**31))
def test_collapse_and_expand_equal_reference(assert_same, make_input, move, n, rows, d, seed) -> None:
    streams, y = make_input((rows, n, d), seed, 2), make_input((rows, d), seed + 1)
    pre, post, comb = floats(rows, n, seed=seed), floats(rows, n, seed=seed + 1), floats(rows, n, n, seed=seed + 2)
    assert_same(fast_mhc.collapse(*move((streams, pre))).cpu(), mhc.collapse.reference(streams, pre))
    expected = mhc.expand.reference(y, streams, post, comb)
    assert_same(fast_mhc.expand(*move((y, streams, post, comb))).cpu(), expected)


# -- n-gram memory ----------------------------------------------------------------------------------------------------


@FEW
@given(rows=st.sampled_from([0, 1, 20]), ngram=st.integers(2, 4), heads=st.integers(1, 5), seed=st.integers(0, 2**31))
def test_ngram_rows_equal_reference(assert_same, move, rows, ngram, heads, seed) -> None:
    """Multipliers so large that products fill an int64; a blocked step back blocks the older ones."""
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(-300, 1000, (rows, ngram), generator=generator).clamp_min(-1)
    multipliers = torch.randint(0, (2**63 - 1) // 1000, (ngram,), generator=generator).tolist()
    primes = torch.randint(1, 2**31, (ngram - 1, heads), generator=generator).tolist()
    offsets = torch.randint(0, 2**40, ((ngram - 1) * heads,), generator=generator).tolist()
    args = (classes, 7, multipliers, primes, offsets)
    assert_same(fast_engram.ngram_rows(move(classes), *args[1:]).cpu(), engram.ngram_rows.reference(*args))


@pytest.mark.parametrize(("rows", "heads", "blocks"), [(0, 2, 1), (1, 1, 1), (4, 3, 5)])
def test_look_up_equals_reference(assert_same, move, rows, heads, blocks) -> None:
    """Any codes and scales, NaN included."""
    generator = torch.Generator().manual_seed(blocks)
    codes = torch.randint(0, 256, (50, 32 * blocks), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (50, blocks), dtype=torch.uint8, generator=generator)
    args = (codes, scales, torch.randint(0, 50, (rows, heads), generator=generator))
    expected = engram.look_up.reference(*args)
    assert_same(fast_engram.look_up(*move(args)).cpu(), expected)
    assert_same(fast_engram.look_up(codes, scales, move(args[2])).cpu(), expected)  # the table in host memory


def gate_of(dot: Tensor) -> Tensor:
    return torch.sigmoid(dot.sign() * dot.abs().clamp_min(1e-6).sqrt())


@FEW
@given(
    n=st.sampled_from([1, 2, 4]),
    masked=st.booleans(),
    rows=st.sampled_from([0, 1, 4]),
    d=st.sampled_from([1, 40, 300]),
    seed=st.integers(0, 2**31),
)
def test_fuse_equals_reference(assert_near, make_input, move, n, masked, rows, d, seed) -> None:
    """The gate grows with its dot: it is off by no more than the ends of what the dot may be off by."""
    streams, keys_value = make_input((rows, n, d), seed), make_input((rows, (n + 1) * d), seed + 1)
    alive = floats(rows, seed=seed) > 0 if masked else None
    weight = floats(n, d, seed=seed + 2)
    keys, value = keys_value[:, : n * d].unflatten(-1, (n, d)), keys_value[:, n * d :].double()
    x, keys = streams.float(), keys.float()
    factor = (norm.inverse_rms(x, EPS) * norm.inverse_rms(keys, EPS)).double() * d**-0.5
    terms = (x * weight * keys).double()
    dot, off = terms.sum(-1, True) * factor, 2 * (d + 4) * 2.0**-23 * terms.abs().sum(-1, True) * factor
    spread = torch.maximum(gate_of(dot + off) - gate_of(dot), gate_of(dot) - gate_of(dot - off)) + 2.0**-23
    error = spread * value.abs().unsqueeze(1)
    args = (streams, keys_value, weight, EPS, alive)
    assert_near(fast_engram.fuse(*move(args)), engram.fuse.reference(*args), error)


def test_shapes_that_do_not_fit_are_refused(make_input) -> None:
    x = make_input((2, 4, 32))
    with pytest.raises(ValueError, match=r"weight of shape \[31\] for rows of 32"):
        fast_norm.rms_norm(x, torch.ones(31), EPS)
    with pytest.raises(ValueError, match=r"x of shape \[2, 4, 32\], cos \[2, 17\], sin \[2, 17\] do not fit"):
        fast_rope.rotate(x, torch.zeros(2, 17), torch.zeros(2, 17))
    with pytest.raises(ValueError, match=r"fn must have shape \[24, 128\], got \[24, 64\]"):
        fast_mhc.mixes(x, torch.zeros(24, 64), torch.zeros(24), torch.zeros(3), 20, 1e-6)
    with pytest.raises(ValueError, match=r"keys_value must have shape \[2, 160\], got \[2, 128\]"):
        fast_engram.fuse(x, make_input((2, 128)), torch.zeros(4, 32), EPS)
