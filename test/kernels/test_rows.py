"""Norm, rotation, hyper-connections and n-gram memory: the reference's result at every CPU level, row by row."""

from __future__ import annotations

import errno

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sgl_kernel_ext
from sglang_ced.kernels import cpu, engram, mhc, norm, rope

EPS = 1e-20
SHAPE = {"rows": st.integers(0, 40), "d": st.integers(1, 300), "seed": st.integers(0, 2**31)}


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -- values -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(wide=st.booleans(), wide_weight=st.booleans(), **SHAPE)
def test_rms_norm_equals_reference(every_level, assert_same, make_input, wide, wide_weight, rows, d, seed) -> None:
    x, weight = make_input((rows, d), seed, 3), make_input((d,), seed + 1)
    x, weight = x.float() / 3 if wide else x, weight.float() / 3 if wide_weight else weight
    if rows:
        x[0] = 0
    expected = norm.rms_norm.reference(x, weight, EPS)
    for _ in every_level():
        assert_same(cpu.rms_norm(x, weight, EPS), expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 20),
    heads=st.integers(0, 5),
    pairs=st.integers(1, 40),
    kept=st.integers(0, 40),
    inverse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rotate_equals_reference(every_level, assert_same, make_input, rows, heads, pairs, kept, inverse, seed) -> None:
    middle = (heads,) if heads else ()
    x = make_input((rows, *middle, kept + 2 * pairs), seed)
    positions = torch.randint(0, 2**20, (rows,), generator=torch.Generator().manual_seed(seed))
    cos, sin = rope.angles(positions, rope.frequencies(2 * pairs, 10000.0))
    expected = rope.rotate.reference(x, cos, sin, inverse)
    for _ in every_level():
        assert_same(cpu.rotate(x, cos, sin, inverse), expected)


def hyper_connection(make_input, rows: int, n: int, d: int, seed: int) -> tuple[Tensor, ...]:
    """(streams, fn, base, scale)"""
    outputs = n * (n + 2)
    fn = floats(outputs, n * d, seed=seed + 1) / (n * d) ** 0.5
    return make_input((rows, n, d), seed, 2), fn, floats(outputs, seed=seed + 2), floats(3, seed=seed + 3)


@settings(max_examples=40, deadline=None)
@given(n=st.sampled_from([1, 2, 4, 8]), iters=st.integers(1, 20), **SHAPE)
def test_hyper_connections_equal_reference(every_level, assert_same, make_input, n, iters, rows, d, seed) -> None:
    site = hyper_connection(make_input, rows, n, d, seed)
    y = make_input((rows, d), seed + 4)
    mixed = mhc.mixes.reference(*site, iters, 1e-6)
    pre, post, comb = mixed
    entry = (site[0], pre, make_input((d,), seed + 5), EPS, *site[1:], iters, 1e-6)
    entered = mhc.enter.reference(*entry)
    collapsed, expanded = mhc.collapse.reference(site[0], pre), mhc.expand.reference(y, site[0], post, comb)
    for _ in every_level():
        for actual, expected in zip(cpu.mixes(*site, iters, 1e-6), mixed, strict=True):
            assert_same(actual, expected)
        for actual, expected in zip(cpu.enter(*entry), entered, strict=True):
            assert_same(actual, expected)
        assert_same(cpu.collapse(site[0], pre), collapsed)
        assert_same(cpu.expand(y, site[0], post, comb), expanded)


