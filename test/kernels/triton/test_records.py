"""Packed cache rows and pooled pairs: the bytes and values of the references."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sglang_ced.formats import Record
from sglang_ced.kernels import compressor, records
from sglang_ced.kernels.triton import compressor as fast_compressor
from sglang_ced.kernels.triton import records as fast

KINDS = ["global", "index", "window", "global_bf16", "index_bf16"]
FEW = settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes


@FEW
@given(
    kind=st.sampled_from(KINDS),
    rows=st.sampled_from([0, 1, 7]),
    blocks=st.integers(1, 6),
    spread=st.integers(0, 12),
    magnitude=st.integers(-110, 100),
    seed=st.integers(0, 2**31),
)
def test_records_equal_reference(
    assert_same, move, make_record_values, kind, rows, blocks, spread, magnitude, seed
) -> None:
    record = Record(32 * blocks, kind)
    values = make_record_values(rows, record.dim, seed, spread, magnitude)
    if not kind.startswith("global"):
        values = values.masked_fill(values.isinf(), 0)  # has no power of two to be scaled by
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(0, 256, (60, record.nbytes), dtype=torch.uint8, generator=generator)
    places = torch.randperm(60, generator=generator)[:rows]
    expected, pool = before.clone(), move(before.clone())
    records.write_records.reference(expected, places, values, record)
    fast.write_records(pool, move(places), move(values), record)
    assert_same(pool.cpu(), expected)
    read = fast.read_records(pool, move(places), record)
    assert_same(read.cpu(), records.read_records.reference(expected, places, record))


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_are_read_as_the_formats_say(assert_same, move, kind) -> None:
    record, generator = Record(96, kind), torch.Generator().manual_seed(0)
    pool = torch.randint(0, 256, (50, record.nbytes), dtype=torch.uint8, generator=generator)
    rows = torch.randint(0, 50, (30,), generator=generator)
    assert_same(
        fast.read_records(*move((pool, rows)), record).cpu(), records.read_records.reference(pool, rows, record)
    )


@FEW
@given(
    rows=st.sampled_from([0, 1, 40]),
    blocks=st.integers(1, 6),
    spread=st.integers(0, 12),
    magnitude=st.integers(-110, 100),
    seed=st.integers(0, 2**31),
)
def test_round_index_equals_reference(
    assert_same, move, make_record_values, rows, blocks, spread, magnitude, seed
) -> None:
    x = make_record_values(rows, 32 * blocks, seed, spread, magnitude)
    x = x.masked_fill(x.isinf(), 0)  # has no power of two to be scaled by
    assert_same(fast.round_index(move(x)).cpu(), records.round_index.reference(x))


@pytest.mark.parametrize("kind", ["global", "index", "global_bf16"])
def test_a_nan_is_stored_as_zero_and_touches_no_neighbour(assert_same, make_input, move, kind) -> None:
    record, values = Record(64, kind), make_input((3, 64))
    clean = values.clone()
    values[1, 5], clean[1, 5] = torch.nan, 0.0
    pools = move([torch.zeros(3, record.nbytes, dtype=torch.uint8) for _ in range(2)])
    fast.write_records(pools[0], *move((torch.arange(3), values)), record)
    fast.write_records(pools[1], *move((torch.arange(3), clean)), record)
    assert_same(*pools)


def test_pools_may_be_parts_of_wider_rows(assert_same, make_input, move) -> None:
    record, values, rows = Record(64, "window"), make_input((2, 64)), torch.tensor([3, 1])
    wide = torch.zeros(5, record.nbytes + 3, dtype=torch.uint8)
    expected = wide.clone()
    records.write_records.reference(expected[:, 1 : 1 + record.nbytes], rows, values, record)
    wide = move(wide)
    fast.write_records(wide[:, 1 : 1 + record.nbytes], *move((rows, values)), record)
    assert_same(wide.cpu(), expected)


def test_shapes_that_do_not_fit_are_refused(make_input) -> None:
    record, pool = Record(64, "index"), torch.zeros(4, 34, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"values of shape \[2, 32\]: 2 rows of 64, blocks of 32"):
        fast.write_records(pool, torch.arange(2), make_input((2, 32)), record)
    with pytest.raises(ValueError, match=r"pool of shape \[4, 33\]: index records of 64 have 34"):
        fast.read_records(pool[:, 1:], torch.arange(2), record)


@pytest.mark.parametrize(("pairs", "dim"), [(0, 32), (1, 5), (3, 600)])
def test_pool_pairs_equals_reference(assert_same, move, pairs, dim) -> None:
    """Gates far apart, equal and infinite; tokens of a pair lie beside their gates, as the cache keeps them."""
    together = torch.randn(pairs, 2, 2, dim, generator=torch.Generator().manual_seed(dim))
    together[:, :, 1] *= 20
    together[:, 0, 1, :2] = together[:, 1, 1, :2]
    together[:, 0, 1, 3:4] = -torch.inf
    kv, gate = together[:, :, 0], together[:, :, 1]
    together = move(together)
    assert_same(
        fast_compressor.pool_pairs(together[:, :, 0], together[:, :, 1]).cpu(),
        compressor.pool_pairs.reference(kv, gate),
    )
