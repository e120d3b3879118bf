"""Products with stored and plain weights: the bits of the reference at every CPU level, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_kernel_ext
from sglang_ced.formats import E2m1Weight, E4m3Weight, quantize_weight_e4m3
from sglang_ced.kernels import cpu, linear

STORED = ["e4m3", "e2m1"]
ALL = [*STORED, "bfloat16"]
SHAPES = {
    "rows": st.integers(0, 70),
    "n": st.integers(1, 90),
    "blocks": st.integers(1, 11),
    "spread": st.integers(0, 12),
    "seed": st.integers(0, 2**31),
}


# -- values -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(ALL), **SHAPES)
def test_linear_equals_reference(
    every_level, assert_same, make_weight, make_input, kind, rows, n, blocks, spread, seed
) -> None:
    x = make_input((rows, 32 * blocks), seed, spread)
    weight = make_weight(kind, n, 32 * blocks, seed + 1, spread)
    expected = linear.linear.reference(x, weight)
    for _ in every_level():
        assert_same(cpu.linear_(x, weight), expected)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(STORED), **SHAPES)
def test_any_bytes_are_read_as_the_formats_say(
    every_level, assert_same, make_input, kind, rows, n, blocks, spread, seed
) -> None:
    """NaN codes, NaN scales, and scales at the ends of float32's range included."""
    generator = torch.Generator().manual_seed(seed)
    k = 32 * blocks
    codes = torch.randint(0, 256, (n, k if kind == "e4m3" else k // 2), dtype=torch.uint8, generator=generator)
    scale_rows = -(-n // 32) if kind == "e4m3" else n
    scales = torch.randint(0, 256, (scale_rows, blocks), dtype=torch.uint8, generator=generator)
    weight = E4m3Weight(codes, scales) if kind == "e4m3" else E2m1Weight(codes, scales)
    x = make_input((rows, k), seed, 40)
    expected = linear.linear.reference(x, weight)
    for _ in every_level():
        assert_same(cpu.linear_(x, weight), expected)


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("sign", [1, -1])
def test_largest_sums_of_a_block_do_not_overflow(every_level, assert_same, kind, sign) -> None:
    """Every input at +-448 or just below, every weight at its largest code."""
    x = torch.full((3, 160), 448.0).mul(sign).to(torch.bfloat16)
    x[1, ::2] = -x[1, ::2]
    x[2] = torch.linspace(224, 448, 160).to(torch.bfloat16)
    codes, scales = torch.full((32, 160), 0x7E, dtype=torch.uint8), torch.full((32, 5), 127, dtype=torch.uint8)
    weight = E4m3Weight(codes, scales[:1]) if kind == "e4m3" else E2m1Weight(codes[:, :80] & 0 | 0x77, scales)
    expected = linear.linear.reference(x, weight)
    for _ in every_level():
        assert_same(cpu.linear_(x, weight), expected)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(STORED), share=st.sampled_from([0.002, 0.02, 0.5]), seed=st.integers(0, 2**31))
def test_values_far_below_the_largest_of_their_block_count_in_full(
    every_level, assert_same, make_weight, make_input, kind, share, seed
) -> None:
    """Small inputs meet small weights: what integer sums keep apart as fine parts."""
    generator = torch.Generator().manual_seed(seed)
    x, value = make_input((40, 256), seed), torch.randn(48, 256, generator=generator)
    for whole in (x, value):
        small = torch.rand(whole.shape, generator=generator) < share
        whole[small] *= 2.0 ** -torch.randint(8, 18, (int(small.sum()),), generator=generator)
    weight = make_weight(kind, 48, 256)
    if kind == "e4m3":
        weight = E4m3Weight(*quantize_weight_e4m3(value))
    expected = linear.linear.reference(x, weight)
    for _ in every_level():
        assert_same(cpu.linear_(x, weight), expected)


@pytest.mark.parametrize("kind", STORED)
def test_nan_and_infinity_reach_every_column_of_their_row_alone(
    every_level, assert_same, make_weight, make_input, kind
) -> None:
    x, weight = make_input((5, 96)), make_weight(kind, 40, 96)
    clean = linear.linear.reference(x, weight)
    x[1, 40], x[3, 7] = torch.nan, torch.inf
    linear.round_input.select("cpu")  # its contract for these two is that of the package
    try:
        expected = linear.linear.reference(x, weight)
    finally:
        linear.round_input.select("reference")
    for _ in every_level():
        out = cpu.linear_(x, weight)
        assert_same(out, expected)
        assert out[1].isnan().all()
        assert not out[3].isfinite().any()
        assert_same(out[::2], clean[::2])


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["bfloat16", "float32"]),
    wide_input=st.booleans(),
    rows=st.integers(0, 70),
    n=st.integers(1, 40),
    k=st.integers(1, 200),
    seed=st.integers(0, 2**31),
)
def test_matmul_equals_reference(
    every_level, assert_same, make_weight, make_input, kind, wide_input, rows, n, k, seed
) -> None:
    """To the bit: sums of these sizes leave a chance below 1e-7 of another rounding of the float64 sum."""
    x, weight = make_input((rows, k), seed), make_weight(kind, n, k, seed + 1)
    if wide_input:
        x = x.float() / 3
    expected = linear.matmul.reference(x, weight)
    for _ in every_level():
        assert_same(cpu.matmul(x, weight), expected)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(ALL), groups=st.integers(1, 4), **SHAPES)
