"""What the tests of fast kernels share: CPU levels, random weights in every stored form, comparison of bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import sgl_kernel_ext
from sglang_ced.formats import (
    E2m1Weight,
    E4m3Weight,
    Record,
    Weight,
    fake_quant_e2m1_ue8m0,
    quantize_e2m1_ue8m0,
    quantize_weight_e4m3,
)
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


@pytest.fixture(scope="session")
def make_query(make_input) -> Callable[[int, int, int, int, int], tuple[Tensor, Tensor, Tensor]]:
    """(rows, heads, dim, groups, seed) -> queries [T, H, D], head weights [T, H], packed keys [G, bytes]."""

    def make(rows: int, heads: int, dim: int, groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        q = fake_quant_e2m1_ue8m0(make_input((rows, heads, dim), seed, 2))
        keys = Record(dim, "index").encode(make_input((groups, dim), seed + 2, 2))
        return q, make_input((rows, heads), seed + 1), keys

    return make


@pytest.fixture(scope="session")
def make_scores() -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    """(rows, groups, seed) -> scores [T, G], visible [T].

    Few distinct values, zeros of both signs, infinities, NaN; groups from `visible` on hidden.
    """

    def make(rows: int, groups: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, torch.inf, -torch.inf, torch.nan, 3e-39]).to(torch.bfloat16)
        scores = values[torch.randint(0, len(values), (rows, groups), generator=generator)]
        noise = torch.randn(rows, groups, generator=generator).to(torch.bfloat16)
        scores = torch.where(torch.rand(rows, groups, generator=generator) < 0.5, noise, scores)
        visible = torch.randint(0, groups + 1, (rows,), generator=generator)
        return scores.masked_fill(torch.arange(groups) >= visible[:, None], -torch.inf), visible

    return make


@pytest.fixture(scope="session")
def make_record_values(make_input) -> Callable[[int, int, int, int, int], Tensor]:
    """(rows, dim, seed, spread, magnitude) -> bfloat16 [rows, dim].

    Random, some of them ties between two codes, zeros of both signs, infinities and the largest numbers.
    """

    def make(rows: int, dim: int, seed: int, spread: int, magnitude: int) -> Tensor:
        x = make_input((rows, dim), seed, spread) * 2.0**magnitude
        generator = torch.Generator().manual_seed(seed)
        special = torch.tensor([0.0, -0.0, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 6.0, 1e-40, 3.39e38, -torch.inf])
        picked = special[torch.randint(0, len(special), x.shape, generator=generator)].to(torch.bfloat16)
        return torch.where(torch.rand(x.shape, generator=generator) < 0.1, picked, x)

    return make