@settings(max_examples=30, deadline=None)
@given(n=st.sampled_from([1, 2, 4]), masked=st.booleans(), **SHAPE)
def test_fuse_equals_reference(every_level, assert_same, make_input, n, masked, rows, d, seed) -> None:
    streams, keys_value = make_input((rows, n, d), seed), make_input((rows, (n + 1) * d), seed + 1)
    alive = floats(rows, seed=seed) > 0 if masked else None
    args = (streams, keys_value, floats(n, d, seed=seed + 2), EPS, alive)
    expected = engram.fuse.reference(*args)
    for _ in every_level():
        assert_same(cpu.fuse(*args), expected)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 9),
    heads=st.integers(1, 6),
    blocks=st.integers(1, 4),
    table=st.integers(1, 50),
    seed=st.integers(0, 2**31),
)
def test_look_up_equals_reference(every_level, assert_same, rows, heads, blocks, table, seed) -> None:
    """Any codes and scales, NaN included."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (table, 32 * blocks), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 256, (table, blocks), dtype=torch.uint8, generator=generator)
    args = (codes, scales, torch.randint(0, table, (rows, heads), generator=generator))
    expected = engram.look_up.reference(*args)
    for _ in every_level():
        assert_same(cpu.look_up(*args), expected)
        assert_same(cpu.look_up(*args, serial=True), expected)


@given(count=st.integers(0, 40), width=st.integers(1, 300), offset=st.integers(0, 5000), seed=st.integers(0, 2**31))
def test_read_rows_equals_reference(tmp_path_factory, count, width, offset, seed) -> None:
    """Rows of a file, any of them more than once, and what both say of a row behind its end."""
    generator = torch.Generator().manual_seed(seed)
    content = torch.randint(0, 256, (50, width), dtype=torch.uint8, generator=generator)
    file = tmp_path_factory.getbasetemp() / "rows"
    file.write_bytes(bytes(offset) + content.numpy().tobytes())
    rows = torch.randint(0, 50, (count,), generator=generator)
    with file.open("rb") as opened:
        for read in (cpu.read_rows, engram.read_rows.reference):
            out = torch.zeros(count, width, dtype=torch.uint8)
            assert read(opened.fileno(), offset, rows, out) == (-1, 0)
            assert torch.equal(out, content[rows])
            beyond = torch.cat((rows, torch.tensor([50]), rows))
            out = torch.zeros(len(beyond), width, dtype=torch.uint8)
            assert read(opened.fileno(), offset, beyond, out) == (count, errno.ENODATA)
    closed = torch.zeros(1, width, dtype=torch.uint8)
    for read in (cpu.read_rows, engram.read_rows.reference):
        assert read(-1, offset, torch.tensor([0]), closed) == (0, errno.EBADF)


# -- independence -----------------------------------------------------------------------------------------------------


def all_ops(make_input, rows: slice) -> list[Tensor]:
    """Every op of this file on some rows of one large case."""
    streams, *site = hyper_connection(make_input, 500, 4, 96, 0)
    y, memory = make_input((500, 96), 1)[rows], make_input((500, 5 * 96), 2)[rows]
    cos, sin = rope.angles(torch.arange(500)[rows], rope.frequencies(32, 10000.0))
    streams = streams[rows]
    pre, post, comb = cpu.mixes(streams, *site, 20, 1e-6)
    return [
        pre,
        post,
        comb,
        cpu.collapse(streams, pre),
        *cpu.enter(streams, pre, floats(96), EPS, *site, 20, 1e-6),
        cpu.expand(y, streams, post, comb),
        cpu.rms_norm(y, floats(96), EPS),
        cpu.rotate(streams, cos, sin),
        cpu.fuse(streams, memory, floats(4, 96), EPS),
    ]


def test_a_row_does_not_depend_on_its_batch(every_level, assert_same, make_input) -> None:
    for _ in every_level():
        whole = all_ops(make_input, slice(None))
        for rows in (slice(0, 1), slice(7, 12), slice(499, 500)):
            for part, everything in zip(all_ops(make_input, rows), whole, strict=True):
                assert_same(part, everything[rows])


def test_result_does_not_depend_on_threads_or_level(every_level, thread_counts, assert_same, make_input) -> None:
    expected = all_ops(make_input, slice(None))
    for _ in every_level():
        for _ in thread_counts():
            for actual, first in zip(all_ops(make_input, slice(None)), expected, strict=True):
                assert_same(actual, first)


# -- contract ---------------------------------------------------------------------------------------------------------

H = torch.zeros(2, 4, 32, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: sgl_kernel_ext.rms_norm(H.double(), torch.ones(32), EPS),
         TypeError, r"rms_norm: x must be float32 or bfloat16, got Double of shape \[2, 4, 32\]"),
        (lambda: sgl_kernel_ext.rms_norm(H, torch.ones(31), EPS),
         ValueError, r"weight must have shape \[32\], got \[31\] of Float"),
        (lambda: sgl_kernel_ext.rotate(H, torch.zeros(2, 17), torch.zeros(2, 17)),
         ValueError, r"x must be \[2, \.\.\., 34 or more\], got shape \[2, 4, 32\]"),
        (lambda: sgl_kernel_ext.collapse(H, torch.zeros(2, 3)),
         ValueError, r"weights must have shape \[2, 4\], got \[2, 3\]"),
        (lambda: sgl_kernel_ext.expand(H[:, 0].contiguous(), H, torch.zeros(2, 4), torch.zeros(2, 4)),
         ValueError, r"comb must have 3 dimensions, got shape \[2, 4\]"),
        (lambda: sgl_kernel_ext.mixes(H, torch.zeros(24, 64), torch.zeros(24), torch.zeros(3), 20, 1e-6),
         ValueError, r"fn must have shape \[24, 128\], got \[24, 64\]"),
        (lambda: sgl_kernel_ext.look_up(torch.zeros(5, 32, dtype=torch.uint8), torch.zeros(5, 1, dtype=torch.uint8),
                                        torch.tensor([[5]])),
         IndexError, "row 5 is not in the table of 5"),
        (lambda: sgl_kernel_ext.read_rows(0, 0, torch.tensor([0, 1]), torch.zeros(1, 4, dtype=torch.uint8)),
         ValueError, r"out must have 2 rows, got \[1, 4\]"),
        (lambda: sgl_kernel_ext.read_rows(0, 0, torch.tensor([-1]), torch.zeros(1, 4, dtype=torch.uint8)),
         IndexError, "row -1"),
        (lambda: sgl_kernel_ext.fuse(H, torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(4, 32), EPS),
         ValueError, r"keys_value must have shape \[2, 160\], got \[2, 128\]"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_shape_and_dtype(call, error, says) -> None:
    with pytest.raises(error, match=says):
        call()
