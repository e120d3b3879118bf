"""A server whose replay is broken on purpose does not pass: what the other tests hold is worth holding."""

from __future__ import annotations

from pathlib import Path

import pytest
from oracle import after_hit
from servers import Server
from traffic import prompt_ids

from sglang_ced.engine.offline import OfflineEngine

PROMPTS, HIT = [prompt_ids(200, 90 + i) for i in range(4)], 192


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["one_row_short", "no_replay"])
def test_a_short_or_missing_replay_is_seen(fault: str, model: Path, tmp_path: Path, bounded: OfflineEngine) -> None:
    server = Server(model, tmp_path / "log.txt", env={"CED_TEST_FAULT": fault}, traced=True)
    try:
        server.wait_ready()
        for prompt in PROMPTS:
            cold = server.generate(prompt, 8)
            assert cold["output_ids"] == after_hit(bounded, prompt, 8, 0)[0], "the fault lies in hits alone"
        wrong = 0
        for prompt in PROMPTS:
            warm = server.generate(prompt, 8)
            assert warm["meta_info"]["cached_tokens"] == HIT
            wrong += warm["output_ids"] != after_hit(bounded, prompt, 8, HIT)[0]
        assert wrong > 0
    finally:
        server.stop()
