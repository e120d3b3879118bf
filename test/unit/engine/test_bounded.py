"""Bounded replay against its definition over full sequences, and faults that these tests must see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ced.cache import state
from sglang_ced.cache.replay import ReplayPlan
from sglang_ced.reference import Bounds, Reference

WINDOW = 16


def definition(model: Reference, ids: list[int], hit: int, replay: str) -> Tensor:
    """Logits of the last token: global KV below `hit` from a cold run, windows cut at the floors of design."""
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        _, cold = model.run(tokens)
        floor = max(0, hit - WINDOW)
        decoder = max(floor, len(ids) - WINDOW) if replay == "bounded" else floor
        return model(tokens, bounds=Bounds(floor, decoder, hit, cold))[0, -1]


def warm(make_engine, ids: list[int], hit: int, replay: str, chunks: tuple[int, ...] = ()) -> Tensor:
    engine = make_engine(replay=replay)
    first = engine.start(ids)
    engine.prefill(first)
    return engine.prefill(engine.start(ids, prefix_of=first, hit=hit), chunks)[-1]


@pytest.mark.parametrize("replay", ["bounded", "encoder"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(hit=st.integers(0, 40), new=st.integers(1, 60), chunk=st.integers(1, 50))
def test_every_hit_gives_what_the_definition_gives(
    make_engine, ids, reference, replay: str, hit: int, new: int, chunk: int
) -> None:
    """hit_unaligned, hit_whole_prompt (one new row), H < W, H == W, chunks shorter than the window."""
    prompt = ids(2 * hit + new)
    assert torch.equal(
        warm(make_engine, prompt, 2 * hit, replay, (chunk,)), definition(reference, prompt, 2 * hit, replay)
    )


@pytest.mark.parametrize("page", [2, 16, 64])
def test_page_size_does_not_show(make_engine, ids, reference, page: int) -> None:
    prompt = ids(150)
    engine = make_engine(replay="bounded", page_size=page)
    first = engine.start(prompt)
    engine.prefill(first)
    logits = engine.prefill(engine.start(prompt, prefix_of=first, hit=128))[-1]
    assert torch.equal(logits, definition(reference, prompt, 128, "bounded"))


def test_hits_of_a_batch_take_one_forward_and_do_not_disturb_each_other(make_engine, ids, reference) -> None:
    """Eight hits of different lengths, two running requests beside them: one step, each row its own definition."""
    engine, base = make_engine(replay="bounded", max_requests=12), ids(120)
    first = engine.start(base)
    engine.prefill(first)
    running = [engine.start(ids(40, seed)) for seed in (5, 6)]
    for request in running:
        engine.prefill(request)
        request.tokens.append(9)
    prompts = [base[: 20 + 10 * i] + ids(3 + 5 * i, 20 + i) for i in range(8)]
    hits = [engine.start(p, prefix_of=first, hit=(20 + 10 * i) // 2 * 2) for i, p in enumerate(prompts)]
    before = engine.state.stats.forwards
    logits = engine.step([*((r, 1) for r in running), *((h, h.prompt_len - h.computed) for h in hits)])
    assert engine.state.stats.forwards == before + 1
    for i, (prompt, rows) in enumerate(zip(prompts, logits[2:], strict=True)):
        assert torch.equal(rows[-1], definition(reference, prompt, 20 + 10 * i, "bounded"))


def test_branches_of_one_prefix_are_independent(make_engine, ids, reference) -> None:
    engine, base = make_engine(replay="bounded"), ids(80)
    first = engine.start(base)
    engine.prefill(first)
    for seed in (1, 2):
        prompt = base[:64] + ids(30, seed)
        branch = engine.start(prompt, prefix_of=first, hit=64)
        assert torch.equal(engine.prefill(branch, [7])[-1], definition(reference, prompt, 64, "bounded"))


def test_a_hit_on_generated_text(make_engine, ids, reference) -> None:
    """The next turn of a session begins on tokens that were decoded, not prefilled: their global KV is the same."""
    engine = make_engine(replay="exact")
    prompt = ids(50)
    request = engine.start(prompt)
    logits = engine.prefill(request)
    for _ in range(40):
        request.tokens.append(int(logits[-1].argmax()))
        logits = engine.step([(request, 1)])[0]
    turn = request.tokens + ids(20, 3)
    next_turn = engine.start(turn, prefix_of=request, hit=88)
    with torch.inference_mode():
        cold = reference(torch.tensor([turn]))[0, -1]
    assert torch.equal(engine.prefill(next_turn)[-1], cold)


def test_outputs_of_every_row_run_the_decoder_whole(make_engine, ids, reference) -> None:
    """Prompt logprobs switch trimming off for the request that wants them; its batch mate stays trimmed."""
    engine = make_engine(replay="bounded")
    whole, trimmed = engine.start(ids(60), outputs_from=0), engine.start(ids(70, 1))
    rows, _ = engine.step([(whole, 60), (trimmed, 70)], [0, None])
    with torch.inference_mode():
        assert torch.equal(rows, reference(torch.tensor([ids(60)]))[0])
    assert engine.state.stats.trimmed_rows == 70 - WINDOW


FAULTS = {
    "replay skipped": lambda plan, hit: ReplayPlan(hit, max(hit, plan.decoder_start)),
    "a row too few": lambda plan, hit: ReplayPlan(min(plan.start + 1, hit), plan.decoder_start),
    "a row too many": lambda plan, hit: ReplayPlan(max(plan.start - 1, 0), plan.decoder_start),
    "decoder a row short": lambda plan, hit: ReplayPlan(plan.start, plan.decoder_start + 1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_replay_is_seen(make_engine, ids, reference, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Fault injection: the comparison above fails in a build that replays too little, too much, or nothing."""
    right, prompt, hit = state.plan_replay, ids(90), 64

    def wrong(mode: str, cached: int, *rest: int) -> ReplayPlan:
        plan = right(mode, cached, *rest)
        return FAULTS[fault](plan, cached) if cached else plan

    monkeypatch.setattr(state, "plan_replay", wrong)
    # 90 tokens with 64 cached: the decoder's window lies within the new rows, the encoder's reaches back.
    assert not torch.equal(warm(make_engine, prompt, hit, "bounded"), definition(reference, prompt, hit, "bounded"))


def test_a_short_exact_halo_is_seen(make_engine, ids, reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 layers of window 16 need a halo of 120 rows; with a third of it missing, warm is no longer cold."""
    right, prompt, hit = state.plan_replay, ids(200), 180

    def wrong(mode: str, cached: int, *rest: int) -> ReplayPlan:
        plan = right(mode, cached, *rest)
        return ReplayPlan(plan.start + 40, max(plan.decoder_start, plan.start + 40)) if cached else plan

    with torch.inference_mode():
        cold = reference(torch.tensor([prompt]))[0, -1]
    assert torch.equal(warm(make_engine, prompt, hit, "exact"), cold)
    monkeypatch.setattr(state, "plan_replay", wrong)
    assert not torch.equal(warm(make_engine, prompt, hit, "exact"), cold)
