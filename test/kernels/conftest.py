"""What the tests of fast kernels share: CPU levels, random weights in every stored form, comparison of bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import sgl_kernel_ext
from sglang_ced.formats import E2m1Weight, E4m3Weight, Weight, quantize_e2m1_ue8m0, quantize_weight_e4m3
from sglang_ced.kernels import registry


@pytest.fixture(autouse=True, scope="module")
def references_alone() -> Iterator[None]:
    """Every op runs its reference, so that `op.reference` calls no fast version of another op."""
    registry.activate("reference")
    yield
    registry.activate("reference")


@pytest.fixture(scope="session")
def every_level() -> Callable[[], Iterator[str]]:
    """Iterate over the CPU levels of this machine, each in force within its turn."""

    def levels() -> Iterator[str]:
        try:
            for level in sgl_kernel_ext.supported_cpu_capabilities():
                sgl_kernel_ext.force_cpu_capability(level)
                yield level
        finally:
            sgl_kernel_ext.force_cpu_capability(None)

    return levels


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Tensor, Tensor], None]:
    """Same dtype, shape and values bit for bit; all NaNs count as one, and so do the two zeros."""

    def check(actual: Tensor, expected: Tensor) -> None:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)

    return check


@pytest.fixture(scope="session")
def make_weight() -> Callable[..., Weight]:
    """make_weight(kind, n, k, seed, spread): random [n, k] weight as "e4m3", "e2m1", "bfloat16" or "float32".

    spread: magnitudes vary by up to 2^+-spread.
    """

    def make(kind: str, n: int, k: int, seed: int = 0, spread: int = 0) -> Weight:
        value = random_values((n, k), seed, spread) / k**0.5
        if kind == "e4m3":
            return E4m3Weight(*quantize_weight_e4m3(value))
        if kind == "e2m1":
            return E2m1Weight(*quantize_e2m1_ue8m0(value))
        return value.to({"bfloat16": torch.bfloat16, "float32": torch.float32}[kind])

    return make


@pytest.fixture(scope="session")
def make_input() -> Callable[..., Tensor]:
    """make_input(shape, seed, spread): random bfloat16, magnitudes varied by up to 2^+-spread."""
    return lambda shape, seed=0, spread=0: random_values(shape, seed, spread).to(torch.bfloat16)


def random_values(shape: tuple[int, ...], seed: int, spread: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(-spread, spread + 1, shape, generator=generator)
    return torch.randn(shape, generator=generator) * torch.exp2(exponent.float())


@pytest.fixture
def thread_counts() -> Iterator[Callable[[], Iterator[int]]]:
    """Iterate over numbers of threads, each in force within its turn."""
    before = torch.get_num_threads()

    def counts() -> Iterator[int]:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            yield count

    yield counts
    torch.set_num_threads(before)
