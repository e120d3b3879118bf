"""`ced bench` as typed: what needs no server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_ced.cli.main import main


def test_a_generated_trace_is_written_and_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "t.jsonl")
    arguments = ["--shape", "agentx", "--sessions", "2", "--scale", "0.01", "--max-turns", "2", "--block", "16"]
    assert main(["bench", "trace", *arguments, "--out", file]) == 0
    written = json.loads(capsys.readouterr().out)
    assert main(["bench", "trace", "--trace", file]) == 0
    assert json.loads(capsys.readouterr().out) == written
    assert written["block"] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace"], "give --shape to generate a trace, or --trace to show one"),
        (["trace", "--shape", "agentx"], "give --out FILE"),
        (["trace", "--trace", "absent.jsonl"], "no trace at absent.jsonl"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 1
    assert message in capsys.readouterr().err


def test_configurations_are_listed_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    assert main(["bench", "ablate", "--configs", "list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert (names[0], names[-1]) == ("all_off", "all_on")
    assert main(["bench", "ablate"]) == 1
    assert "give --trace FILE" in capsys.readouterr().err
