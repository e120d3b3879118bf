from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_ced import reference
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.checkpoint.token_map import build_token_map
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.reference import Reference


@dataclass
class Golden:
    """One configuration of the golden data: numbers of the publisher's reference, and our two models of it."""

    directory: Path
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.directory.name

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint.open(self.directory / "model")

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.directory / "golden.safetensors")

    @cached_property
    def prompts(self) -> dict[str, dict[str, Any]]:
        return json.loads((self.directory / "golden.json").read_text())["prompts"]

    def ids(self, prompt: str) -> list[int]:
        return self.prompts[prompt]["token_ids"]

    @cached_property
    def reference(self) -> Reference:
        model = Reference(self.checkpoint.config, build_token_map(self.checkpoint.path, self.checkpoint.config))
        model.load_tensors(dict(self.checkpoint.dequantized()))
        return model

    @cached_property
    def engine(self) -> OfflineEngine:
        return OfflineEngine(self.checkpoint, page_size=2, max_tokens=4096)


@pytest.fixture(scope="session", params=["toy8_bf16", "toy8", "toy40"])
def golden(request: pytest.FixtureRequest, golden_dir: Path) -> Golden:
    return Golden(golden_dir / request.param)


@pytest.fixture(scope="session", params=["toy8_bf16", "toy8"])
def golden8(request: pytest.FixtureRequest, golden_dir: Path) -> Golden:
    """The configurations that come with hidden states and with logits of every position."""
    return Golden(golden_dir / request.param)


@pytest.fixture
def feed_selections(monkeypatch: pytest.MonkeyPatch):
    """feed(golden, prompt): from now on the reference model selects the groups that the publisher selected.

    Where scores tie at the cut, or fewer candidates than top-k are left, the publisher's choice is arbitrary; ours
    is not.
    """
    choose = reference.top_groups
    handles = []

    def feed(golden: Golden, prompt: str) -> None:
        config, layer = golden.checkpoint.config, [0]
        for index, block in enumerate(golden.reference.layers):
            handles.append(block.register_forward_pre_hook(lambda *_, index=index: layer.__setitem__(0, index)))

        def publishers_choice(scores: Tensor, k: int) -> Tensor:
            groups = len(golden.ids(prompt)) // config.compress_ratios[layer[0]]
            if k != config.index_topk or scores.shape[-1] != groups or not groups:  # candidate blocks, or nothing
                return choose(scores, k)
            ids = golden.tensors[f"topk_groups/{prompt}/layer{layer[0]}"].long()
            ids = torch.where(ids < 0, groups, ids).sort(-1).values
            return torch.where(ids == groups, -1, ids)[None]

        monkeypatch.setattr(reference, "top_groups", publishers_choice)

    yield feed
    for handle in handles:
        handle.remove()


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield
