"""Fixtures that every room's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The golden vectors; their README says what is in there and how close a match must be."""
    return Path(__file__).parent / "golden" / "data"


@pytest.fixture(scope="session")
def golden_ops(golden_dir: Path) -> dict[str, Tensor]:
    """Inputs and outputs of single operations, by name. Shared by all tests: do not write into them."""
    return load_file(golden_dir / "ops" / "ops.safetensors")
