"""The projections around attention: the bits of the chains they stand for, at every CPU level, row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sgl_kernel_ext
from sglang_ced.kernels import cpu, projection, rope

EPS, DIM, GROUPS = 1e-20, 64, 2


def inputs(make_weight, make_input, kind: str, rows: int, heads: int, seed: int) -> tuple[tuple[object, ...], ...]:
    """Arguments of `attention_inputs` and `attention_output`, d = 96 and a q_lora of 32."""
    norms = [make_input((size,), seed + size) for size in (32, DIM)]
    a, b, kv = (make_weight(kind, n, k, seed + n, 2) for n, k in ((32, 96), (heads * DIM, 32), (DIM, 96)))
    weights = projection.InputWeights(a, norms[0], b, kv, norms[1])
    angles = rope.angles(torch.arange(rows) + seed % 1000, rope.frequencies(16, 10000.0))
    wo_a, wo_b = make_weight(kind, 64, heads * DIM // GROUPS, seed + 3), make_weight(kind, 96, 64, seed + 4)
    found = make_input((rows, heads, DIM), seed + 5)
    return (make_input((rows, 96), seed, 2), weights, *angles, EPS), (found, *angles, wo_a, wo_b, GROUPS)


@settings(max_examples=30, deadline=None)
@given(
    kind=st.sampled_from(["e4m3", "e2m1", "bfloat16"]),
    rows=st.integers(0, 70),
    heads=st.sampled_from([2, 4, 6]),
    seed=st.integers(0, 2**31),
)
def test_projections_equal_reference(
    every_level, assert_same, make_weight, make_input, kind, rows, heads, seed
) -> None:
    before, after = inputs(make_weight, make_input, kind, rows, heads, seed)
    expected = projection.attention_inputs.reference(*before)
    projected = projection.attention_output.reference(*after)
    for _ in every_level():
        for actual, part in zip(cpu.attention_inputs(*before), expected, strict=True):
            assert_same(actual, part)
        assert_same(cpu.attention_output(*after), projected)


def test_a_row_does_not_depend_on_its_batch(every_level, assert_same, make_weight, make_input) -> None:
    (x, weights, cos, sin, eps), (found, _, _, *rest) = inputs(make_weight, make_input, "e4m3", 70, 4, 0)

    def run(rows: slice) -> list[Tensor]:
        out = cpu.attention_output(found[rows], cos[rows], sin[rows], *rest)
        return [*cpu.attention_inputs(x[rows], weights, cos[rows], sin[rows], eps), out]

    for _ in every_level():
        whole = run(slice(None))
        for rows in (slice(0, 1), slice(7, 12), slice(69, 70)):
            for part, everything in zip(run(rows), whole, strict=True):
                assert_same(part, everything[rows])


def test_bad_input_is_refused_by_shape(make_weight, make_input) -> None:
    (x, weights, cos, sin, eps), (found, *_, wo_b, groups) = inputs(make_weight, make_input, "e4m3", 2, 2, 0)
    with pytest.raises(ValueError, match=r"whole heads of 64 rows, got shapes \[2, 96\] and \[96, 32\]"):
        cpu.attention_inputs(x, weights._replace(wq_b=make_weight("e4m3", 96, 32)), cos, sin, eps)
    with pytest.raises(ValueError, match=r"attention_inputs: all weights must have 96 inputs, got 64"):
        cpu.attention_inputs(x, weights._replace(wkv=make_weight("e4m3", 64, 64)), cos, sin, eps)
    with pytest.raises(ValueError, match="linear_e4m3: the last dimension of x must be 64"):
        cpu.attention_output(found, cos, sin, make_weight("e4m3", 32, 64), wo_b, groups)


def test_ops_are_well_formed_for_torch(make_weight, make_input) -> None:
    (x, (a, q_norm, b, kv, kv_norm), *angles, eps), after = inputs(make_weight, make_input, "e4m3", 3, 2, 0)
    found, cos, sin, wo_a, wo_b, groups = after
    codes = (a.codes, a.scales, q_norm, b.codes, b.scales, kv.codes, kv.scales, kv_norm)
    ops, utils = torch.ops.sgl_kernel_ext, ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.attention_inputs.default, (x, *codes, *angles, eps), test_utils=utils)
    output = (found, cos, sin, wo_a.codes, wo_a.scales, groups, wo_b.codes, wo_b.scales)
    torch.library.opcheck(ops.attention_output.default, output, test_utils=utils)
    assert sgl_kernel_ext.attention_output(*output).shape == (3, 96)
