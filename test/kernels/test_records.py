"""Packed cache rows: the bytes and values of the reference, for every kind, at every CPU level."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sgl_kernel_ext
from sglang_ced.formats import Record
from sglang_ced.kernels import cpu, records

KINDS = ["global", "index", "window", "global_bf16", "index_bf16"]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(0, 40),
    blocks=st.integers(1, 6),
    spread=st.integers(0, 12),
    magnitude=st.integers(-110, 100),
    seed=st.integers(0, 2**31),
)
def test_records_equal_reference(
    every_level, assert_same, make_record_values, kind, rows, blocks, spread, magnitude, seed
) -> None:
    record = Record(32 * blocks, kind)
    values = make_record_values(rows, record.dim, seed, spread, magnitude)
    if kind not in ("global", "global_bf16"):
        values = values.masked_fill(values.isinf(), 0)  # has no power of two to be scaled by
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 256, (60, record.nbytes), dtype=torch.uint8, generator=generator)
    places = torch.randperm(60, generator=generator)[:rows]
    expected = before.clone()
    records.write_records.reference(expected, places, values, record)
    for _ in every_level():
        pool = before.clone()
        cpu.write_records(pool, places, values, record)
        assert_same(pool, expected)
        assert_same(cpu.read_records(pool, places, record), records.read_records.reference(pool, places, record))


@settings(max_examples=30, deadline=None)
@given(prior=st.integers(0, 40), rows=st.integers(0, 20), blocks=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_exchange_equals_reference(every_level, assert_same, make_input, prior, rows, blocks, seed) -> None:
    """A record may be read and then overwritten."""
    record, generator = Record(32 * blocks, "window"), torch.Generator().manual_seed(seed)
    before = torch.zeros(60, record.nbytes, dtype=torch.uint8)
    records.write_records.reference(before, torch.arange(60), make_input((60, record.dim), seed), record)
    values, kept = make_input((rows, record.dim), seed + 1), torch.arange(rows)[rows // 3 :]
    places = [torch.randperm(60, generator=generator)[:count] for count in (prior, len(kept))]
    expected = before.clone()
    joined = records.exchange_records.reference(expected, places[0], kept, places[1], values, record)
    for _ in every_level():
        pool = before.clone()
        assert_same(cpu.exchange_records(pool, places[0], kept, places[1], values, record), joined)
        assert_same(pool, expected)


@settings(max_examples=30, deadline=None)
@given(kind=st.sampled_from(KINDS), blocks=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_any_bytes_are_read_as_the_formats_say(every_level, assert_same, kind, blocks, seed) -> None:
    record, generator = Record(32 * blocks, kind), torch.Generator().manual_seed(seed)
    pool = torch.randint(0, 256, (50, record.nbytes), dtype=torch.uint8, generator=generator)
    rows = torch.randint(0, 50, (30,), generator=generator)
    expected = records.read_records.reference(pool, rows, record)
    for _ in every_level():
        assert_same(cpu.read_records(pool, rows, record), expected)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 40),
    blocks=st.integers(1, 6),
    spread=st.integers(0, 12),
    magnitude=st.integers(-110, 100),
    seed=st.integers(0, 2**31),
)
def test_round_index_equals_reference(
    every_level, assert_same, make_record_values, rows, blocks, spread, magnitude, seed
) -> None:
    x = make_record_values(rows, 32 * blocks, seed, spread, magnitude)
    x = x.masked_fill(x.isinf(), 0)  # has no power of two to be scaled by
    expected = records.round_index.reference(x)
    for _ in every_level():
        assert_same(cpu.round_index(x), expected)


@pytest.mark.parametrize("kind", ["global", "index", "global_bf16", "index_bf16"])
def test_a_nan_is_stored_as_zero_and_touches_no_neighbour(every_level, assert_same, make_input, kind) -> None:
    record, values = Record(64, kind), make_input((3, 64))
    clean = values.clone()
    values[1, 5], clean[1, 5] = torch.nan, 0.0
    pools = [torch.zeros(3, record.nbytes, dtype=torch.uint8) for _ in range(2)]
    for _ in every_level():
        cpu.write_records(pools[0], torch.arange(3), values, record)
        cpu.write_records(pools[1], torch.arange(3), clean, record)
        assert_same(*pools)


def test_result_does_not_depend_on_threads(thread_counts, assert_same, make_input) -> None:
    record, values, rows = Record(128, "global"), make_input((1000, 128)), torch.randperm(1000)
    pool = torch.zeros(1000, record.nbytes, dtype=torch.uint8)
    cpu.write_records(pool, rows, values, record)
    for _ in thread_counts():
        other = torch.zeros_like(pool)
        cpu.write_records(other, rows, values, record)
        assert_same(other, pool)
        assert_same(cpu.read_records(other, rows, record), cpu.read_records(pool, rows, record))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"pool": torch.zeros(9, 18)}, TypeError, r"write_records: pool must be Byte, got Float of shape \[9, 18\]"),
        ({"pool": torch.zeros(9, 17, dtype=torch.uint8)}, ValueError, r"pool must have shape \[9, 18\], got \[9, 17\]"),
        ({"rows": torch.tensor([0, 9])}, IndexError, "row 9 is not in the pool of 9"),
        ({"rows": torch.tensor([0])}, ValueError, r"values must have shape \[1, 32\], got \[2, 32\]"),
        ({"values": torch.zeros(2, 40, dtype=torch.bfloat16)}, ValueError, "needs a multiple of 16 values, got 40"),
        ({"kind": "global_bf16"}, ValueError, r"pool must have shape \[9, 64\], got \[9, 18\]"),
        ({"kind": "local"}, ValueError, "kind must be global, index, window, global_bf16 or index_bf16, got local"),
    ],
)
def test_bad_input_is_refused_by_shape_and_dtype(change, error, says) -> None:
    good = {
        "pool": torch.zeros(9, 18, dtype=torch.uint8),
        "rows": torch.tensor([0, 4]),
        "values": torch.zeros(2, 32, dtype=torch.bfloat16),
        "kind": "global",
    }
    with pytest.raises(error, match=says):
        sgl_kernel_ext.write_records(**(good | change))
