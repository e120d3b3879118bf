from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.checkpoint.token_map import build_token_map
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.reference import Reference

WINDOW = 16
MakeEngine = Callable[..., OfflineEngine]


@pytest.fixture(scope="session")
def checkpoint(golden_dir: Path) -> Checkpoint:
    """8 layers, window 16, top-k 16 of many groups, candidates, Engram, fp8 and fp4: every mechanism is at work."""
    return Checkpoint.open(golden_dir / "toy8" / "model")


@pytest.fixture(scope="session")
def reference(checkpoint: Checkpoint) -> Reference:
    model = Reference(checkpoint.config, build_token_map(checkpoint.path, checkpoint.config))
    model.load_tensors(dict(checkpoint.dequantized()))
    return model


@pytest.fixture
def make_engine(checkpoint: Checkpoint) -> MakeEngine:
    def make(**options: object) -> OfflineEngine:
        return OfflineEngine(checkpoint, **{"max_tokens": 4096, "page_size": 2, **options})

    return make


def some_ids(count: int, seed: int = 0) -> list[int]:
    """Token ids of text, no special ones."""
    return torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def ids() -> Callable[..., list[int]]:
    return some_ids
