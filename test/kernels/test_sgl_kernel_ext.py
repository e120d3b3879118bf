"""sgl_kernel_ext: block quantisation gives the golden bytes, at every CPU level and for any shape."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sgl_kernel_ext

LEVELS = sgl_kernel_ext.supported_cpu_capabilities()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    sgl_kernel_ext.force_cpu_capability(request.param)
    yield request.param
    sgl_kernel_ext.force_cpu_capability(None)


# -- a slow implementation to compare with -------------------------------------------------------------------


def slow_quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Finite bfloat16 -> (codes, scales), with torch's own e4m3 cast and a logarithm-free ceil(log2)."""
    blocks = x.float().unflatten(-1, (-1, 32))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1).clamp_min(1e-4) / 448.0)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scaled = (blocks.double() / torch.exp2(exponent.double()).unsqueeze(-1)).clamp(-448, 448).float()
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2), (exponent + 127).to(torch.uint8)


def slow_dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    values = codes.view(torch.float8_e4m3fn).double().unflatten(-1, (-1, 32))
    scale = torch.exp2(scales.double() - 127)
    return (values * scale.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    integer = {1: torch.uint8, 2: torch.int16}[actual.element_size()]
    assert torch.equal(actual.view(integer), expected.view(integer))


def assert_matches_slow(x: Tensor) -> None:
    codes, scales = slow_quantize(x)
    for capability in LEVELS:
        sgl_kernel_ext.force_cpu_capability(capability)
        try:
            actual_codes, actual_scales = sgl_kernel_ext.quantize_e4m3(x)
            assert_same_bits(actual_scales, scales)
            assert_same_bits(actual_codes, codes)
            assert_same_bits(sgl_kernel_ext.fake_quant_e4m3(x), slow_dequantize(codes, scales))
        finally:
            sgl_kernel_ext.force_cpu_capability(None)


def from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).to(torch.int16).view(torch.bfloat16)


# -- values --------------------------------------------------------------------------------------------------


def test_fake_quant_gives_golden_bytes(level: str, golden_ops: dict[str, Tensor]) -> None:
    result = sgl_kernel_ext.fake_quant_e4m3(golden_ops["quant/x"])
    assert_same_bits(result, golden_ops["quant/fp8_dequant"])


def test_quantize_gives_golden_bytes(level: str, golden_ops: dict[str, Tensor]) -> None:
    codes, scales = sgl_kernel_ext.quantize_e4m3(golden_ops["quant/x"])
    assert_same_bits(codes, golden_ops["quant/fp8_codes"])
    assert_same_bits(scales, golden_ops["quant/fp8_scale_ue8m0"])


def test_every_finite_bfloat16_alone_in_its_block() -> None:
    magnitudes = torch.arange(0x7F80)
    x = torch.zeros(2 * len(magnitudes), 32, dtype=torch.bfloat16)
    x[:, 5] = from_bits(torch.cat((magnitudes, magnitudes + 0x8000)))
    assert_matches_slow(x)


@pytest.mark.parametrize("largest", [1e-4, 1.0, 448.0, 450.0, 3e38])
def test_every_smaller_bfloat16_beside_the_largest_of_its_block(largest: float) -> None:
    bits = torch.arange(0x7F80)
    values = from_bits(bits)
    values = values[values <= largest]
    x = torch.cat((values, torch.zeros(-len(values) % 31, dtype=torch.bfloat16))).view(-1, 31)
    x = torch.cat((torch.full((len(x), 1), largest, dtype=torch.bfloat16), x), dim=1)
    assert_matches_slow(torch.cat((x, -x)))


