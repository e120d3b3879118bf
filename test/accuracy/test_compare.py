"""A made-up regression fails its gate, and samples that prove nothing are errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import compare
import gates
import pytest
import report
from samples import NO_ANSWER, Sample, SampleError, read_samples

N = 800


def run_of(wrong: int = 0, n: int = N, **more: Any) -> dict[str, Sample]:
    """Samples of which the first `wrong` are wrong, in groups of four."""
    right, text = [i >= wrong for i in range(n)], {True: "right", False: "wrong"}
    return {f"q{i}": Sample(f"q{i}", f"g{i // 4}", "recall", r, "p", text[r], **more) for i, r in enumerate(right)}


def verdict_of(gate: gates.Gate, baseline: dict[str, Sample], candidate: dict[str, Sample], hits: int = N) -> Any:
    suite = gates.Suite((), (gate,), floors={"recall": 0.5}, floors_of="one")
    return report.judge(suite, {"one": baseline, "two": candidate}, {"one": 0, "two": hits})


MARGIN, SAME = gates.Gate("one", "two", "margin"), gates.Gate("one", "two", "identical")


def test_equal_runs_pass_both_rules() -> None:
    for gate in (MARGIN, SAME):
        assert [v.reasons for v in verdict_of(gate, run_of(), run_of())] == [(), ()]


@pytest.mark.parametrize(("wrong", "passes"), [(0, True), (4, True), (16, False), (60, False)])
def test_a_loss_of_two_points_fails_the_margin(wrong: int, passes: bool) -> None:
    assert verdict_of(MARGIN, run_of(), run_of(wrong))[1].passed == passes


def test_skills_that_the_model_lacks_do_not_dilute_a_loss() -> None:
    guessed = {f"x{i}": Sample(f"x{i}", f"x{i}", "guess", i % 10 == 0, "p", "guessed") for i in range(8000)}
    verdict = verdict_of(MARGIN, run_of() | guessed, run_of(16) | guessed)[1]
    assert (verdict.passed, verdict.comparison.n) == (False, N)
    equal = verdict_of(SAME, run_of() | guessed, run_of() | guessed)[1]
    assert (equal.passed, equal.comparison.n) == (True, N + 8000)


def test_few_questions_cannot_show_that_nothing_is_lost() -> None:
    assert not verdict_of(MARGIN, run_of(n=100), run_of(n=100))[1].passed


def test_one_changed_answer_fails_equality_though_it_is_as_right_as_before() -> None:
    changed = run_of(1)
    changed["q0"] = replace(changed["q0"], output="otherwise wrong")
    verdict = verdict_of(SAME, run_of(1), changed)[1]
    assert verdict.reasons == ("1 answers differ, the first is q0",)
    assert (verdict.comparison.lost, verdict.comparison.gained) == ((), ())


@pytest.mark.parametrize(("difference", "passes"), [(5e-6, True), (1e-4, False)])
def test_likelihoods_are_compared_to_the_documented_digit(difference: float, passes: bool) -> None:
    one, two = run_of(likelihoods=(-1.0, -2.0)), run_of(likelihoods=(-1.0, -2.0 - difference))
    assert verdict_of(SAME, one, two)[1].passed == passes


def test_gains_do_not_hide_losses_in_the_count() -> None:
    gained, lost = run_of(10), run_of()
    lost |= {f"q{i}": replace(lost[f"q{i}"], right=False) for i in range(20, 25)}
    result = compare.compare(gained, lost)
    assert (len(result.lost), len(result.gained), result.loss) == (5, 10, -5 / N)


def test_a_warm_run_without_hits_shows_nothing() -> None:
    gate = replace(MARGIN, hits=0.95)
    assert "700 of 800 requests hit" in verdict_of(gate, run_of(), run_of(), hits=700)[1].reasons[0]


def test_a_model_that_cannot_answer_shows_nothing() -> None:
    assert verdict_of(MARGIN, run_of(500), run_of(500))[0].reasons == ("recall 37.5%, the floor is 50%",)


def test_a_control_that_is_not_seen_fails() -> None:
    suite = gates.Suite((), (), controls=(SAME,), floors_of="one")
    missed = report.judge(suite, {"one": run_of(), "two": run_of()}, {"one": 0, "two": N})
    seen = report.judge(suite, {"one": run_of(), "two": run_of(1)}, {"one": 0, "two": N})
    assert [v.passed for v in missed] == [True, False]
    assert [v.passed for v in seen] == [True, True]
    text = report.markdown(suite, {"one": run_of(), "two": run_of()}, missed)
    assert "the fault was not seen" in text
    assert text.endswith("1 passed, 1 failed")


# -- samples that prove nothing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [{}, run_of(n=799), run_of() | {"q0": replace(run_of()["q0"], prompt="other")}])
def test_empty_and_mismatching_runs_are_errors(other: dict[str, Sample]) -> None:
    with pytest.raises(SampleError):
        compare.compare(run_of(), other)
    with pytest.raises(SampleError):
        compare.compare(other, run_of())


def test_a_floor_of_a_skill_without_questions_is_an_error() -> None:
    with pytest.raises(SampleError, match="no questions of sum"):
        compare.capable(run_of(), {"sum": 0.5})


def row(number: int, answer: str = "A fox.", **more: Any) -> dict[str, Any]:
    return {
        "doc_id": number,
        "doc": {"id": f"recall-{number}", "group": "g"},
        "arguments": {"gen_args_0": {"arg_0": "prompt"}},
        "resps": [[answer]],
        "filter": "none",
        "metrics": ["exact_match"],
        "exact_match": 1.0,
    } | more


def write(folder: Path, rows: list[dict[str, Any]], task: str = "ced_recall") -> Path:
    file = folder / "model" / f"samples_{task}_2026-01-01T00-00-00.0.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


def test_samples_are_read_as_lm_eval_writes_them(tmp_path: Path) -> None:
    weighed = row(1, resps=[[["-1.5", "False"]], [["-0.25", "True"]]], metrics=["acc"], acc=0.0)
    chat = row(2, arguments={"gen_args_0": {"arg_0": ["[]"]}})
    found = read_samples(write(tmp_path, [row(0), weighed, chat]))
    assert found["recall-0"] == Sample("recall-0", "g", "recall", True, "prompt", "A fox.")
    assert found["recall-1"] == Sample("recall-1", "g", "recall", False, "prompt", "", (-1.5, -0.25))
    assert found["recall-2"].prompt == ""


def test_one_filter_of_several_is_read(tmp_path: Path) -> None:
    rows = [row(0, doc={}, filter=name, exact_match=value) for name, value in (("strict", 0.0), ("flexible", 1.0))]
    found = read_samples(write(tmp_path, rows, "gsm8k"), {"gsm8k": "flexible"})
    assert [(s.id, s.right) for s in found.values()] == [("gsm8k-0", True)]
    with pytest.raises(SampleError, match="comes twice"):
        read_samples(tmp_path)


@pytest.mark.parametrize(
    ("rows", "says"), [([], "holds no question"), ([row(0), row(0)], "comes twice"), ([row(0, NO_ANSWER)], "no answer")]
)
def test_files_without_answers_are_errors(tmp_path: Path, rows: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(SampleError, match=says):
        read_samples(write(tmp_path, rows))


def test_a_missing_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="no samples"):
        read_samples(tmp_path)
