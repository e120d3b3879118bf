"""Two runs over the same questions, compared answer by answer, and the two rules by which a gate judges them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import paired
from samples import Sample, SampleError

# Prompt logprobs are float32 and their last bits depend on what else is in the batch: docs/explanation/numerics.md.
LOGPROB_DIFFERENCE = 2e-6


@dataclass(frozen=True)
class Comparison:
    """Counts over n questions. lost / gained: ids right in the baseline / the candidate alone. changed: ids whose text
    differs, right or not. likelihood_difference: the largest one of a choice, 0 if no choice was weighed.
    """

    n: int
    right_baseline: int
    right_candidate: int
    lost: tuple[str, ...]
    gained: tuple[str, ...]
    changed: tuple[str, ...]
    likelihood_difference: float
    clustered_error: float

    @property
    def loss(self) -> float:
        return (len(self.lost) - len(self.gained)) / self.n

    @property
    def error(self) -> float:
        """Standard error of the loss: the larger one of independent questions and of groups that flip together."""
        return max(paired.standard_error(len(self.lost), len(self.gained), self.n), self.clustered_error)

    @property
    def p(self) -> float:
        return paired.mcnemar(len(self.lost), len(self.gained))

    @property
    def bound(self) -> float:
        """Upper bound of the loss at 95 %, one-sided: the score bound, or the normal one of `error` if it is larger."""
        return max(paired.score_bound(len(self.lost), len(self.gained), self.n), self.loss + paired.Z * self.error)


def compare(baseline: Mapping[str, Sample], candidate: Mapping[str, Sample]) -> Comparison:
    """Raises SampleError for empty runs, and for runs that are not of the same questions with the same prompts."""
    if not baseline or not candidate:
        raise SampleError("no samples to compare")
    if baseline.keys() != candidate.keys():
        odd = sorted(baseline.keys() ^ candidate.keys())
        raise SampleError(f"{len(odd)} questions are in one of the two runs alone, the first is {odd[0]}")
    differences: dict[str, list[int]] = defaultdict(list)
    lost, gained, changed, largest = [], [], [], 0.0
    for key, one in sorted(baseline.items()):
        two = candidate[key]
        if (one.prompt, len(one.likelihoods)) != (two.prompt, len(two.likelihoods)):
            raise SampleError(f"question {key} was put differently to the two")
        differences[one.group].append(one.right - two.right)
        lost += [key] * (one.right and not two.right)
        gained += [key] * (two.right and not one.right)
        changed += [key] * (one.output != two.output)
        largest = max([largest, *(abs(a - b) for a, b in zip(one.likelihoods, two.likelihoods, strict=True))])
    return Comparison(
        n=len(baseline),
        right_baseline=sum(sample.right for sample in baseline.values()),
        right_candidate=sum(sample.right for sample in candidate.values()),
        lost=tuple(lost),
        gained=tuple(gained),
        changed=tuple(changed),
        likelihood_difference=largest,
        clustered_error=paired.clustered_error(differences),
    )


def by_skill(samples: Mapping[str, Sample]) -> dict[str, tuple[int, int]]:
    """Skill -> (right answers, questions)."""
    found: dict[str, list[bool]] = defaultdict(list)
    for sample in samples.values():
        found[sample.skill].append(sample.right)
    return {skill: (sum(right), len(right)) for skill, right in sorted(found.items())}


# -- rules ------------------------------------------------------------------------------------------------------------


def within_margin(comparison: Comparison, margin: float) -> list[str]:
    """Reasons against the claim that the candidate loses less than `margin` of accuracy; empty if it holds at 95 %."""
    if comparison.bound < margin:
        return []
    return [f"the loss may be {comparison.bound:.2%}, the margin is {margin:.2%}"]


def identical(comparison: Comparison, longest_choice: int) -> list[str]:
    """Reasons against the claim that both give the same text everywhere and the same likelihoods.

    longest_choice: tokens of the longest choice, each of which may differ by LOGPROB_DIFFERENCE.
    """
    reasons = []
    if comparison.changed:
        reasons.append(f"{len(comparison.changed)} answers differ, the first is {comparison.changed[0]}")
    if comparison.lost or comparison.gained:
        reasons.append(f"{len(comparison.lost)} + {len(comparison.gained)} answers flipped")
    if comparison.likelihood_difference > LOGPROB_DIFFERENCE * longest_choice:
        reasons.append(f"log-likelihoods differ by {comparison.likelihood_difference:.1e}")
    return reasons


def able(baseline: Mapping[str, Sample], least: float) -> set[str]:
    """Skills with at least this accuracy. Where a model only guesses there is nothing to lose, and such questions would
    dilute a loss elsewhere."""
    return {skill for skill, (right, n) in by_skill(baseline).items() if right >= least * n}


def of_skills(samples: Mapping[str, Sample], skills: set[str]) -> dict[str, Sample]:
    return {key: sample for key, sample in samples.items() if sample.skill in skills}


def capable(samples: Mapping[str, Sample], floors: Mapping[str, float]) -> list[str]:
    """Skills below their floor. Raises SampleError for a floor of a skill that was not asked for."""
    skills = by_skill(samples)
    if missing := sorted(floors.keys() - skills.keys()):
        raise SampleError(f"no questions of {', '.join(missing)}")
    return [
        f"{skill} {right / n:.1%}, the floor is {floors[skill]:.0%}"
        for skill, (right, n) in skills.items()
        if skill in floors and right < floors[skill] * n
    ]


def exercised(hits: int, samples: Mapping[str, Sample], share: float) -> list[str]:
    """Reasons against the claim that at least this share of the generated answers began with a cache hit: without
    hits a warm run shows nothing. (Weighing a choice needs the logprobs of the whole prompt, and never hits.)"""
    requests = sum(not sample.likelihoods for sample in samples.values())
    if hits >= share * requests:
        return []
    return [f"{hits} of {requests} requests hit the cache, {share:.0%} are needed"]