def test_a_nan_stays_and_touches_no_neighbour(level: str) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    clean = x.clone()
    clean[1, 7] = clean[2, 40] = 0.0
    x[1, 7], x[2, 40] = from_bits(torch.tensor([0x7FC1, 0xFFC2]))
    expected, (codes, scales) = sgl_kernel_ext.fake_quant_e4m3(clean), sgl_kernel_ext.quantize_e4m3(clean)
    expected[1, 7], expected[2, 40] = x[1, 7], x[2, 40]
    codes[1, 7], codes[2, 40] = 0x7F, 0xFF
    assert_same_bits(sgl_kernel_ext.fake_quant_e4m3(x), expected)
    assert_same_bits(sgl_kernel_ext.quantize_e4m3(x)[0], codes)
    assert_same_bits(sgl_kernel_ext.quantize_e4m3(x)[1], scales)


def test_an_infinity_saturates_and_comes_back(level: str) -> None:
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 3], x[0, 4] = torch.inf, -torch.inf
    codes, scales = sgl_kernel_ext.quantize_e4m3(x)
    assert (codes[0, 3], codes[0, 4], scales[0, 0]) == (0x7E, 0xFE, 127 + 120)
    assert_same_bits(sgl_kernel_ext.fake_quant_e4m3(x), x)


@settings(deadline=None, max_examples=60)
@given(
    lead=st.lists(st.integers(0, 5), max_size=3),
    blocks=st.integers(0, 9),
    magnitude=st.integers(-30, 30),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_magnitude(lead: list[int], blocks: int, magnitude: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (*lead, 32 * blocks)
    spread = torch.randint(-12, 1, shape, generator=generator)
    assert_matches_slow((torch.randn(shape, generator=generator) * 2.0 ** (magnitude + spread)).to(torch.bfloat16))


def test_result_does_not_depend_on_threads(level: str) -> None:
    x = torch.randn(3001, 160, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = sgl_kernel_ext.fake_quant_e4m3(x)
        torch.set_num_threads(4)
        assert_same_bits(sgl_kernel_ext.fake_quant_e4m3(x), alone)
    finally:
        torch.set_num_threads(threads)


# -- contract ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [sgl_kernel_ext.fake_quant_e4m3, sgl_kernel_ext.quantize_e4m3])
@pytest.mark.parametrize(
    ("x", "error", "says"),
    [
        (torch.zeros(2, 33, dtype=torch.bfloat16), ValueError, r"multiple of 32.*\[2, 33\].*BFloat16"),
        (torch.zeros((), dtype=torch.bfloat16), ValueError, r"multiple of 32.*\[\].*BFloat16"),
        (torch.zeros(2, 32), TypeError, r"bfloat16.*Float.*\[2, 32\]"),
        (torch.zeros(32, 32, dtype=torch.bfloat16).t(), ValueError, r"contiguous.*\[32, 32\].*BFloat16"),
    ],
)
def test_bad_input_is_refused_by_shape_and_dtype(op, x: Tensor, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        op(x)


@pytest.mark.parametrize("name", ["fake_quant_e4m3", "quantize_e4m3"])
def test_op_is_well_formed_for_torch(name: str) -> None:
    op = getattr(torch.ops.sgl_kernel_ext, name).default
    torch.library.opcheck(op, (torch.ones(3, 64, dtype=torch.bfloat16),), test_utils=("test_schema", "test_faketensor"))


# -- CPU levels ----------------------------------------------------------------------------------------------


def test_best_level_is_the_default() -> None:
    assert sgl_kernel_ext.cpu_capability() == LEVELS[-1]


def test_generic_is_always_there() -> None:
    assert LEVELS[0] == "generic"


def test_unknown_level_is_refused_with_the_choice() -> None:
    with pytest.raises(ValueError, match=r"'avx1024'.*use one of: generic"):
        sgl_kernel_ext.force_cpu_capability("avx1024")
    assert sgl_kernel_ext.cpu_capability() == LEVELS[-1]


def test_environment_variable_sets_the_level() -> None:
    command = [sys.executable, "-c", "import sgl_kernel_ext; print(sgl_kernel_ext.cpu_capability())"]
    environment = os.environ | {"SGL_KERNEL_EXT_CPU": "generic"}
    assert subprocess.run(command, env=environment, capture_output=True, text=True).stdout.strip() == "generic"
