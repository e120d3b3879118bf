"""Judges what `collect` has left, and writes it down: a table for people, a file for machines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import compare
from collect import folder_of
from compare import Comparison
from divergence import Divergence, Judge
from gates import LONGEST_CHOICE, Gate, Suite
from samples import Sample, read_samples

SHOWN = 5  # divergences of each gate
ABLE = 0.5  # accuracy of the baseline from which a skill counts where a loss is judged

Runs = Mapping[str, Mapping[str, Sample]]


@dataclass(frozen=True)
class Verdict:
    """One line of the table. reasons: why it did not pass; empty = passed. A control passes where its gate fails."""

    name: str
    rule: str
    reasons: tuple[str, ...]
    comparison: Comparison | None = None
    divergences: tuple[Divergence, ...] = ()
    is_control: bool = field(default=False)

    @property
    def passed(self) -> bool:
        return not self.reasons


def read_runs(suite: Suite, out: Path) -> dict[str, dict[str, Sample]]:
    """Samples of every run of the suite. Raises SampleError where one is missing."""
    names = [run for configuration in suite.configurations for run in configuration.runs()]
    return {name: read_samples(folder_of(out, name), suite.filters) for name in names}


def judge(suite: Suite, runs: Runs, hits: Mapping[str, int], model: Path | None = None) -> list[Verdict]:
    """Verdicts of a suite. hits: cache hits of each run. model: to look into answers that differ; None = do not."""
    floors = compare.capable(runs[suite.floors_of], suite.floors)
    verdicts = [Verdict(f"{suite.floors_of}: skills", "floor", tuple(floors))]
    verdicts += [_gate(gate, runs, hits, model) for gate in suite.gates]
    for gate in suite.controls:
        seen = _gate(gate, runs, hits, model)
        missed = ("the fault was not seen",) if seen.passed else ()
        verdicts.append(Verdict(seen.name, f"{seen.rule} must fail", missed, seen.comparison, seen.divergences, True))
    return verdicts


def _gate(gate: Gate, runs: Runs, hits: Mapping[str, int], model: Path | None) -> Verdict:
    baseline, candidate = runs[gate.baseline], runs[gate.candidate]
    if gate.rule == "margin":
        skills = compare.able(baseline, ABLE)
        if not skills:
            return Verdict(f"{gate.baseline} → {gate.candidate}", gate.rule, ("there is no skill to lose",))
        comparison = compare.compare(compare.of_skills(baseline, skills), compare.of_skills(candidate, skills))
        reasons, rule = compare.within_margin(comparison, gate.margin), f"loss < {gate.margin:.0%}"
    else:
        comparison = compare.compare(baseline, candidate)
        reasons, rule = compare.identical(comparison, LONGEST_CHOICE), "identical"
    reasons += compare.exercised(hits[gate.candidate], candidate, gate.hits)
    divergences: list[Divergence] = []
    texts = [key for key in comparison.changed if baseline[key].prompt][:SHOWN]
    if model is not None and texts:
        judge_ = Judge(model)
        divergences = [judge_.first_divergence(baseline[key], candidate[key]) for key in texts]
    name = f"{gate.baseline} → {gate.candidate}"
    return Verdict(name, rule, tuple(reasons), comparison, tuple(divergences))


# -- writing ----------------------------------------------------------------------------------------------------------

HEAD = ("gate", "rule", "n", "baseline", "candidate", "lost", "gained", "differ", "p", "loss ± error", "loss ≤", "")


def rows(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, ...]]:
    """Cells of the table, as HEAD names them."""
    for verdict in verdicts:
        c, outcome = verdict.comparison, "passed" if verdict.passed else "FAILED"
        if c is None:
            yield verdict.name, verdict.rule, *[""] * 9, outcome
            continue
        yield (
            *(verdict.name, verdict.rule, str(c.n), f"{c.right_baseline / c.n:.1%}", f"{c.right_candidate / c.n:.1%}"),
            *(str(len(c.lost)), str(len(c.gained)), str(len(c.changed)), f"{c.p:.3g}"),
            *(f"{c.loss:.2%} ± {c.error:.2%}", f"{c.bound:.2%}", outcome),
        )


def markdown(suite: Suite, runs: Runs, verdicts: Sequence[Verdict]) -> str:
    """The report of a suite."""
    lines = [_line(HEAD), _line(["---"] * len(HEAD)), *map(_line, rows(verdicts)), ""]
    skills = {name: compare.by_skill(samples) for name, samples in runs.items()}
    every = sorted({skill for found in skills.values() for skill in found})
    lines += [_line(["run", *every]), _line(["---"] * (len(every) + 1))]
    lines += [_line([name, *(_share(found.get(skill)) for skill in every)]) for name, found in skills.items()]
    unable = {skill: n for skill, n in skills[suite.floors_of].items() if skill not in _able(runs, suite)}
    lines += ["", *_notes(verdicts), *_limits(unable)]
    failed = sum(not verdict.passed for verdict in verdicts)
    return "\n".join([*lines, f"{len(verdicts) - failed} passed, {failed} failed"])


def _notes(verdicts: Sequence[Verdict]) -> Iterator[str]:
    for verdict in verdicts:
        yield from (f"- FAILED {verdict.name}: {reason}" for reason in verdict.reasons)
        for d in verdict.divergences:
            yield (
                f"- {verdict.name}: {d.id} parts at token {d.token}, {d.baseline!r} or {d.candidate!r}; "
                f"exactly computed, {d.best!r} is best by {d.gap:.3f} in log-probability"
            )
    yield ""


def _able(runs: Runs, suite: Suite) -> set[str]:
    return compare.able(runs[suite.floors_of], ABLE)


def _limits(unable: Mapping[str, tuple[int, int]]) -> Iterator[str]:
    if unable:
        names = ", ".join(f"{skill} ({_share(found)})" for skill, found in unable.items())
        yield f"Not counted where a loss is judged, as this model is right in less than {ABLE:.0%}: {names}"
        yield ""


def _share(found: tuple[int, int] | None) -> str:
    return "" if found is None else f"{found[0] / found[1]:.1%} of {found[1]}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine(verdicts: Sequence[Verdict], about: Mapping[str, Any]) -> str:
    """The same as JSON."""
    found = [asdict(verdict) | {"passed": verdict.passed} for verdict in verdicts]
    return json.dumps({**about, "verdicts": found}, indent=1, ensure_ascii=False) + "\n"
