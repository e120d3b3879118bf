"""Tables larger than the memory that a process may use are served from files, right and without growth."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from benchmark.shape.large_tables import enlarge

from sglang_ced.cache.step import ngram_history
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.engram_store import host
from sglang_ced.engram_store.placement import StoreOptions, stored_tables, table_bytes

LIMIT = 768 << 20
TABLE_VOCAB = 8_000_000  # 1.5 GiB a table
CACHE = 8 << 20
PROMPT = torch.randint(3, 300, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model(golden_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """toy8 with sparse tables of 3 GiB, in which the rows of PROMPT are not zero."""
    path = tmp_path_factory.mktemp("large") / "model"
    enlarge(golden_dir / "toy8" / "model", path, TABLE_VOCAB, sparse=True)
    generator = torch.Generator().manual_seed(2)
    rows = OfflineEngine.from_pretrained(path, max_tokens=64, engram=StoreOptions("mmap")).model.engram_rows
    history = torch.from_numpy(ngram_history(PROMPT, 0, len(PROMPT), rows._config.engram_max_ngram_size))
    wanted = rows._rows(history, rows._config.engram_layer_ids)
    for layer, parts in stored_tables(Checkpoint.open(path)).items():
        for part, (low, high) in zip(parts, ((1, 120), (118, 123)), strict=True):
            with part.file.open("r+b") as file:
                for row in wanted[layer].flatten().tolist():
                    file.seek(part.offset + row * part.width)
                    file.write(bytes(torch.randint(low, high, (part.width,), generator=generator).tolist()))
    return path


@dataclass(frozen=True)
class Limit:
    """kind: what limits; enter: to be called by the child first; peak: the most bytes charged, if told."""

    kind: str
    enter: Callable[[], object]
    peak: Callable[[], int | None]


@pytest.fixture
def limit() -> Iterator[Limit]:
    """A control group of LIMIT bytes inside ours, or, where none can be made, RLIMIT_DATA, which counts a process's own
    memory without the page cache."""
    inner = _make_group()
    if inner is None:
        yield Limit("RLIMIT_DATA", lambda: resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT)), lambda: None)
        return
    used = next(inner / name for name in ("memory.peak", "memory.max_usage_in_bytes") if (inner / name).exists())
    try:
        yield Limit(
            f"control group {inner}",
            lambda: (inner / "cgroup.procs").write_text(str(os.getpid())),
            lambda: int(used.read_text()),
        )
    finally:
        inner.rmdir()


def _make_group() -> Path | None:
    group = next(host._memory_groups(), None)
    if group is None:
        return None
    inner = group / f"ced-test-{os.getpid()}"
    try:
        inner.mkdir()
        version_2 = (inner / "memory.max").exists()
        (inner / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(LIMIT))
    except OSError:
        if inner.is_dir():
            inner.rmdir()
        return None
    return inner


def test_a_table_larger_than_the_limit_serves_right_and_does_not_grow(
    model: Path, tmp_path: Path, limit: Limit
) -> None:
    size = table_bytes(stored_tables(Checkpoint.open(model)))
    assert size > 3 * LIMIT
    out, script = tmp_path / "logits.pt", Path(__file__).with_name("under_a_limit.py")
    words = [sys.executable, str(script), str(model), json.dumps(PROMPT), str(out), "160000"]
    run = subprocess.run(words, preexec_fn=limit.enter, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    told = json.loads(run.stdout.splitlines()[-1])
    peak = limit.peak()
    print(f"limited by {limit.kind} to {LIMIT >> 20} MiB, peak {peak}; tables of {size >> 20} MiB; {told}")
    assert told["file_rows"] * 4096 > LIMIT, "more pages were read than the limit holds"
    assert told["grown"] < CACHE + (32 << 20)
    assert peak is None or peak <= LIMIT
    engine = OfflineEngine.from_pretrained(
        model, max_tokens=1024, page_size=2, kernels="reference", engram=StoreOptions("mmap", False, 0)
    )
    expected = engine.prefill(engine.start(PROMPT), all_rows=True)
    for logits in torch.load(out):
        assert torch.equal(logits, expected)
