"""The seam table matches the SGLang that is installed, and says so where it does not."""

from __future__ import annotations

import pytest

from sglang_ced.plugin import seams
from sglang_ced.plugin.seams import Seam, check_seams


def test_the_installed_sglang_is_the_expected_one() -> None:
    assert check_seams() == []


@pytest.mark.parametrize(
    ("seam", "cause"),
    [
        (Seam("no_such_module:Name", seams.EARLY, "a test"), "sglang.srt.no_such_module.Name: not found"),
        (Seam("server_args:NoSuchName", seams.EARLY, "a test"), "sglang.srt.server_args.NoSuchName: not found"),
        (Seam("server_args:ServerArgs", seams.EARLY, "a test", members=("no_such_field",)), "has no no_such_field"),
        (
            Seam("server_args:ServerArgs.add_cli_args", seams.EARLY, "a test", params=("no_such_parameter",)),
            "parameters are (parser), expected no_such_parameter",
        ),
    ],
)
def test_a_difference_is_reported_by_name(seam: Seam, cause: str) -> None:
    problems = check_seams(seams=[seam])
    assert len(problems) == 1
    assert cause in problems[0]
    assert "a test" in problems[0]


def test_another_version_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "version", lambda _: "0.6.0")
    problems = check_seams(seams=[])
    assert problems == ["version: 0.6.0, expected 0.5.23"]
    assert "0.5.23" in seams.report(problems)


def test_members_set_in_the_constructor_count() -> None:
    seam = Seam("mem_cache.memory_pool:ReqToTokenPool", seams.WORKER, "a test", members=("req_generation",))
    assert check_seams(seams=[seam]) == []


def test_a_hook_that_was_not_applied_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seam = Seam("server_args:ServerArgs.from_cli_args", "a stage", "a test", hooked=True)
    monkeypatch.setattr(seams, "SEAMS", (seam,))
    with pytest.raises(seams.PluginError, match=r"sglang\.srt\.server_args\.ServerArgs\.from_cli_args"):
        seams.require_patched("a stage")
