"""Our flags: command line, environment, default, in this order."""

from __future__ import annotations

import argparse
from dataclasses import fields
from types import SimpleNamespace

import pytest

from sglang_ced.engram_store.placement import StoreOptions
from sglang_ced.plugin import flags
from sglang_ced.plugin.errors import PluginError
from sglang_ced.plugin.flags import Options


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in fields(Options):
        monkeypatch.delenv(option.metadata["env"], raising=False)


def launched(*words: str, decoder: bool | None = None) -> SimpleNamespace:
    """Server arguments of a launch; decoder: SGLang's --[no-]enable-decoder-swa-bounded-replay."""
    parser = argparse.ArgumentParser()
    flags.add_to(parser)
    return SimpleNamespace(_ced=vars(parser.parse_args(words)), enable_decoder_swa_bounded_replay=decoder)


def parsed(*words: str) -> Options:
    return flags.options_of(launched(*words))


def test_defaults() -> None:
    assert parsed() == Options(True, "auto", "published", ced_strict=False, ced_overlap_schedule=False)
    assert flags.options_of(SimpleNamespace()) == Options()


def test_command_line() -> None:
    assert parsed("--swa-bounded-replay", "--ced-kernels", "reference") == Options(True, "reference")
    assert parsed("--no-swa-bounded-replay", "--ced-strict") == Options(False, ced_strict=True)
    assert parsed("--ced-kv-format", "bfloat16") == Options(ced_kv_format="bfloat16")
    assert parsed("--ced-overlap-schedule") == Options(ced_overlap_schedule=True)


def test_environment_holds_where_the_command_line_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CED_SWA_BOUNDED_REPLAY", "0")
    monkeypatch.setenv("CED_KERNELS", "reference")
    monkeypatch.setenv("CED_KV_FORMAT", "bfloat16")
    monkeypatch.setenv("CED_STRICT", "1")
    assert parsed() == Options(False, "reference", "bfloat16", True)
    words = ("--swa-bounded-replay", "--ced-kernels=auto", "--ced-kv-format=published", "--no-ced-strict")
    assert parsed(*words) == Options(True, "auto", "published", False)


def test_engram_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parsed().engram == StoreOptions("auto", True, 256)
    words = ("--ced-engram-placement", "mmap", "--no-ced-engram-prefetch", "--ced-engram-cache-mib", "0")
    assert parsed(*words).engram == StoreOptions("mmap", False, 0)
    monkeypatch.setenv("CED_ENGRAM_PLACEMENT", "ram")
    monkeypatch.setenv("CED_ENGRAM_PREFETCH", "0")
    monkeypatch.setenv("CED_ENGRAM_CACHE_MIB", "64")
    assert parsed().engram == StoreOptions("ram", False, 64)
    monkeypatch.setenv("CED_ENGRAM_CACHE_MIB", "-1")
    with pytest.raises(PluginError, match="CED_ENGRAM_CACHE_MIB=-1: expected a whole number"):
        parsed()


def test_a_wrong_cache_size_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--ced-engram-cache-mib", "-5")
    assert "--ced-engram-cache-mib: '-5' is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "decoder", "mode"),
    [
        ([], None, "bounded"),
        ([], True, "bounded"),
        ([], False, "encoder"),
        (["--swa-bounded-replay"], False, "encoder"),
        (["--no-swa-bounded-replay"], None, "exact"),
        (["--no-swa-bounded-replay"], False, "exact"),
    ],
)
def test_replay_mode_follows_our_flag_and_that_of_sglang(words: list[str], decoder: bool | None, mode: str) -> None:
    assert flags.replay_of(launched(*words, decoder=decoder)) == mode


def test_a_wrong_kv_format_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--ced-kv-format", "fp8")
    assert "--ced-kv-format: invalid choice: 'fp8'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("CED_KERNELS", "fast"), ("CED_KV_FORMAT", "fp8"), ("CED_SWA_BOUNDED_REPLAY", "yes")]
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(PluginError, match=f"{name}={value}: expected"):
        parsed()
