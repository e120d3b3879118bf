"""Launches that must stop, and say why; and the Engine API."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_ced.engine.offline import OfflineEngine

Launch = Callable[..., tuple[int, str]]

ENGINE = """
import json, sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(model_path=sys.argv[1], log_level="error")
    prompts = [[20, 30, 40], [50] * 70]
    answers = engine.generate(input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 4})
    print("ANSWERS", json.dumps([answer["output_ids"] for answer in answers]))
    engine.shutdown()
"""


def test_every_refused_option_is_named_at_once(launch: Launch, model: Path) -> None:
    words = ("--tp-size", "2", "--kv-cache-dtype", "fp8_e4m3", "--page-size", "1", "--enable-hierarchical-cache")
    exact = ("--no-swa-bounded-replay", "--enable-encoder-swa-bounded-replay", "--enable-decoder-swa-bounded-replay")
    code, output = launch(model, *words, *exact)
    assert code != 0
    options = "--tp-size 2|--kv-cache-dtype fp8_e4m3|--page-size 1|--enable-hierarchical-cache".split("|")
    for option in (*options, *exact[1:]):
        assert f"{option}:" in output


def test_a_plugin_that_did_not_apply_stops_the_launch(launch: Launch, model: Path) -> None:
    code, output = launch(model, env={"SGLANG_PLATFORM": "ced", "SGLANG_PLUGINS": "another"})
    assert code != 0
    assert "SGLANG_PLUGINS" in output
    assert "add 'ced' to it" in output


def test_a_truncated_shard_stops_the_launch_by_name(launch: Launch, model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(model, tmp_path / "broken")
    shard = sorted(broken.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    code, output = launch(broken)
    assert code != 0
    assert shard.name in output.splitlines()[-1] or shard.name in output[-2000:]


def test_engine_api_equals_the_offline_engine(model: Path, bounded: OfflineEngine, tmp_path: Path) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    done = subprocess.run(
        [sys.executable, str(script), str(model)], capture_output=True, text=True, timeout=240, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stderr[-4000:]
    answers = json.loads(lines[0].removeprefix("ANSWERS "))
    assert answers == bounded.generate([[20, 30, 40], [50] * 70], 4)
