from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engram_store.placement import StoreOptions
from sglang_ced.engram_store.store import EngramStore

MakeStore = Callable[..., EngramStore]


@pytest.fixture
def checkpoint(golden_dir: Path, tmp_path: Path) -> Checkpoint:
    """A copy of toy8, in which a test may damage files."""
    return Checkpoint.open(shutil.copytree(golden_dir / "toy8" / "model", tmp_path / "model"))


@pytest.fixture
def make_store(checkpoint: Checkpoint) -> MakeStore:
    def make(placement: str = "mmap", prefetch: bool = True, cache_mib: int = 4) -> EngramStore:
        return EngramStore(checkpoint, StoreOptions(placement, prefetch, cache_mib), torch.device("cpu"))

    return make


@pytest.fixture
def wanted(checkpoint: Checkpoint) -> Callable[[int], dict[int, Tensor]]:
    """Rows of 40 tokens for each Engram layer, by seed."""

    def make(seed: int) -> dict[int, Tensor]:
        generator, config = torch.Generator().manual_seed(seed), checkpoint.config
        return {
            layer: torch.randint(count, (40, config.engram_rows_per_token), generator=generator)
            for layer, count in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
        }

    return make
