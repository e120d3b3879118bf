"""The trainer's quick forward is the reference, and the text it trains on is what the server would render."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import deepseek_recipe
import pytest
import torch
from torch import Tensor
from training.muon import orthogonal

from sglang_ced.checkpoint.token_map import token_classes
from sglang_ced.checkpoint.writer import random_tensors
from sglang_ced.config import CedConfig
from sglang_ced.reference import Bounds, Reference, published_name
from training import conversation, fast, lexicon, shape, skills, tokenizer

TOKENS = 130


@cache
def tokens() -> tokenizer.Tokenizer:
    return tokenizer.train()


@cache
def models(fake_quant: bool) -> tuple[fast.FastReference, Reference]:
    config = CedConfig.from_dict(shape.config(tokens()))
    numerics = replace(fast.QUICK, fake_quant=fake_quant)
    token_map = torch.tensor(token_classes(tokens()))
    quick, reference = fast.FastReference(config, token_map, numerics), Reference(config, token_map, numerics)
    values = dict(random_tensors(config))
    state = {name: values[published_name(name)] for name in reference.state_dict()}
    quick.load_state_dict(state)
    reference.load_state_dict(state)
    return quick, reference


def ids() -> Tensor:
    return torch.randint(3, 1200, (2, TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("encoder", "decoder"), [(0, 0), (50, 50), (50, 90)])
@torch.no_grad()
def test_quick_forward_is_the_reference(encoder: int, decoder: int) -> None:
    quick, reference = models(fake_quant=False)
    expected = reference(ids(), bounds=Bounds(encoder=encoder, decoder=decoder))
    lesson = fast.Lesson(encoder_floor=torch.tensor([encoder] * 2), decoder_floor=torch.tensor([decoder] * 2))
    found = quick.head(quick.hidden(ids(), lesson))
    # float32 sums in another order over 8 layers: some 2^-23 of values near 5, grown a few times
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_quick_forward_sees_floors_per_text() -> None:
    quick, _ = models(fake_quant=False)
    zero, floor = torch.tensor([0, 0]), torch.tensor([0, 40])
    plain = quick.hidden(ids(), fast.Lesson(encoder_floor=zero, decoder_floor=zero))
    bounded = quick.hidden(ids(), fast.Lesson(encoder_floor=floor, decoder_floor=floor))
    assert torch.equal(plain[0], bounded[0])
    assert torch.equal(plain[1, :40], bounded[1, :40])
    assert not torch.equal(plain[1, 40:], bounded[1, 40:])


def test_training_with_quantisation_moves_every_parameter() -> None:
    quick, _ = models(fake_quant=True)
    lesson = fast.Lesson(teach_indexer=True)
    states = quick.hidden(ids(), lesson)
    (quick.head(states).square().mean() + torch.stack(lesson.index_losses).sum()).backward()
    still = [name for name, p in quick.named_parameters() if p.grad is None or not p.grad.any()]
    quick.zero_grad()
    # the gate's bias has a rule of its own (train.balance); the last site's expansion feeds nothing
    assert {name for name in still if not name.endswith("gate.bias")} == set()


@torch.no_grad()
def test_scores_follow_every_layer_that_reads_what_is_chosen_by_them() -> None:
    quick, _ = models(fake_quant=False)
    own, readers = fast.Lesson(teach_indexer=True), fast.Lesson(teach_indexer=True, teach_readers=True)
    quick.hidden(ids(), own)
    quick.hidden(ids(), readers)
    assert len(own.index_losses) == 3  # layers 2, 4 and 6 choose
    # 2 -> 2, 3; 4 -> 4, 5, and candidates for 6, 7; 6 -> 6, 7
    assert len(readers.index_losses) == 8
    torch.testing.assert_close(torch.stack(own.index_losses), torch.stack(readers.index_losses)[[0, 2, 4]])


def test_index_loss_is_the_divergence_and_counts_some_rows_apart() -> None:
    draw = torch.Generator().manual_seed(0)
    scores, q, latents = (torch.randn(shape, generator=draw) for shape in ((1, 8, 4), (1, 8, 2, 3), (1, 4, 3)))
    hidden = torch.arange(4) >= ((torch.arange(8) + 1) // 2)[:, None]

    def divergence(row: int) -> Tensor:
        seen = ~hidden[row]
        target = (q[0, row] @ latents[0, seen].T * 3**-0.5).softmax(-1).mean(0)
        return (target * (target.log() - scores[0, row, seen].log_softmax(-1))).sum()

    at = torch.zeros(1, 8, dtype=torch.bool)
    at[0, [0, 2, 5]] = True  # row 0 sees no group
    torch.testing.assert_close(fast.index_loss(scores, q, latents, hidden), (divergence(3) + divergence(7)) / 2)
    torch.testing.assert_close(
        fast.index_loss(scores, q, latents, hidden, at),
        (divergence(3) + divergence(7)) / 2 + (divergence(2) + divergence(5)) / 2,
    )


def test_orthogonal_makes_singular_values_near_one() -> None:
    stack = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(stack))
    assert values.min() > 0.5
    assert values.max() < 1.4


def test_every_word_is_one_token_and_the_vocabulary_is_the_same_each_time() -> None:
    again = tokenizer.train()
    assert again.to_str() == tokens().to_str()
    words = {w for value in vars(lexicon).values() if isinstance(value, tuple) for w in value} - set(lexicon.FILLER)
    assert [w for w in sorted(words) if len(tokens().encode(f" {w}").ids) != 1] == []


def test_conversations_are_what_the_publisher_s_renderer_writes() -> None:
    writer = conversation.Writer(tokens(), conversation.system_text())
    random = Random(0)
    tool = skills.tools(random, 1)[0]
    turns = [skills.sum_(random), *tool.use(random), skills.fact(random)]
    example = writer.start([tool])
    for turn in turns:
        writer.add(example, turn)
    messages: list[dict[str, Any]] = []
    for turn in turns:
        result = re.fullmatch(r"<tool_result>(.*)</tool_result>", turn.user)
        told = {"role": "tool", "tool_call_id": "c", "content": result[1]} if result else {}
        messages.append(told or {"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.answer})
        for name, arguments in turn.calls:
            function = {"name": name, "arguments": json.dumps(arguments)}
            messages[-1]["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    special = deepseek_recipe.SpecialTokens(image="<｜deepseek_image｜>")
    body = {"model": "DeepSeek-V4.1-Flash", "messages": messages, "thinking": {"type": "disabled"}}
    body["tools"] = [tool.schema()]
    options = deepseek_recipe.ConversionOptions().with_special_tokens(special)
    encoding = deepseek_recipe.DeepseekV41Encoding().with_special_tokens(special)
    rendered = encoding.render_conversation(deepseek_recipe.ChatCompletionRequest(body).convert(options).conversation)
    written = tokens().decode(example.ids, skip_special_tokens=False)
    assert written + "<｜Assistant｜></think>" == rendered.prompt


def test_answers_are_marked() -> None:
    writer = conversation.Writer(tokens(), conversation.system_text())
    example = conversation.conversation(writer, Random(3), 512)
    assert {"recall", "fact", "sum"} <= {skill for skill, _, _ in example.answers}
    for _, first, end in example.answers:
        assert tokens().decode(example.ids[first - 1 : first], skip_special_tokens=False) in ("</think>", "<think>")
        assert example.ids[end - 1] == 1


@torch.no_grad()
def test_without_global_kv_a_row_reaches_no_further_than_the_windows() -> None:
    quick, _ = models(fake_quant=False)
    changed = ids()
    changed[:, 0] = 7
    reach = len(quick.layers) * (shape.WINDOW - 1)
    # other rows of an expert's batch may turn last bits; a row that is reached differs by far more
    far = (quick.hidden(changed, fast.Lesson()) - quick.hidden(ids(), fast.Lesson())).abs() > 1e-4
    assert far[:, reach + 1 :].any()
    windows = fast.Lesson(engram=False, global_kv=False)
    near = (quick.hidden(changed, windows) - quick.hidden(ids(), windows)).abs() > 1e-4
    assert near[:, :reach].any()
    assert not near[:, reach + 1 :].any()


def test_without_engram_its_tables_learn_nothing() -> None:
    quick, _ = models(fake_quant=False)
    quick.hidden(ids(), fast.Lesson(engram=False)).square().mean().backward()
    learnt = {name for name, parameter in quick.named_parameters() if parameter.grad is not None}
    quick.zero_grad()
    assert learnt
    assert not any("engram" in name for name in learnt)
