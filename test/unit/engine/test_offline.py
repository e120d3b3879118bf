"""The engine against the reference, and against itself under every schedule: equal to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ced.engine.offline import CapacityError

WINDOW = 16
few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("chunk", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2, 3, 13, 63, 65])
def test_chunk_boundary_invariance(make_engine, ids, reference, chunk: int) -> None:
    engine, prompt = make_engine(), ids(70)
    with torch.inference_mode():
        whole = reference(torch.tensor([prompt]))[0]
    assert torch.equal(engine.prefill(engine.start(prompt), [chunk], all_rows=True), whole)


@few
@given(
    length=st.integers(2, 120),
    hit=st.integers(0, 60),
    chunks=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    seed=st.integers(0, 3),
)
def test_exact_warm_equals_cold(make_engine, ids, length: int, hit: int, chunks: list[int], seed: int) -> None:
    engine, prompt, hit = make_engine(), ids(length, seed), min(2 * hit, (length - 1) // 2 * 2)
    first = engine.start(prompt)
    cold = engine.prefill(first, all_rows=True)
    warm = engine.start(prompt, prefix_of=first, hit=hit)
    assert torch.equal(engine.prefill(warm, chunks, all_rows=True), cold[hit:])


@pytest.mark.parametrize("replay", ["exact", "bounded"])
def test_batch_mates_do_not_show(make_engine, ids, replay: str) -> None:
    """Sixteen requests of different lengths, chunks mixed with decode rows: the same tokens as one by one."""
    prompts = [ids(length, seed=length) for length in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 40, 47, 64, 65, 90, 121)]
    together = make_engine(replay=replay).generate(prompts, 12, chunk=19, stop=[])
    alone = make_engine(replay=replay)
    assert together == [alone.generate([prompt], 12, stop=[])[0] for prompt in prompts]


def test_more_requests_than_slots_wait_for_their_turn(make_engine, ids) -> None:
    prompts = [ids(length, seed=length) for length in range(10, 30)]
    assert make_engine(max_requests=3).generate(prompts, 4, stop=[]) == make_engine(max_requests=20).generate(
        prompts, 4, stop=[]
    )


def test_decode_follows_the_reference(make_engine, ids, reference) -> None:
    """Generated tokens far past the window, each checked against a full recomputation."""
    prompt = ids(30)
    out = make_engine().generate([prompt], 40, stop=[])[0]
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + out]))[0]
    assert out == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@few
@given(
    length=st.integers(1, 100),
    hit=st.integers(0, 45),
    chunks=st.lists(st.integers(1, 40), min_size=1, max_size=4),
)
def test_chunking_does_not_show_in_bounded_replay(make_engine, ids, length: int, hit: int, chunks: list[int]) -> None:
    engine, prompt, hit = make_engine(replay="bounded"), ids(length), min(2 * hit, (length - 1) // 2 * 2)
    first = engine.start(prompt)
    engine.prefill(first)
    one_shot, chunked = (engine.start(prompt, prefix_of=first, hit=hit) for _ in range(2))
    assert torch.equal(engine.prefill(one_shot), engine.prefill(chunked, chunks))
    for _ in range(3):
        for request in (one_shot, chunked):
            request.tokens.append(7)
        a, b = engine.step([(one_shot, 1), (chunked, 1)])
        assert torch.equal(a, b)


@pytest.mark.parametrize("length", [1, 15, 16])
def test_bounded_equals_exact_within_the_window(make_engine, ids, length: int) -> None:
    prompt = ids(length)
    assert make_engine(replay="bounded").generate([prompt], 20, stop=[]) == make_engine().generate(
        [prompt], 20, stop=[]
    )


def test_bounded_replay_trims_and_exact_does_not(make_engine, ids) -> None:
    """The mode is felt: a prompt of many windows runs only its last window through the decoder."""
    rows = {}
    for replay in ("exact", "bounded"):
        engine = make_engine(replay=replay)
        request = engine.start(ids(100))
        step = engine.state.plan
        seen = []
        engine.state.plan = lambda *args, step=step, seen=seen: seen.append(step(*args)) or seen[-1]
        engine.prefill(request)
        rows[replay] = [len(s.decoder.rows) for s in seen]
    assert rows == {"exact": [100], "bounded": [WINDOW]}


@pytest.mark.parametrize("replay", ["exact", "bounded"])
@pytest.mark.parametrize("hit", [2, 14, 16, 18, 32, 64])
def test_replay_never_rewrites_global(make_engine, ids, replay: str, hit: int) -> None:
    engine, prompt = make_engine(replay=replay), ids(80)
    first = engine.start(prompt)
    engine.prefill(first)
    pools = [*engine.state.global_kv.kv.values(), *engine.state.global_kv.index.values()]
    before = [pool.clone() for pool in pools]
    used = engine.slot_table[first.slot, :hit]
    engine.prefill(engine.start(prompt, prefix_of=first, hit=hit))
    for pool, old in zip(pools, before, strict=True):
        groups = (used * len(pool) // engine.state.global_kv.num_kv_slots).unique()
        assert torch.equal(pool[groups], old[groups])


def test_slots_and_pages_return_and_a_reused_slot_remembers_nothing(make_engine, ids) -> None:
    engine = make_engine(max_requests=1, max_tokens=256)
    free = sorted(engine.free_pages)
    expected = make_engine().generate([ids(60, 1)], 8, stop=[])
    for seed in (0, 2, 3):
        half = engine.start(ids(90, seed))
        engine.step([(half, 37)])  # aborted in the middle of its prefill
        engine.finish(half)
        assert engine.generate([ids(60, 1)], 8, stop=[]) == expected
        assert sorted(engine.free_pages) == free


def test_requests_that_do_not_fit_are_refused_by_cause(make_engine, ids, checkpoint) -> None:
    engine = make_engine(max_requests=1, max_tokens=64)
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.start([])
    with pytest.raises(ValueError, match="the prompt has 65 tokens, the context ends at 64"):
        engine.start(ids(65))
    with pytest.raises(ValueError, match="token id 320 is outside the vocabulary of 320"):
        engine.start([3, 320])
    with pytest.raises(ValueError, match="318 is the image placeholder; vision is not built"):
        engine.start([3, checkpoint.config.image_token_id])
    request = engine.start(ids(40))
    with pytest.raises(CapacityError, match="all 1 request slots are taken"):
        engine.start(ids(3))
    engine.prefill(request)
    engine.finish(request)
    with pytest.raises(ValueError, match="hit 3: must be whole pages of 2"):
        engine.start(ids(40), prefix_of=request, hit=3)


def test_unknown_modes_are_refused(make_engine) -> None:
    with pytest.raises(ValueError, match="replay: 'sometimes'"):
        make_engine(replay="sometimes")
    with pytest.raises(ValueError, match="kernels: 'best' is not one of auto, reference"):
        make_engine(kernels="best")
