"""Our flags: command line, environment, default, in this order."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest

from sglang_ced.plugin import flags
from sglang_ced.plugin.errors import PluginError
from sglang_ced.plugin.flags import Options


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CED_KERNELS", "CED_SWA_BOUNDED_REPLAY"):
        monkeypatch.delenv(name, raising=False)


def parsed(*words: str) -> Options:
    parser = argparse.ArgumentParser()
    flags.add_to(parser)
    server_args = SimpleNamespace(_ced=vars(parser.parse_args(words)))
    return flags.options_of(server_args)


def test_defaults() -> None:
    assert parsed() == Options(swa_bounded_replay=False, ced_kernels="auto")
    assert flags.options_of(SimpleNamespace()) == Options()


def test_command_line() -> None:
    assert parsed("--swa-bounded-replay", "--ced-kernels", "reference") == Options(True, "reference")


def test_environment_holds_where_the_command_line_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CED_SWA_BOUNDED_REPLAY", "1")
    monkeypatch.setenv("CED_KERNELS", "reference")
    assert parsed() == Options(True, "reference")
    assert parsed("--no-swa-bounded-replay", "--ced-kernels=auto") == Options(False, "auto")


@pytest.mark.parametrize(("name", "value"), [("CED_KERNELS", "fast"), ("CED_SWA_BOUNDED_REPLAY", "yes")])
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(PluginError, match=f"{name}={value}: expected"):
        parsed()
