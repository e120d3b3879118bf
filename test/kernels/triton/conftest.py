"""Tests of the Triton versions: on a GPU where there is one, else in Triton's interpreter on the CPU.

The interpreter is chosen by an environment variable that must be set before Triton is imported and would change every
other user of Triton in the process. So this folder runs in a process of its own: when pytest is asked for it alone, it
runs here; else `test/kernels/test_triton.py` starts that process.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_ced.formats import E2m1Weight, E4m3Weight

HERE = Path(__file__).parent
ON_GPU = torch.cuda.is_available()


def pytest_configure(config: pytest.Config) -> None:
    inside = asked_for_here(config)
    if any(inside) and not all(inside):
        raise pytest.UsageError(f"{HERE.relative_to(config.rootpath)} runs in a process of its own: name it alone")
    if any(inside) and not ON_GPU:
        os.environ["TRITON_INTERPRET"] = "1"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    inside = asked_for_here(config)
    return None if inside and all(inside) else True


def asked_for_here(config: pytest.Config) -> list[bool]:
    """For each path that pytest was given, whether it lies in this folder."""
    base = config.invocation_params.dir
    return [(base / argument.split("::")[0]).resolve().is_relative_to(HERE) for argument in config.args]


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """The interpreter's arrays are too small to share among threads."""
    if not ON_GPU:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def move(device: str) -> Callable[[Any], Any]:
    """Tensors, stored weights and tuples of them, on the device of the tests."""

    def to(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, (E4m3Weight, E2m1Weight)):
            return type(value)(*(to(getattr(value, field.name)) for field in dataclasses.fields(value)))
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(to, value))
        return type(value)(map(to, value)) if isinstance(value, (tuple, list)) else value

    return to


@pytest.fixture(scope="session")
def assert_near() -> Callable[..., None]:
    """assert_near(actual, expected, error, equal): sums of another order.

    error: bound of the difference before the result is rounded, by element; each element may be off by that and by one
    step of its dtype. equal: share of elements that must agree to the bit, but for two. NaN equals NaN.
    """

    def check(actual: Tensor, expected: Tensor, error: Tensor | float, equal: float = 0.98) -> None:
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        bits = {torch.bfloat16: 8, torch.float32: 24}[actual.dtype]
        actual, expected = actual.double().cpu(), expected.double().cpu()
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        _, exponent = torch.frexp(torch.maximum(actual.abs(), expected.abs()))
        excess = (actual - expected).abs() - error - torch.exp2(exponent.double() - bits)
        assert bool((same | (excess <= 0)).all()), f"off by {float(excess[~same].max()):.3g} more than allowed"
        assert int((~same).sum()) <= 2 + (1 - equal) * same.numel()

    return check


@pytest.fixture(scope="session")
def sum_error() -> Callable[[int, Tensor], Tensor]:
    """sum_error(n, magnitudes): what a float32 sum of n terms may be off by, given the sum of their magnitudes.

    2^-23 for each addition: tensor cores cut what they align, rather than round it.
    """
    return lambda n, magnitudes: n * 2.0**-23 * magnitudes.double()
