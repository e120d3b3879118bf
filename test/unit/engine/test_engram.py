"""Where n-gram tables are kept, and when their rows are fetched, shows in no bit of the answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.engram_store.placement import StoreOptions
from sglang_ced.engram_store.table import TableError

Ids = Callable[..., list[int]]


def answer(engine: OfflineEngine, prompt: list[int]) -> tuple[Tensor, list[list[int]]]:
    """Logits of every row of a chunked prompt and of three decoded tokens, and a batch's continuation."""
    request = engine.start(prompt)
    rows = [engine.prefill(request, [50, 7, 64], all_rows=True)]
    for _ in range(3):
        engine.append((request, int(rows[-1][-1].argmax())))
        rows += engine.step([(request, 1)])
    engine.finish(request)
    return torch.cat(rows), engine.generate([prompt[:30], prompt[5:90]], 5, chunk=16, stop=[])


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> tuple[Tensor, list[list[int]]]:
    """Reference kernels, rows read from the file when a layer needs them."""
    engine = OfflineEngine(
        checkpoint, max_tokens=4096, page_size=2, kernels="reference", engram=StoreOptions("mmap", False, 0)
    )
    torch.manual_seed(0)
    return answer(engine, torch.randint(3, 300, (200,)).tolist())


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize(("placement", "cache_mib"), [("mmap", 0), ("mmap", 8), ("ram", 0)])
def test_every_placement_gives_the_same_logits(
    checkpoint: Checkpoint, expected: tuple[Tensor, list[list[int]]], placement: str, cache_mib: int, prefetch: bool
) -> None:
    options = StoreOptions(placement, prefetch, cache_mib)  # type: ignore[arg-type]
    engine = OfflineEngine(checkpoint, max_tokens=4096, page_size=2, engram=options)
    torch.manual_seed(0)
    logits, tokens = answer(engine, torch.randint(3, 300, (200,)).tolist())
    assert torch.equal(logits, expected[0])
    assert tokens == expected[1]
    stats = engine.model.engram_rows.store.update_stats()
    assert (stats.ahead_rows > 0) == prefetch
    assert (stats.ahead_used_rows > 0) == prefetch
    assert stats.ahead_used_rows < stats.ahead_rows or not prefetch, "chunks of changing size are not all foreseen"
    assert (stats.cache_hits > 0) == (cache_mib > 0)


def test_a_step_that_fails_commits_nothing(golden_dir: Path, tmp_path: Path, ids: Ids) -> None:
    model = shutil.copytree(golden_dir / "toy8" / "model", tmp_path / "model")
    engine = OfflineEngine.from_pretrained(model, max_tokens=4096, page_size=2, engram=StoreOptions("mmap", True, 0))
    request = engine.start(ids(60))
    engine.step([(request, 30)])
    before = engine.state.stats.forwards
    (file,) = model.glob("*.safetensors")
    file.touch()
    with pytest.raises(TableError, match="changed while it was served"):
        engine.step([(request, 20)])  # 30 rows were fetched ahead, before the change, and would be right
    assert (engine.state.stats.forwards, request.computed) == (before, 30)


def test_a_decode_step_takes_what_was_fetched_when_its_tokens_were_sampled(checkpoint: Checkpoint, ids: Ids) -> None:
    engine = OfflineEngine(checkpoint, max_tokens=4096, page_size=2, engram=StoreOptions("mmap", True, 0))
    requests = [engine.start(ids(20, seed)) for seed in range(3)]
    engine.step([(request, 20) for request in requests])
    stats = engine.model.engram_rows.store.stats
    rows = 3 * checkpoint.config.engram_rows_per_token * len(checkpoint.config.engram_layer_ids)
    for steps in (1, 2):
        engine.append(*((request, 7 + steps) for request in requests))
        engine.step([(request, 1) for request in requests])
        assert stats.ahead_used_rows == steps * rows
    engine.append(*((request, 9) for request in requests))
    engine.step([(request, 1) for request in requests[1:]])  # not the step that was expected
    assert stats.ahead_used_rows == 2 * rows
    assert stats.rows == 20 * rows + 2 * rows + 2 * rows // 3