def test_grouped_linear_equals_reference(
    every_level, assert_same, make_weight, make_input, kind, groups, rows, n, blocks, spread, seed
) -> None:
    x = make_input((rows, groups * 32 * blocks), seed, spread)
    weight = make_weight(kind, groups * n, 32 * blocks, seed + 1, spread)
    expected = linear.grouped_linear.reference(x, weight, groups)
    for _ in every_level():
        assert_same(cpu.grouped_linear(x, weight, groups), expected)


def test_other_float_types_take_the_reference(assert_same) -> None:
    x, weight = torch.randn(3, 40, dtype=torch.float64), torch.randn(5, 40, dtype=torch.float16)
    assert_same(cpu.matmul(x, weight), linear.matmul.reference(x, weight))
    assert_same(cpu.linear_(x, weight), linear.linear.reference(x, weight))


def test_leading_dimensions_and_strides_of_the_input_do_not_matter(assert_same, make_weight, make_input) -> None:
    x, weight = make_input((4, 6, 64)), make_weight("e4m3", 48, 64)
    expected = cpu.linear_(x.reshape(24, 64), weight).view(4, 6, 48)
    assert_same(cpu.linear_(x, weight), expected)
    assert_same(cpu.linear_(x.transpose(0, 1), weight), expected.transpose(0, 1))


# -- independence -----------------------------------------------------------------------------------------------------


def products(kind: str):
    if kind == "grouped":
        return lambda x, weight: cpu.grouped_linear(x, weight, 2)
    return cpu.matmul if kind == "float32" else cpu.linear_


@pytest.mark.parametrize("kind", [*ALL, "float32", "grouped"])
def test_a_row_does_not_depend_on_its_batch(every_level, assert_same, make_weight, make_input, kind) -> None:
    x = make_input((300, 320))
    weight = make_weight("e4m3", 100, 160) if kind == "grouped" else make_weight(kind, 100, 320)
    run = products(kind)
    for _ in every_level():
        whole = run(x, weight)
        for size in (1, 2, 3, 4, 5, 65, 257):
            assert_same(run(x[11 : 11 + size], weight), whole[11 : 11 + size])


