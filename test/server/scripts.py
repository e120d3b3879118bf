"""Scripts for SGLang's `scripted_runtime`: they run inside the scheduler process, one `yield` a step.

A module of its own, because that process imports them by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.test.scripted_runtime_chunked_helpers import (
    advance_to_decode_step,
    advance_to_nth_chunk,
    run_until_all_finished,
    run_until_finished,
)

NEW = 12


def launch(**arguments: Any) -> None:
    """In the place of the runtime's own launcher, which resolves arguments before plugins are loaded."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    from sglang_ced.plugin import defaults

    # An idle scheduler must not sleep on sockets: the runtime puts an object of its own in the place of one.
    defaults.DEFAULTS = tuple(default for default in defaults.DEFAULTS if default.name != "sleep_on_idle")
    launch_server(ServerArgs(**arguments))


# -- what the scripts look at ----------------------------------------------------------------------------------


def state_of(t: Any) -> Any:
    return t.scheduler.tp_worker.model_runner.attn_backend.state


def free_counts(t: Any) -> tuple[int, int]:
    """Free request slots and free tokens of the pool."""
    return t.scheduler.req_to_token_pool.available_size(), t.scheduler.token_to_kv_pool_allocator.available_size()


def owner_of(t: Any, handle: Any) -> tuple[int, int]:
    """(slot, generation) of a running request."""
    slot = int(handle.req.kv.req_pool_idx)
    return slot, int(t.scheduler.req_to_token_pool.req_generation[slot])


def assert_ring_is(t: Any, slot: int, generation: int, low: int, high: int) -> None:
    """Both halves of the slot's ring hold positions [low, high) of that request."""
    state = state_of(t)
    capacity = state.layout.ring_capacity
    for half in (0, 1):
        for position in range(max(low, high - state.config.sliding_window), high):
            tag = int(state.window.tags[half, slot * capacity + position % capacity])
            assert tag == generation << 32 | position, (half, position, tag >> 32, tag & 0xFFFFFFFF)


def drain(t: Any) -> Iterator[None]:
    for _ in range(100):
        if t.is_fully_idle:
            return
        yield
    raise AssertionError("the scheduler did not become idle")


def flush(t: Any) -> Iterator[None]:
    yield from drain(t)
    t.flush_cache()
    yield


def start(t: Any, length: int, token: int = 20, **more: Any) -> Any:
    settings = {"max_new_tokens": NEW, "ignore_eos": True, "temperature": 0.0} | more
    return t.start_req(prompt_len=length, prompt_token=token, **settings)


def finish(t: Any, handle: Any) -> Iterator[None]:
    """Run to the end; `yield from` gives the output."""
    yield from advance_to_decode_step(handle, 1)
    request = handle.req
    yield from run_until_finished(handle)
    return list(request.output_ids)


# -- the scripts -----------------------------------------------------------------------------------------------


def abort_in_mid_chunk(t: Any) -> Iterator[None]:
    before = free_counts(t)
    victim = start(t, 200)
    yield from advance_to_nth_chunk(victim, 2)
    slot, generation = owner_of(t, victim)
    record = state_of(t).slots[slot]
    assert (record.generation, 0 < record.high < 200) == (generation, True)
    t.abort(victim)
    yield from drain(t)
    # The next request gets the slot, and nothing of what is left in it.
    heir = start(t, 90, token=30)
    yield from advance_to_decode_step(heir, NEW - 2)
    assert owner_of(t, heir) == (slot, generation + 1)
    high = state_of(t).slots[slot].high
    assert high >= 90
    assert_ring_is(t, slot, generation + 1, 0, high)
    yield from run_until_finished(heir)
    yield from flush(t)
    assert free_counts(t) == before


def abort_in_mid_decode(t: Any) -> Iterator[None]:
    before = free_counts(t)
    handles = [start(t, 40 + i, token=20 + i, max_new_tokens=200) for i in range(3)]
    for handle in handles:
        yield from advance_to_decode_step(handle, 3)
    t.abort_all()
    yield from flush(t)
    assert free_counts(t) == before


def retract_and_resume(t: Any, stage: str) -> Iterator[None]:
    """A request as long as a window answers the same when it was retracted on the way."""
    before = free_counts(t)
    calm = start(t, 100)
    expected = yield from finish(t, calm)
    assert len(expected) == NEW
    yield from flush(t)
    victim = start(t, 100)
    if stage == "chunk":
        yield from advance_to_nth_chunk(victim, 2)
    else:
        yield from advance_to_decode_step(victim, NEW // 2)
    owner = owner_of(t, victim)
    t.pause_generation(mode="retract")
    yield
    t.continue_generation()
    yield
    yield from advance_to_decode_step(victim, NEW - 2)
    assert owner_of(t, victim) != owner, "it was given a slot anew"
    found = yield from finish(t, victim)
    assert found == expected
    yield from flush(t)
    assert free_counts(t) == before


def slots_are_used_again(t: Any) -> Iterator[None]:
    """Twice as many requests as slots, of different lengths: each ends with a ring of its own."""
    before, seen = free_counts(t), {}
    handles = [start(t, 20 + 30 * i, token=20 + i) for i in range(2 * before[0])]
    for _ in range(400):
        for handle in handles:
            if handle.status == "running" and handle.req.output_ids:
                slot, generation = owner_of(t, handle)
                record = state_of(t).slots[slot]
                assert record.generation == generation
                assert_ring_is(t, slot, generation, max(record.encoder_low, record.decoder_low), record.high)
                seen.setdefault(slot, set()).add(generation)
        if all(handle.finished for handle in handles):
            break
        yield
    assert max(len(generations) for generations in seen.values()) > 1
    yield from run_until_all_finished(handles)
    yield from flush(t)
    assert free_counts(t) == before


def decode_goes_on_during_a_long_prefill(t: Any) -> Iterator[None]:
    runner = start(t, 20, max_new_tokens=100)
    yield from advance_to_decode_step(runner, 2)
    long = start(t, 600, token=30)
    yield from advance_to_nth_chunk(long, 1)
    first, chunks = len(runner.req.output_ids), long.chunks_done
    yield from advance_to_nth_chunk(long, 11)
    grown, ran = len(runner.req.output_ids) - first, long.chunks_done - chunks
    assert grown >= ran - 1, f"{grown} tokens in {ran} chunks"
    yield from run_until_all_finished([runner, long])


def eight_hits_take_one_forward(t: Any) -> Iterator[None]:
    stats = state_of(t).stats
    yield from finish(t, start(t, 300, max_new_tokens=2))
    yield from drain(t)
    forwards, hits, replayed = stats.forwards, stats.hits, stats.replay_rows
    handles = [start(t, 300, max_new_tokens=4) for _ in range(8)]
    for _ in range(10):
        yield
        if stats.forwards > forwards:
            break
    assert (stats.forwards - forwards, stats.hits - hits) == (1, 8)
    assert stats.replay_rows - replayed == 8 * 128
    yield from run_until_all_finished(handles)


def stale_windows_are_rebuilt(t: Any) -> Iterator[None]:
    """Rings overwritten behind our back: counted and rebuilt where the server is not strict."""
    state = state_of(t)
    calm = start(t, 100)
    expected = yield from finish(t, calm)
    yield from flush(t)
    victim, before = start(t, 100), state.stats.stale_rows
    yield from advance_to_decode_step(victim, 4)
    request = victim.req
    state.strict = False
    try:
        state.window.tags.fill_(-1)
        yield from run_until_finished(victim)
    finally:
        state.strict = True
    assert state.stats.stale_rows > before
    assert list(request.output_ids) == expected
