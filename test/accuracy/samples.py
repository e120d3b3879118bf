"""What lm-eval left of one run (`--log_samples`): an answer to each question, read and checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What lm-eval is told to write where a request gave nothing ($LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER); its default is "".
NO_ANSWER = "<no answer>"


class SampleError(ValueError):
    """Samples that cannot be judged: missing, empty, doubled or of other questions."""


@dataclass(frozen=True)
class Sample:
    """One question and what came of it.

    group: questions with a common beginning. skill: the task, without its prefix. prompt: as sent, "" for a chat.
    output: the text generated. likelihoods: of each choice, for a task that weighs choices (then output is "").
    """

    id: str
    group: str
    skill: str
    right: bool
    prompt: str = ""
    output: str = ""
    likelihoods: tuple[float, ...] = ()


def read_samples(folder: Path, filters: Mapping[str, str] | None = None) -> dict[str, Sample]:
    """Samples of all tasks below `folder`, by id. filters: task -> the filter to read where a task has several.

    Raises SampleError where there are none, where a file is empty, or where a question comes twice.
    """
    files = sorted(folder.rglob("samples_*.jsonl"))
    if not files:
        raise SampleError(f"{folder}: no samples; did lm-eval run to its end (log beside it)?")
    found: dict[str, Sample] = {}
    for file in files:
        task = file.name.removeprefix("samples_").rsplit("_", 1)[0]
        before = len(found)
        for sample in _of_file(file, task, (filters or {}).get(task)):
            if sample.id in found:
                raise SampleError(f"{file}: question {sample.id} comes twice")
            found[sample.id] = sample
        if len(found) == before:
            raise SampleError(f"{file}: holds no question")
    return found


def _of_file(file: Path, task: str, wanted: str | None) -> Iterator[Sample]:
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if wanted is None or row["filter"] == wanted:
            yield _sample(row, task)


def _sample(row: Mapping[str, Any], task: str) -> Sample:
    document, sent = row["doc"], row["arguments"]["gen_args_0"]["arg_0"]
    name = document.get("id") or f"{task}-{row['doc_id']}"
    likelihoods = _likelihoods(row["resps"])
    output = "" if likelihoods else row["resps"][0][0]
    if output == NO_ANSWER:
        raise SampleError(f"{task}: question {name} got no answer")
    return Sample(
        id=name,
        group=document.get("group") or name,
        skill=task.removeprefix("ced_"),
        right=bool(row[row["metrics"][0]]),
        prompt=sent if isinstance(sent, str) else "",
        output=output,
        likelihoods=likelihoods,
    )


def _likelihoods(answers: list[Any]) -> tuple[float, ...]:
    """One (log-likelihood, is greedy) pair for each choice; empty for generated text."""
    if isinstance(answers[0][0], str):
        return ()
    return tuple(float(pair[0]) for (pair,) in answers)
