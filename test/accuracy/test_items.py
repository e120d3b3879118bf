"""The committed questions are what the script writes, and are put as training puts them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import calls
import gates
import items
import pytest
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training import conversation, skills, tokenizer

TASKS = Path(__file__).parent / "tasks"
TEXTS = [name for name in items.FILES if name != "tool"]


@pytest.fixture(scope="module")
def server_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """That of ced-tiny, loaded the way SGLang and lm-eval load it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.write(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", items.FILES)
def test_the_committed_questions_are_what_the_script_writes(name: str) -> None:
    assert (items.DATA / f"{name}.jsonl").read_text(encoding="utf-8") == items.text(name)


def test_there_are_1040_questions_to_answer_and_none_twice() -> None:
    every = [item for name in items.FILES for item in items.read(name)]
    assert len({item["id"] for item in every}) == len(every)
    assert len({(item["prompt"], item.get("tools")) for item in every}) > 0.99 * len(every)
    counts = Counter(item["skill"] for item in every)
    assert counts.total() - counts["choice"] == 1040
    assert sum(counts[task.removeprefix("ced_")] for task in gates.QUICK_TASKS) == 576
    assert set(gates.FLOORS) == set(counts)


@pytest.mark.parametrize("name", TEXTS)
def test_prompts_have_the_ids_of_training_text(name: str, server_tokenizer: PreTrainedTokenizerBase) -> None:
    """Training encodes a conversation turn by turn; a server and lm-eval encode the text as a whole."""
    writer = conversation.Writer(server_tokenizer.backend_tokenizer, conversation.system_text())
    for item in items.read(name)[::7]:
        example = writer.start()
        for said in item["prompt"].removeprefix(items.BOS).split(items.USER)[1:]:
            user, answer = said.split(items.ASSISTANT + items.NO_THINK)
            writer.add(example, skills.Turn(item["skill"], user, answer.removesuffix(items.EOS)))
        asked = example.answers[-1][1]
        assert server_tokenizer(item["prompt"]).input_ids == example.ids[:asked]
        assert example.ids.count(server_tokenizer.bos_token_id) == 1


def test_contexts_reach_from_a_few_windows_to_512_tokens(server_tokenizer: PreTrainedTokenizerBase) -> None:
    lengths = [len(server_tokenizer(item["prompt"] + item["answer"]).input_ids) for item in items.read("recall")]
    assert 48 <= min(lengths) < 80
    assert 400 < max(lengths) < 512


def test_questions_of_a_group_share_a_beginning_of_several_windows(server_tokenizer: PreTrainedTokenizerBase) -> None:
    for name in ("recall", "pattern", "fact", "sum", "edit"):
        groups: dict[str, list[list[int]]] = {}
        for item in items.read(name):
            groups.setdefault(item["group"], []).append(server_tokenizer(item["prompt"]).input_ids)
        for ids in groups.values():
            assert len(ids) == items.PER_GROUP
            assert len({tuple(each[:48]) for each in ids}) == 1


def test_choices_differ_and_are_no_longer_than_the_gate_allows_for(server_tokenizer: PreTrainedTokenizerBase) -> None:
    for item in items.read("choice"):
        assert len(set(item["choices"])) == 4
        assert item["choices"][item["right"]] == item["answer"]
        assert max(map(len, server_tokenizer(item["choices"]).input_ids)) <= gates.LONGEST_CHOICE


def test_recall_is_asked_for_over_all_distances() -> None:
    distances = [item["distance"] for item in items.read("recall")]
    assert min(distances) == 1
    assert max(distances) == 44


def test_a_call_reads_the_same_from_the_question_and_from_an_answer() -> None:
    item = next(item for item in items.read("tool") if "," in item["answer"])
    name, _, arguments = item["answer"].partition(" ")
    given = json.dumps(dict(reversed(json.loads(arguments).items())))
    message = {"content": None, "tool_calls": [{"function": {"name": name, "arguments": given}}]}
    assert calls.as_text(message) == item["answer"]
    assert calls.as_text({"content": "No.", "tool_calls": None}) == "No."
    broken = {"content": "", "tool_calls": [{"function": {"name": name, "arguments": "{"}}]}
    assert calls.as_text(broken) == f"{name} {{"


def test_every_task_reads_fields_that_its_questions_have() -> None:
    names = {}
    for file in sorted(TASKS.glob("[a-z]*.yaml")):
        task = yaml.safe_load(file.read_text(encoding="utf-8"))
        if "include" in task:
            task = yaml.safe_load((TASKS / task["include"]).read_text(encoding="utf-8")) | task
        assert task["dataset_path"] == "json"
        data = TASKS.parent / task["dataset_kwargs"]["data_files"]["test"]
        first = json.loads(data.read_text(encoding="utf-8").splitlines()[0])
        for key in ("doc_to_text", "doc_to_target", "doc_to_choice", "description"):
            field = task.get(key, "{{prompt}}").strip("{}")
            assert field in first, f"{file.name}: {key}"
        names[task["task"]] = data.stem
    assert set(names) == {*gates.COMPLETION_TASKS, gates.TOOL_TASK}
    assert set(names.values()) == set(items.FILES)


def test_the_facts_of_training_and_of_the_gates_are_the_same() -> None:
    item = items.read("fact")[0]
    first, last = item["prompt"].rsplit("Job of ", 1)[1].split("?")[0].split()
    assert item["answer"] == f"A {skills.job_of(first, last)}."
