"""Attention from packed records: the reference's result at every CPU level, row by row.

Both round at the same points and differ in the order of float64 sums alone, so an element can differ only where a sum
lies within about 2^-50 of a rounding boundary: the tests ask for equal bits.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sgl_kernel_ext
from sglang_ced.formats import Record
from sglang_ced.kernels import attention, cpu


def make_case(make_input, rows, heads, dim, window, slots, width, seed, spread=0) -> tuple[Tensor | None, ...]:
    """(q, window, pool, keys, sink) with about a quarter of the key entries empty."""
    generator = torch.Generator().manual_seed(seed)
    pool = Record(dim, "global").encode(make_input((slots, dim), seed + 1)) if slots else None
    keys = torch.randint(-(window + slots) // 3 - 1, window + slots, (rows, width), generator=generator).clamp_min(-1)
    sink = torch.randn(heads, generator=generator)
    return make_input((rows, heads, dim), seed + 2, spread), make_input((window, dim), seed + 3), pool, keys, sink


@settings(max_examples=50, deadline=None)
@given(
    rows=st.integers(0, 9),
    heads=st.integers(1, 9),
    dim=st.sampled_from([16, 32, 48, 64, 256]),
    window=st.integers(1, 200),
    slots=st.sampled_from([0, 1, 70, 300]),
    width=st.integers(1, 200),
    spread=st.integers(0, 4),
    seed=st.integers(0, 2**31),
)
def test_attend_equals_reference(
    every_level, assert_same, make_input, rows, heads, dim, window, slots, width, spread, seed
) -> None:
    case = make_case(make_input, rows, heads, dim, window, slots, width, seed, spread)
    expected = attention.attend.reference(*case)
    for _ in every_level():
        assert_same(cpu.attend(*case), expected)


@given(
    rows=st.integers(0, 9),
    width=st.integers(0, 20),
    k=st.integers(0, 20),
    missing=st.booleans(),
    seed=st.integers(0, 99),
)
def test_join_keys_equals_reference(assert_same, rows, width, k, missing, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    window, groups = (torch.randint(-1, 50, (rows, size), generator=generator) for size in (width, k))
    args = (window.sort(descending=True).values, None if missing else groups.sort(descending=True).values, 40)
    assert_same(cpu.join_keys(*args), attention.join_keys.reference(*args))


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(0, 9),
    heads=st.integers(1, 9),
    dim=st.sampled_from([16, 32, 48, 64, 256]),
    window=st.integers(1, 200),
    slots=st.sampled_from([1, 70, 300]),
    width=st.integers(1, 200),
    seed=st.integers(0, 2**31),
)
def test_a_pool_of_bfloat16_gives_the_bits_of_the_packed_one(
    every_level, make_input, rows, heads, dim, window, slots, width, seed
) -> None:
    q, window, packed, keys, sink = make_case(make_input, rows, heads, dim, window, slots, width, seed)
    plain = Record(dim, "global_bf16").encode(make_input((slots, dim), seed + 1))
    expected = attention.attend.reference(q, window, packed, keys, sink)
    assert torch.equal(attention.attend.reference(q, window, plain, keys, sink), expected)
    for _ in every_level():
        assert torch.equal(
            cpu.attend(q, window, plain, keys, sink).view(torch.int16),
            cpu.attend(q, window, packed, keys, sink).view(torch.int16),
        )


def test_attend_equals_reference_at_the_published_shape(every_level, assert_same, make_input) -> None:
    case = make_case(make_input, 3, 64, 512, 130, 600, 640, 0)
    expected = attention.attend.reference(*case)
    for _ in every_level():
        assert_same(cpu.attend(*case), expected)


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_attend_matches_the_publisher(every_level, golden_ops: dict[str, Tensor], name: str) -> None:
    """Within the limits of test/golden/data/README.md; all keys of a golden case are window rows."""
    q, kv, keys, sink, out = (golden_ops[f"sparse_attn_{name}/{part}"] for part in ("q", "kv", "idx", "sink", "out"))
    for _ in every_level():
        actual = cpu.attend(q, kv, None, keys.long(), sink)
        assert (actual - out).abs().max() <= 0.01 * out.abs().max()
        assert (actual == out).float().mean() >= 0.98


def test_row_without_keys_gives_zeros(every_level, make_input) -> None:
    q, window, pool, keys, sink = make_case(make_input, 3, 2, 32, 10, 10, 70, 0)
    keys[1] = -1
    for _ in every_level():
        out = cpu.attend(q, window, pool, keys, sink)
        assert not out[1].any()
        assert out[::2].any()


def test_nan_stays_in_its_head(every_level, make_input) -> None:
    case = make_case(make_input, 4, 6, 32, 10, 10, 70, 0)
    case[0][2, 3, 5] = torch.nan
    for _ in every_level():
        bad = cpu.attend(*case).isnan().all(-1)
        assert bad[2, 3]
        assert bad.sum() == 1


def test_a_row_does_not_depend_on_its_batch(every_level, assert_same, make_input) -> None:
    q, window, pool, keys, sink = make_case(make_input, 40, 6, 64, 100, 100, 130, 0)
    for _ in every_level():
        whole = cpu.attend(q, window, pool, keys, sink)
        for rows in (slice(0, 1), slice(7, 9), slice(39, 40)):
            assert_same(cpu.attend(q[rows], window, pool, keys[rows], sink), whole[rows])


def test_result_does_not_depend_on_threads(every_level, thread_counts, assert_same, make_input) -> None:
    """One row is shared among threads by heads, many rows by rows."""
    q, window, pool, keys, sink = make_case(make_input, 5, 13, 64, 100, 100, 130, 0)
    for _ in every_level():
        whole = cpu.attend(q, window, pool, keys, sink)
        for _ in thread_counts():
            assert_same(cpu.attend(q, window, pool, keys, sink), whole)
            assert_same(cpu.attend(q[:1], window, pool, keys[:1], sink), whole[:1])


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"q": torch.zeros(2, 3, 32)}, TypeError, r"attend: q must be bfloat16, got Float of shape \[2, 3, 32\]"),
        ({"window": torch.zeros(5, 64, dtype=torch.bfloat16)}, ValueError, r"got 32 and window of shape \[5, 64\]"),
        (
            {"pool": torch.zeros(7, 17, dtype=torch.uint8)},
            ValueError,
            r"\[7, 18\], or \[7, 64\] as bfloat16, got \[7, 17\]",
        ),
        ({"keys": torch.zeros(3, 4, dtype=torch.int64)}, ValueError, r"keys must have shape \[2, 4\], got \[3, 4\]"),
        ({"keys": torch.full((2, 4), 12)}, IndexError, r"key entry 12 is beyond the 12 window rows and pool slots"),
        ({"sink": torch.zeros(2)}, ValueError, r"sink must have shape \[3\], got \[2\]"),
    ],
)
def test_bad_input_is_refused_by_shape_and_dtype(change, error, says) -> None:
    good = {
        "q": torch.zeros(2, 3, 32, dtype=torch.bfloat16),
        "window": torch.zeros(5, 32, dtype=torch.bfloat16),
        "pool": torch.zeros(7, 18, dtype=torch.uint8),
        "keys": torch.zeros(2, 4, dtype=torch.int64),
        "sink": torch.zeros(3),
    }
    with pytest.raises(error, match=says):
        sgl_kernel_ext.attend(**(good | change))
