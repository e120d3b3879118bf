"""The whole model with the Triton versions, against the references."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sglang_ced.kernels.triton  # noqa: F401, registers the versions
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.kernels import registry

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(autouse=True)
def references_afterwards() -> Iterator[None]:
    yield
    registry.activate("reference")


def prompt(length: int) -> list[int]:
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def logits(path: Path, tokens: list[int], version: str, device: str = "cpu", chunks: tuple[int, ...] = ()) -> Tensor:
    """Of every row of the prompt."""
    engine = OfflineEngine.from_pretrained(
        path, kernels="reference", max_requests=1, max_tokens=512, page_size=2, device=device
    )
    for each in registry.OPS.values():
        each.select(version)
    return engine.prefill(engine.start(tokens), chunks, all_rows=True).cpu()


# test/golden/data/README.md: relative error of the logits, median and 90 %, and rows that keep their largest logit,
# for legitimate changes of a sum. Rounding to fp8 turns a last bit into a step.
LIMITS = {"toy8_bf16": (0.03, 0.05, 0.92), "toy8": (0.09, 0.20, 0.86), "toy40": (0.10, 0.16, 0.85)}


def check(actual: Tensor, expected: Tensor, model: str) -> None:
    median, most, kept = LIMITS[model]
    off = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(off.median()) <= median
    assert float(off.quantile(0.9)) <= most
    assert float((actual.argmax(-1) == expected.argmax(-1)).float().mean()) >= kept


def test_every_op_has_a_triton_version() -> None:
    assert [name for name, each in registry.OPS.items() if "triton" not in each.fast] == []


def test_a_cuda_device_runs_the_triton_versions_and_a_cpu_does_not() -> None:
    assert set(registry.activate("auto", "cuda").values()) == {"triton"}
    assert "triton" not in registry.activate("auto", "cpu").values()
    assert set(registry.activate("reference", "cuda").values()) == {"reference"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter; the tests below are for the GPU")
def test_logits_are_near_those_of_the_references(golden_dir: Path) -> None:
    path, tokens = golden_dir / "toy8_bf16" / "model", prompt(5)
    check(logits(path, tokens, "triton"), logits(path, tokens, "reference"), "toy8_bf16")


@NEEDS_GPU
@pytest.mark.parametrize("model", LIMITS)
@pytest.mark.parametrize("chunks", [(), (64, 1, 30)])
def test_logits_on_a_gpu_are_near_those_of_the_references(
    golden_dir: Path, model: str, chunks: tuple[int, ...]
) -> None:
    path, tokens = golden_dir / model / "model", prompt(150)
    check(logits(path, tokens, "triton", "cuda", chunks), logits(path, tokens, "reference"), model)


@NEEDS_GPU
def test_references_run_on_a_gpu(golden_dir: Path) -> None:
    path, tokens = golden_dir / "toy8" / "model", prompt(60)
    check(logits(path, tokens, "reference", "cuda"), logits(path, tokens, "reference"), "toy8")
