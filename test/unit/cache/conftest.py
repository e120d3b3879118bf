from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ced.config import CedConfig


@pytest.fixture(scope="session")
def config(golden_dir: Path) -> CedConfig:
    """8 layers, window 16, ratios 2 and 1."""
    return CedConfig.from_dir(golden_dir / "toy8" / "model")
