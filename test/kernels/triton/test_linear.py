"""Products: rounding of the input to the bit, sums within their float32 error."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ced.formats import E2m1Weight, E4m3Weight, Weight
from sglang_ced.kernels import linear
from sglang_ced.kernels.triton import linear as fast

STORED = ["e4m3", "e2m1"]
FEW = settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes


def full(weight: Weight) -> Tensor:
    return (weight if isinstance(weight, Tensor) else weight.dequantize()).double()


def magnitudes(x: Tensor, weight: Weight) -> Tensor:
    """Sum of the magnitudes of a product's terms."""
    x = x if isinstance(weight, Tensor) else linear.round_input.reference(x)
    return x.double().abs() @ full(weight).abs().T


# -- rounding of the input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_input_equals_reference(assert_same, make_input, move, dtype) -> None:
    """Ties, subnormals, zeros of both signs, the smallest and the largest blocks."""
    x = torch.cat(
        [make_input((2, 5, 64), seed, 3).float() * 2.0**power for seed, power in enumerate((-100, -15, 0, 90))]
    )
    x[0, 0, :32] = 0.0
    x[0, 1, :32] = torch.linspace(-448, 448, 32)
    x[1, 0, :32] = torch.arange(32) * 2.0**-10  # ties between subnormals
    x[1, 1, :2] = torch.tensor([-0.0, 3.39e38])
    x = x.to(dtype)
    assert_same(fast.round_input(move(x)).cpu(), linear.round_input.reference(x))


def test_every_value_rounds_like_the_reference(assert_same, move) -> None:
    """All 65280 numbers of bfloat16, each beside a larger one that sets the scale, and infinities."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[values.isfinite()].unflatten(0, (-1, 32))
    assert_same(fast.round_input(move(values)).cpu(), linear.round_input.reference(values))
    near_one = torch.linspace(-2, 2, 448 * 32).to(torch.bfloat16).unflatten(0, (-1, 32)).clone()
    near_one[:, 7] = 448.0
    assert_same(fast.round_input(move(near_one)).cpu(), linear.round_input.reference(near_one))


def test_nan_and_infinity_do_not_touch_their_neighbours(assert_same, make_input, move) -> None:
    x = make_input((3, 32))
    expected = linear.round_input.reference(x)
    x[1, 3] = expected[1, 3] = torch.nan
    assert_same(fast.round_input(move(x))[:2].cpu(), expected[:2])
    x[2, 5] = -torch.inf
    assert fast.round_input(move(x))[2, 5].item() == -torch.inf


# -- products ---------------------------------------------------------------------------------------------------------


@FEW
@given(
    kind=st.sampled_from([*STORED, "bfloat16"]),
    rows=st.sampled_from([0, 1, 5, 17, 33]),
    n=st.integers(1, 70),
    blocks=st.integers(1, 5),
    spread=st.integers(0, 8),
    seed=st.integers(0, 2**31),
)
def test_linear_equals_reference(
    assert_near, sum_error, make_weight, make_input, move, kind, rows, n, blocks, spread, seed
) -> None:
    x, weight = make_input((rows, 32 * blocks), seed, spread), make_weight(kind, n, 32 * blocks, seed + 1, spread)
    error = sum_error(32 * blocks, magnitudes(x, weight))
    assert_near(fast.linear_(move(x), move(weight)), linear.linear.reference(x, weight), error)


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("rows", [3, 20])
def test_any_code_and_scale_is_read_as_the_formats_say(assert_near, sum_error, make_input, move, kind, rows) -> None:
    """NaN codes and NaN scales included; scales from 2^-60 to 2^60, beyond which float32 sums overflow."""
    generator, k, n = torch.Generator().manual_seed(rows), 96, 40
    codes = torch.randint(0, 256, (n, k if kind == "e4m3" else k // 2), dtype=torch.uint8, generator=generator)
    shape = (-(-n // 32) if kind == "e4m3" else n, k // 32)
    scales = torch.randint(67, 188, shape, dtype=torch.uint8, generator=generator)
    if kind == "e4m3":
        codes[::2][codes[::2] & 127 == 127] = 0
    scales[-1, 1] = 255
    weight = E4m3Weight(codes, scales) if kind == "e4m3" else E2m1Weight(codes, scales)
    x = make_input((rows, k), 1, 10)
    error = sum_error(k, magnitudes(x, weight))
    expected = linear.linear.reference(x, weight)
    assert expected.isnan().any()
    assert expected.isfinite().any()
    assert_near(fast.linear_(move(x), move(weight)), expected, error.nan_to_num(0.0))


@pytest.mark.parametrize("kind", STORED)
def test_products_that_float32_holds_are_exact(assert_same, make_weight, move, kind) -> None:
    """Inputs and weights with few bits: nothing is left to the order of the sum, at either size of tile."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-8, 9, (20, 64), generator=generator).to(torch.bfloat16)
    weight = make_weight(kind, 33, 64)
    small = torch.zeros_like(weight.scales) + 127
    weight = E4m3Weight(weight.codes & 0xF8, small) if kind == "e4m3" else E2m1Weight(weight.packed, small)
    weight = weight if kind == "e2m1" else E4m3Weight((weight.codes & 0x87) | 0x38, small)  # +-1 to +-1.875
    for rows in (x, x[:3]):
        assert_same(fast.linear_(move(rows), move(weight)).cpu(), linear.linear.reference(rows, weight))


