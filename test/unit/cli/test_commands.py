"""The `ced` command as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_ced.cli.generate import stream_text
from sglang_ced.cli.main import main
from sglang_ced.cli.models import bundled_path


@pytest.fixture
def ids_file(tmp_path: Path) -> Path:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps([0, *range(40, 80)]))
    return file


def logits(tmp_path: Path, ids_file: Path, *options: str) -> torch.Tensor:
    out = tmp_path / "out.safetensors"
    assert main(["logits", "--ids", str(ids_file), "--out", str(out), *options]) == 0
    return load_file(out)["logits"]


def test_logits_of_the_last_and_of_every_row(tmp_path: Path, ids_file: Path) -> None:
    last, every = logits(tmp_path, ids_file), logits(tmp_path, ids_file, "--all")
    assert last.dtype == torch.float32
    assert last.shape == (1, 512)
    assert every.shape == (41, 512)
    assert torch.equal(every[-1:], last)


@pytest.mark.parametrize("options", [["--chunks", "16,1,7"], ["--hit", "20"], ["--hit", "20", "--chunks", "3"]])
def test_chunks_and_hits_change_nothing_in_exact_mode(tmp_path: Path, ids_file: Path, options: list[str]) -> None:
    assert torch.equal(logits(tmp_path, ids_file, "--all", *options), logits(tmp_path, ids_file, "--all"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hit", "3"], "--hit 3: must be even"),
        (["--hit", "41"], "--hit 41: must leave at least one of the 41 tokens"),
        (["--chunks", "4,x"], "--chunks 4,x: expected positive sizes"),
        (["--chunks", "0"], "--chunks 0: expected positive sizes"),
        (["--model", "/nowhere"], "/nowhere/config.json: no config.json here"),
    ],
)
def test_bad_options_are_named(
    tmp_path: Path, ids_file: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["logits", "--ids", str(ids_file), "--out", str(tmp_path / "out"), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"), [("{}", "non-empty JSON list"), ("[]", "non-empty JSON list"), ("[1,", "not JSON")]
)
def test_bad_ids_name_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    assert main(["logits", "--ids", str(file), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "bad.json" in error
    assert message in error


def test_models_and_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--path", "ced-toy"]) == 0
    assert Path(capsys.readouterr().out.strip()).joinpath("config.json").is_file()
    assert main(["models", "--path", "gpt"]) == 1
    assert "no bundled checkpoint 'gpt'; there is: ced-tiny, ced-toy" in capsys.readouterr().err


def test_generate_streams_the_engines_text(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["generate", "--prompt", "Once upon", "--max-new-tokens", "12", "--ignore-eos"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first


def test_generate_needs_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", str(tmp_path), "--prompt", "x"]) == 1
    assert "tokenizer.json: no such file" in capsys.readouterr().err


def test_doctor_finds_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-sglang"]) == 0
    out = capsys.readouterr().out
    for said in ("GiB free, control group limit ", ", may lock ", "huge pages: anonymous ", "% is in huge pages"):
        assert said in out
    assert "one-shot = chunked" in out
    assert out.endswith("No problem found\n")


def test_doctor_reports_a_bad_kernel_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CED_KERNELS", "fastest")
    assert main(["doctor", "--no-sglang"]) == 1
    assert "'fastest' is not one of auto, reference" in capsys.readouterr().out


def test_half_a_character_waits_for_its_rest() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(bundled_path("ced-toy") / "tokenizer.json"))
    text = "a – ü"
    pieces = list(stream_text(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids))
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_python_dash_m_is_the_same_command() -> None:
    run = subprocess.run([sys.executable, "-m", "sglang_ced", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("sglang-ced ")