@pytest.mark.parametrize("kind", [*ALL, "float32", "grouped"])
def test_result_does_not_depend_on_threads(
    every_level, thread_counts, assert_same, make_weight, make_input, kind
) -> None:
    x = make_input((33, 1024))
    weight = make_weight("e4m3", 520, 512) if kind == "grouped" else make_weight(kind, 520, 1024)
    run = products(kind)
    for _ in every_level():
        expected = run(x, weight)
        for _ in thread_counts():
            assert_same(run(x, weight), expected)


@pytest.mark.parametrize("kind", [*ALL, "float32", "grouped"])
def test_all_levels_give_the_same_bits(every_level, assert_same, make_weight, make_input, kind) -> None:
    x = make_input((9, 640), spread=6)
    weight = make_weight("e4m3", 72, 320) if kind == "grouped" else make_weight(kind, 72, 640, spread=6)
    results = [products(kind)(x, weight) for _ in every_level()]
    for result in results:
        assert_same(result, results[0])


# -- contract ---------------------------------------------------------------------------------------------------------

BYTE = {"dtype": torch.uint8}
X = torch.zeros(2, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: sgl_kernel_ext.linear_e4m3(X.float(), torch.zeros(8, 64, **BYTE), torch.zeros(1, 2, **BYTE)),
         TypeError, r"linear_e4m3: x must be bfloat16, got Float of shape \[2, 64\]"),
        (lambda: sgl_kernel_ext.linear_e4m3(X, torch.zeros(8, 96, **BYTE), torch.zeros(1, 3, **BYTE)),
         ValueError, r"last dimension of x must be 96, got shape \[2, 64\] of BFloat16"),
        (lambda: sgl_kernel_ext.linear_e4m3(X, torch.zeros(8, 64, **BYTE), torch.zeros(8, 2, **BYTE)),
         ValueError, r"scales must have shape \[1, 2\], got \[8, 2\] of Byte"),
        (lambda: sgl_kernel_ext.linear_e4m3(X, torch.zeros(8, 48, **BYTE), torch.zeros(1, 2, **BYTE)),
         ValueError, r"multiple of 32, got codes of shape \[8, 48\]"),
        (lambda: sgl_kernel_ext.linear_e2m1(X, torch.zeros(8, 32), torch.zeros(8, 2, **BYTE)),
         TypeError, r"linear_e2m1: codes must be Byte, got Float of shape \[8, 32\]"),
        (lambda: sgl_kernel_ext.linear_e2m1(X, torch.zeros(32, 8, **BYTE).t(), torch.zeros(8, 2, **BYTE)),
         ValueError, r"codes must be contiguous, got shape \[8, 32\] with strides \[1, 8\]"),
        (lambda: sgl_kernel_ext.matmul(X, torch.zeros(8, 64, dtype=torch.int32)),
         TypeError, r"matmul: the weight must be float32 or bfloat16.*Int of shape \[8, 64\]"),
        (lambda: sgl_kernel_ext.matmul(X, torch.zeros(8, 32)),
         ValueError, r"matmul: the last dimension of x must be 32, got shape \[2, 64\]"),
        (lambda: sgl_kernel_ext.grouped_linear(X, torch.zeros(8, 32), None, 3),
         ValueError, r"grouped_linear: the last dimension of x must be 3 groups, got shape \[2, 64\]"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_shape_and_dtype(call, error, says) -> None:
    with pytest.raises(error, match=says):
        call()


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("linear_e4m3", (X, torch.zeros(40, 64, **BYTE), torch.zeros(2, 2, **BYTE))),
        ("linear_e2m1", (X, torch.zeros(40, 32, **BYTE), torch.zeros(40, 2, **BYTE))),
        ("linear_bfloat16", (X, torch.zeros(40, 64, dtype=torch.bfloat16))),
        ("matmul", (X, torch.zeros(40, 64))),
        ("grouped_linear", (X, torch.zeros(40, 32), None, 2)),
    ],
)
def test_op_is_well_formed_for_torch(name: str, args: tuple[object, ...]) -> None:
    op = getattr(torch.ops.sgl_kernel_ext, name).default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