@FEW
@given(
    kind=st.sampled_from(["bfloat16", "float32"]),
    wide=st.booleans(),
    rows=st.sampled_from([0, 1, 18]),
    n=st.integers(1, 40),
    k=st.integers(1, 90),
    seed=st.integers(0, 2**31),
)
def test_matmul_equals_reference(
    assert_near, sum_error, make_weight, make_input, move, kind, wide, rows, n, k, seed
) -> None:
    x, weight = make_input((rows, k), seed), make_weight(kind, n, k, seed + 1)
    x = x.float() / 3 if wide else x
    error = sum_error(k, x.double().abs() @ weight.double().abs().T)
    assert_near(fast.matmul(move(x), move(weight)), linear.matmul.reference(x, weight), error, equal=0.0)


@FEW
@given(
    kind=st.sampled_from([*STORED, "bfloat16"]),
    groups=st.integers(1, 3),
    rows=st.sampled_from([1, 19]),
    n=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_grouped_linear_equals_reference(
    assert_near, sum_error, make_weight, make_input, move, kind, groups, rows, n, seed
) -> None:
    """Groups whose rows begin inside a tile of scales as well."""
    x, weight = make_input((rows, groups * 64), seed), make_weight(kind, groups * n, 64, seed + 1)
    terms = torch.einsum("tgi,gri->tgr", x.double().abs().unflatten(-1, (groups, -1)),
                         full(weight).abs().unflatten(0, (groups, -1))).flatten(-2)  # fmt: skip
    expected = linear.grouped_linear.reference(x, weight, groups)
    assert_near(fast.grouped_linear(move(x), move(weight), groups), expected, sum_error(64, terms))


def test_leading_dimensions_and_strides_of_the_input_do_not_matter(assert_same, make_weight, make_input, move) -> None:
    x, weight = make_input((4, 3, 64)), move(make_weight("e4m3", 40, 64))
    expected = fast.linear_(move(x.reshape(12, 64)), weight).view(4, 3, 40)
    assert_same(fast.linear_(move(x), weight), expected)
    assert_same(fast.linear_(move(x).transpose(0, 1), weight), expected.transpose(0, 1))
    wide = torch.zeros(12, 67, dtype=torch.bfloat16)
    wide[:, 3:] = x.reshape(12, 64)
    assert_same(fast.linear_(move(wide)[:, 3:], weight), expected.view(12, 40))


def test_a_row_does_not_depend_on_its_neighbours(assert_same, make_weight, make_input, move) -> None:
    """Within one size of tile; another size may add in another order on a GPU."""
    x, weight = move(make_input((16, 96))), move(make_weight("e2m1", 40, 96))
    whole = fast.linear_(x, weight)
    for rows in (slice(0, 1), slice(5, 8)):
        assert_same(fast.linear_(x[rows], weight), whole[rows])


def test_other_float_types_take_the_reference(assert_same, move) -> None:
    x, weight = move(torch.randn(3, 40, dtype=torch.float64)), move(torch.randn(5, 40, dtype=torch.float16))
    assert_same(fast.matmul(x, weight), linear.matmul.reference(x, weight))
    assert_same(fast.linear_(x, weight), linear.linear.reference(x, weight))


def test_shapes_that_do_not_fit_are_refused(make_weight, make_input) -> None:
    with pytest.raises(ValueError, match=r"x of shape \[2, 64\] does not fit a weight of shape \[8, 96\]"):
        fast.linear_(make_input((2, 64)), make_weight("e4m3", 8, 96))
