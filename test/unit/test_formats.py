"""Number formats: what rounds to what, and that stored forms lose nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ced import formats
from sglang_ced.formats import E2m1Weight, E4m3Weight, Record, record_of

untimed = settings(deadline=None)

FAKE = {
    "window": formats.fake_quant_e4m3,
    "global": formats.fake_quant_e2m1_e4m3,
    "index": formats.fake_quant_e2m1_ue8m0,
    "global_bf16": formats.fake_quant_e2m1_e4m3,
    "index_bf16": formats.fake_quant_e2m1_ue8m0,
}


def values(seed: int, rows: int, dim: int, exponent: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, dim, generator=generator) * 2.0**exponent).to(torch.bfloat16)


@pytest.mark.parametrize("kind", FAKE)
@untimed
@given(seed=st.integers(0, 1000), rows=st.integers(0, 5), blocks=st.integers(1, 4), exponent=st.integers(-20, 8))
def test_storing_a_record_is_rounding_it(kind: str, seed: int, rows: int, blocks: int, exponent: int) -> None:
    record = Record(32 * blocks, kind)
    x = values(seed, rows, record.dim, exponent)
    stored = record.encode(x)
    assert stored.dtype == torch.uint8
    assert stored.shape == (rows, record.nbytes)
    assert torch.equal(record.decode(stored), FAKE[kind](x))


@pytest.mark.parametrize("kind", ["window", "index"])
@untimed
@given(seed=st.integers(0, 1000), exponent=st.integers(-20, 8))
def test_records_with_power_of_two_scales_keep_rounded_values(kind: str, seed: int, exponent: int) -> None:
    """Window rows are rounded before attention reads them and stored afterwards: nothing may change then."""
    rounded = FAKE[kind](values(seed, 5, 64, exponent))
    assert torch.equal(Record(64, kind).decode(Record(64, kind).encode(rounded)), rounded)


@pytest.mark.parametrize("kind", ["global", "index"])
@untimed
@given(seed=st.integers(0, 1000), exponent=st.integers(-20, 8))
def test_a_bfloat16_record_holds_the_bits_of_the_packed_one(kind: str, seed: int, exponent: int) -> None:
    packed, plain = Record(64, kind), Record(64, f"{kind}_bf16")
    x = values(seed, 5, 64, exponent)
    stored = packed.decode(packed.encode(x))
    assert torch.equal(plain.encode(x), stored.view(torch.uint8))
    assert torch.equal(plain.decode(plain.encode(x)).view(torch.int16), stored.view(torch.int16))


def test_every_code_with_every_scale_of_a_latent_is_exact_in_bfloat16() -> None:
    """2 significant bits times 4, from 2^-10 to 6 * 448: all that a packed record can hold, a bfloat16 record can."""
    codes, scales = torch.arange(16), torch.arange(256, dtype=torch.uint8)
    packed = formats.pack_e2m1(codes.to(torch.uint8)).expand(256, 8)
    wide = torch.tensor(formats.E2M1_VALUES + tuple(-v for v in formats.E2M1_VALUES), dtype=torch.float64)
    exact = wide * scales.view(torch.float8_e4m3fn).double()[:, None]
    read = Record(16, "global").decode(torch.cat((packed, scales[:, None]), 1))
    torch.testing.assert_close(read.double(), exact, rtol=0, atol=0, equal_nan=True)
    assert exact[:, 1:8].isnan().any(1).nonzero().flatten().tolist() == [127, 255]


def test_every_code_with_every_scale_of_an_index_key_is_exact_in_bfloat16() -> None:
    """But for products beyond the largest bfloat16, which no key has, and byte 255, which no key is stored with."""
    scales = torch.arange(255, dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    wide = torch.tensor(formats.E2M1_VALUES + tuple(-v for v in formats.E2M1_VALUES), dtype=torch.float64).repeat(2)
    exact = wide * formats.ue8m0_to_float(scales).double()[:, None]
    read = Record(32, "index").decode(torch.cat((formats.pack_e2m1(codes).expand(255, 16), scales[:, None]), 1))
    fits = exact.abs() <= torch.finfo(torch.bfloat16).max
    assert torch.equal(read.double()[fits], exact[fits])
    assert fits[:252].all()


def test_the_width_of_rows_tells_their_record() -> None:
    for kind in ("global", "index"):
        for record in (Record(64, kind), Record(64, f"{kind}_bf16")):
            assert record_of(torch.zeros(3, record.nbytes, dtype=torch.uint8), 64, kind) == record
    with pytest.raises(
        ValueError, match=r"global record of 64 values takes 36 bytes, or 128 as bfloat16; .* \[3, 34\]"
    ):
        record_of(torch.zeros(3, 34, dtype=torch.uint8), 64, "global")


@pytest.mark.parametrize("kind", FAKE)
def test_rounding_twice_is_rounding_once(kind: str) -> None:
    once = FAKE[kind](values(1, 50, 64, 0))
    assert torch.equal(FAKE[kind](once), once)


@pytest.mark.parametrize("kind", FAKE)
def test_zero_rows_stay_zero(kind: str) -> None:
    zero = torch.zeros(2, 64, dtype=torch.bfloat16)
    assert torch.equal(FAKE[kind](zero), zero)


def test_e2m1_rounds_to_nearest_and_ties_to_even() -> None:
    """Every midpoint and its two neighbours, with a block maximum of 6 so that the scale is 1."""
    x = torch.tensor([0.0, 0.25, 0.26, 0.74, 0.75, 1.25, 1.26, 1.74, 1.75, 2.5, 2.51, 3.49, 3.5, 5.0, 5.01, 6.0])
    expected = torch.tensor([0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0, 6.0, 6.0])
    assert torch.equal(formats.fake_quant_e2m1_e4m3(x), expected)
    assert torch.equal(formats.fake_quant_e2m1_e4m3(-x), -expected)


@untimed
@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
def test_packing_puts_the_even_index_in_the_low_nibble(codes: list[int]) -> None:
    packed = formats.pack_e2m1(torch.tensor(codes, dtype=torch.uint8))
    assert packed.tolist() == [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = [table[code & 7] * (-1 if code & 8 else 1) for code in codes]
    assert formats.unpack_e2m1(packed).tolist() == expected


def test_every_ue8m0_byte() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    value = formats.ue8m0_to_float(codes)
    assert value[:255].tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert value[255].isnan()


@untimed
@given(st.floats(2.0**-126, 2.0**120, width=32))
def test_the_exponent_is_the_ceiling_of_the_logarithm(x: float) -> None:
    exponent = int(formats.ceil_exponent(torch.tensor(x)))
    assert 2.0 ** (exponent - 1) < x <= 2.0**exponent


@pytest.mark.parametrize("shape", [(32, 32), (33, 64), (5, 96), (320, 40)])
def test_fp8_weights_have_one_power_of_two_per_tile(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    stored = E4m3Weight(*formats.quantize_weight_e4m3(weight))
    assert stored.shape == shape
    assert stored.scales.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    error = (stored.dequantize() - weight).abs()
    assert (error <= 2**-4 * weight.abs() + 2**-9 * weight.abs().max()).all()


def test_fp4_weights_keep_values_on_their_grid() -> None:
    weight = formats.fake_quant_e2m1_ue8m0(torch.randn(7, 64, generator=torch.Generator().manual_seed(0)))
    stored = E2m1Weight(*formats.quantize_e2m1_ue8m0(weight))
    assert stored.shape == (7, 64)
    assert torch.equal(stored.dequantize(), weight)


def test_a_width_that_is_no_multiple_of_the_block_is_named() -> None:
    with pytest.raises(ValueError, match="last dimension 40 is not a multiple of the block of 32"):
        formats.quantize_e4m3(torch.zeros(2, 40))
