"""When the platform activates, and what stops a launch where the plugin did not apply."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sglang_ced.plugin import claim, register
from sglang_ced.plugin.errors import PluginError


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["launch_server.py", "--model-path", "x"])
    for name in ("SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)


def test_activates_by_itself_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "has_accelerator", lambda: False)
    assert register.activate() == register.PLATFORM


@pytest.mark.parametrize("words", [["--attention-backend", "ced"], ["--attention-backend=ced"]], ids=str)
def test_needs_asking_where_there_is_one(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(register, "has_accelerator", lambda: True)
    assert register.activate() is None
    monkeypatch.setattr(sys, "argv", [*sys.argv, *words])
    assert register.activate() == register.PLATFORM


def test_can_be_asked_for_without_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "has_accelerator", lambda: True)
    monkeypatch.setenv("SGLANG_PLATFORM", "ced")
    assert register.activate() == register.PLATFORM


def test_stays_away_from_the_cpu_engine_of_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "has_accelerator", lambda: False)
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert register.activate() is None


def test_a_plugin_that_did_not_run_stops_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "_registered", False)
    monkeypatch.setattr(register, "_failure", None)
    with pytest.raises(PluginError, match="add 'ced' to it"):
        register.require_registered()


def test_a_plugin_that_failed_stops_the_launch_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "_failure", "TypeError: no such hook")
    with pytest.raises(PluginError, match="TypeError: no such hook"):
        register.require_registered()


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (json.dumps({"model_type": "deepseek_v41"}), True),
        (json.dumps({"model_type": "llama"}), False),
        (json.dumps(["deepseek_v41"]), False),
        ("not json", False),
        (None, False),
    ],
)
def test_a_checkpoint_is_recognised_by_its_model_type(tmp_path: Path, text: str | None, ours: bool) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert claim.is_ours(tmp_path) is ours


class Config:
    architectures = ("DeepseekV4ForCausalLM",)
    vision_n_layers = 27


def test_the_claim_renames_the_architecture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(register, "is_active", lambda: True)
    config = claim.claim(Config(), tmp_path)
    assert config.architectures == [claim.ARCHITECTURE]
    assert config.vision_n_layers == 0


def test_a_name_of_a_hub_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(register, "is_active", lambda: True)
    with pytest.raises(PluginError, match="hf download deepseek-ai/model"):
        claim.claim(Config(), "deepseek-ai/model")


def test_the_cpu_engine_of_sglang_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(register, "is_active", lambda: False)
    monkeypatch.setattr(register, "has_accelerator", lambda: False)
    with pytest.raises(PluginError, match="SGLANG_USE_CPU_ENGINE"):
        claim.claim(Config(), tmp_path)


def test_a_machine_with_an_accelerator_is_left_to_stock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(register, "is_active", lambda: False)
    monkeypatch.setattr(register, "has_accelerator", lambda: True)
    config = claim.claim(Config(), tmp_path)
    assert config.architectures == Config.architectures
    assert config.vision_n_layers == Config.vision_n_layers
