"""benchmark/shape: the shape has the released schedule, is written once, and only complete."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from benchmark.shape import ced_bench

from sglang_ced.checkpoint.names import expected_tensors
from sglang_ced.config import CedConfig

# Small enough to be written in a moment.
SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ced_bench, "CACHE", tmp_path)
    monkeypatch.setattr(ced_bench, "QUICK", ced_bench.QUICK | SMALL)
    return tmp_path


def test_schedule_is_the_released_one(released_config: dict[str, Any]) -> None:
    ours, released = CedConfig.from_dict(ced_bench.raw_config()), CedConfig.from_dict(released_config)
    assert ours.layers == released.layers
    for name in ("sliding_window", "index_topk", "candidate_topk_blocks", "candidate_block_size", "engram_layer_ids"):
        assert getattr(ours, name) == getattr(released, name), name


def test_weights_exceed_a_gibibyte() -> None:
    config = CedConfig.from_dict(ced_bench.raw_config())
    values = {name: spec.shape for name, spec in expected_tensors(config).items() if ".experts." in name}
    packed = sum(rows * columns // 2 for rows, columns in values.values())
    assert 1.0e9 < packed < 1.5e9


def test_finished_directory_is_used_again(cache: Path) -> None:
    first = ced_bench.checkpoint_dir(quick=True)
    written = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    assert ced_bench.checkpoint_dir(quick=True) == first
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == written


def test_other_seed_or_config_is_another_directory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {ced_bench.checkpoint_dir(quick=True), ced_bench.checkpoint_dir(quick=True, seed=1)}
    monkeypatch.setattr(ced_bench, "QUICK", ced_bench.QUICK | {"n_routed_experts": 16})
    paths.add(ced_bench.checkpoint_dir(quick=True))
    assert len(paths) == 3
    assert all((path / "config.json").is_file() for path in paths)


def test_interrupted_write_is_not_taken_for_a_finished_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, *_: Any, **__: Any) -> None:
        (path.parent / f".{path.name}.{_ended_process()}.partial").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ced_bench, "write_random_checkpoint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ced_bench.checkpoint_dir(quick=True)
    running = cache / f".other.{os.getpid()}.partial"
    running.mkdir()
    path = ced_bench.checkpoint_dir(quick=True)
    assert (path / "config.json").is_file()
    assert {each.name for each in cache.iterdir()} == {path.name, running.name}


def _ended_process() -> int:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    return process
