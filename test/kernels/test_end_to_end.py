"""The whole model with fast kernels gives the logits of the references, bit for bit, in prefill, chunks and decode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sgl_kernel_ext
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.kernels import registry

TOY = Path(registry.__file__).parents[1] / "assets" / "ced-toy"
NEW_TOKENS = 8


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    sgl_kernel_ext.force_cpu_capability(None)
    registry.activate("reference")


def prompt(length: int, vocabulary: int = 500) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()


def run(path: Path, kernels: str, tokens: list[int], chunks: tuple[int, ...] = ()) -> Tensor:
    """Logits of every prompt row and of some greedy tokens."""
    engine = OfflineEngine.from_pretrained(path, kernels=kernels, max_requests=1, max_tokens=1024)
    request = engine.start(tokens)
    rows = [engine.prefill(request, chunks, all_rows=True)]
    for _ in range(NEW_TOKENS):
        request.tokens.append(int(rows[-1][-1].argmax()))
        rows += engine.step([(request, 1)])
    return torch.cat(rows)


def test_every_op_of_the_model_has_a_fast_version() -> None:
    active = registry.activate("auto")
    small = {"compressor.pool_pairs", "engram.ngram_rows"}  # a few values per token: torch is fast enough
    assert {name for name, version in active.items() if version == "reference"} <= small


@pytest.mark.parametrize("length", [1, 7, 150, 290])
def test_logits_are_those_of_the_references(length: int) -> None:
    tokens = prompt(length)
    assert torch.equal(run(TOY, "auto", tokens), run(TOY, "reference", tokens))


@pytest.mark.parametrize("model", ["toy8", "toy8_bf16", "toy40"])
def test_logits_of_golden_models_are_those_of_the_references(golden_dir: Path, model: str) -> None:
    path, tokens = golden_dir / model / "model", prompt(40, 300)
    assert torch.equal(run(path, "auto", tokens), run(path, "reference", tokens))


@pytest.mark.parametrize("chunks", [(1, 64), (37,), (128, 1, 2)])
def test_chunks_do_not_show(chunks: tuple[int, ...]) -> None:
    tokens = prompt(150)
    assert torch.equal(run(TOY, "auto", tokens, chunks), run(TOY, "auto", tokens))


def test_neither_level_nor_threads_show() -> None:
    tokens, threads = prompt(60), torch.get_num_threads()
    expected = run(TOY, "auto", tokens)
    try:
        for level in sgl_kernel_ext.supported_cpu_capabilities():
            sgl_kernel_ext.force_cpu_capability(level)
            for count in (1, 3):
                torch.set_num_threads(count)
                assert torch.equal(run(TOY, "auto", tokens), expected)
    finally:
        torch.set_num_threads(threads)


def test_many_requests_get_the_tokens_that_each_gets_alone() -> None:
    prompts = [prompt(length) for length in (3, 40, 129)]
    engine = OfflineEngine.from_pretrained(TOY, kernels="auto", max_requests=3, max_tokens=2048)
    together = engine.generate(prompts, NEW_TOKENS, chunk=50, stop=())
    assert together == [engine.generate([tokens], NEW_TOKENS, stop=())[0] for tokens in prompts]
