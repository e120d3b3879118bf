"""cli/inspect.py: the report's numbers are the published ones, and it needs no SGLang."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ced.checkpoint.files import read_headers
from sglang_ced.cli import inspect
from sglang_ced.config import CedConfig


def test_released_model_keeps_890_bytes_per_token_and_3200_as_bfloat16(released_config: dict[str, Any]) -> None:
    text = inspect.memory(CedConfig.from_dict(released_config))
    assert [line.split()[-4] for line in text.splitlines() if line.endswith("per token")] == ["890.0", "3200.0"]


def test_report_tells_parts_memory_layers_and_what_is_left_out(golden_dir: Path) -> None:
    model = golden_dir / "toy8" / "model"
    text = inspect.report(model)
    tensors = read_headers(model)
    assert "routed experts          384     393,216    208,896" in text
    assert f"{len(tensors):,}" in text
    assert f"{sum(t.nbytes for t in tensors.values()):,}" in text
    assert "79.5  bytes per token" in text  # (36 + 17) / 2 + 36 + 17
    assert "288.0  bytes per token" in text  # 1.5 * (128 + 64)
    assert "    6  decoder      1  reindex        4           6                4  -" in text
    assert "    3  encoder      2  reuse          2           2                -  yes" in text
    assert "Not loaded: draft (169 tensors)" in text
    assert "not known here" not in text


def test_report_names_config_fields_that_nobody_reads(golden_dir: Path, tmp_path: Path) -> None:
    model = shutil.copytree(golden_dir / "toy40" / "model", tmp_path / "model", copy_function=shutil.copyfile)
    raw = json.loads((model / "config.json").read_text())
    raw["made_up"] = 1
    (model / "config.json").write_text(json.dumps(raw))
    text = inspect.report(model)
    assert "Config fields not known here: made_up" in text
    assert "Not loaded" not in text


def _run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    return inspect.run(parser.parse_args(argv))


def test_command_prints_the_report(golden_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = golden_dir / "toy8_bf16" / "model"
    assert _run(str(model)) == 0
    assert capsys.readouterr().out == inspect.report(model) + "\n"


def test_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(str(tmp_path)) == 1
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert _run(str(tmp_path)) == 1
    assert "model_type" in capsys.readouterr().err


def test_no_sglang_is_imported(golden_dir: Path) -> None:
    model = golden_dir / "toy8" / "model"
    code = f"""
import sys
from sglang_ced.cli import inspect
inspect.report({str(model)!r})
assert not {{"sglang", "transformers"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
