"""What a step reads and writes, against a model that remembers every row ever computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_ced.cache.layout import KV_FORMATS, RING_SLACK, CacheLayout
from sglang_ced.cache.state import CacheState
from sglang_ced.cache.step import TAG_SHIFT, Span, Step
from sglang_ced.cache.window import StaleRowError
from sglang_ced.config import CedConfig

SLOTS, CONTEXT = 3, 512


@dataclass
class Live:
    """A request as the test sees it."""

    slot: int
    generation: int
    computed: int
    prompt: int


@dataclass
class Driver:
    """Runs random work through CacheState and checks each step."""

    state: CacheState
    live: dict[int, Live] = field(default_factory=dict)
    generations: list[int] = field(default_factory=lambda: [0] * SLOTS)
    steps: int = 0

    def __post_init__(self) -> None:
        self.table = torch.arange(SLOTS * CONTEXT).view(SLOTS, CONTEXT)

    def admit(self, slot: int, hit: int, prompt: int) -> None:
        self.generations[slot] += 1
        self.live[slot] = Live(slot, self.generations[slot], hit, prompt)

    def run(self, work: dict[int, int]) -> Step:
        spans = []
        for slot, count in work.items():
            r = self.live[slot]
            decode = r.computed >= r.prompt
            end = r.computed + 1 if decode else min(r.prompt, r.computed + count)
            output = end - 1 if end >= r.prompt else end
            ids = [1000 * slot + t for t in range(end)]
            spans.append(Span(slot, r.generation, ids, r.computed, end, r.prompt, output, decode))
        step = self.state.plan(spans, self.table)
        self.check(step)
        self.state.commit(step)
        for span in spans:
            self.live[span.slot].computed = span.end
        self.steps += 1
        return step

    def check(self, step: Step) -> None:
        window = self.state.config.sliding_window
        owner = [(p, t) for p in step.spans for t in range(p.start, p.span.end)]
        assert step.positions.tolist() == [t for _, t in owner]
        assert step.token_ids.tolist() == [p.span.token_ids[t] for p, t in owner]
        for back in range(step.history.shape[1]):
            assert step.history[:, back].tolist() == [p.span.token_ids[t - back] if t >= back else -1 for p, t in owner]
        assert step.new_rows.tolist() == [i for i, (p, t) in enumerate(owner) if t >= p.span.prefix]
        assert step.new_slots.tolist() == [p.span.slot * CONTEXT + t for p, t in owner if t >= p.span.prefix]
        for plan, floor in ((step.encoder, "encoder_floor"), (step.decoder, "decoder_floor")):
            rows = plan.rows.tolist()
            wanted = [i for i, (p, t) in enumerate(owner) if floor == "encoder_floor" or t >= p.decoder_floor]
            assert rows == wanted
            known = [(int(tag) >> TAG_SHIFT, int(tag) & (2**TAG_SHIFT - 1)) for tag in plan.prior_tags]
            known += [(owner[i][0].span.generation, owner[i][1]) for i in rows]
            slot_of = [int(row) // self.state.layout.ring_capacity for row in plan.prior_rows]
            slot_of += [owner[i][0].span.slot for i in rows]
            for i, keys in zip(rows, plan.window.tolist(), strict=True):
                p, t = owner[i]
                reads = [(slot_of[k], *known[k]) for k in keys if k >= 0]
                first = max(getattr(p, floor), t - window + 1)
                assert reads == [(p.span.slot, p.span.generation, q) for q in range(first, t + 1)]
                assert all(k < 0 for k in keys[len(reads) :])
        self.check_pairs(step, owner)

    def check_pairs(self, step: Step, owner: list) -> None:
        assert step.pairs is not None
        pairs = [(p, t) for p, t in owner if t % 2 and t >= p.span.prefix]
        assert step.pairs.positions.tolist() == [t - 1 for _, t in pairs]
        assert step.pairs.groups.tolist() == [(p.span.slot * CONTEXT + t) // 2 for p, t in pairs]
        prior = [int(tag) & (2**TAG_SHIFT - 1) for tag in step.pairs.prior_tags]
        rows = prior + [t for _, t in owner]
        assert [rows[i] for i in step.pairs.first.tolist()] == [t - 1 for _, t in pairs]
        assert [rows[i] for i in step.pairs.second.tolist()] == [t for _, t in pairs]


works = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, SLOTS - 1), st.integers(0, 40), st.integers(1, 90)),
        st.tuples(st.just("run"), st.sets(st.integers(0, SLOTS - 1), min_size=1), st.integers(1, 60)),
        st.tuples(st.just("take back"), st.integers(0, SLOTS - 1), st.integers(1, RING_SLACK)),
    ),
    min_size=1,
    max_size=25,
)


@pytest.mark.parametrize("replay", ["exact", "bounded", "encoder"])
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work=works)
def test_every_row_reads_its_own_window_whatever_the_schedule(config: CedConfig, replay: str, work: list) -> None:
    """Chunks, mixed batches, decode, slot reuse with and without hits, and tokens taken back."""
    driver = Driver(CacheState(config, SLOTS * CONTEXT, SLOTS, replay=replay, page_size=2))
    for action in work:
        if action[0] == "admit":
            _, slot, pairs, new = action
            driver.admit(slot, 2 * pairs, 2 * pairs + new)
        elif action[0] == "run":
            ready = {slot: action[2] for slot in sorted(action[1]) if slot in driver.live}
            if ready:
                driver.run(ready)
        elif (r := driver.live.get(action[1])) and r.computed - action[2] >= r.prompt:
            r.computed -= action[2]


def test_a_forged_hit_without_its_window_is_refused(config: CedConfig) -> None:
    """Claiming that the ring holds a window which was never rebuilt raises before anything is decoded."""
    driver = Driver(CacheState(config, SLOTS * CONTEXT, SLOTS, page_size=2))
    driver.admit(0, 0, 40)
    driver.run({0: 40})
    driver.admit(0, 40, 41)
    record = driver.state.slots[0]
    record.generation, record.high = driver.generations[0], 40
    with pytest.raises(StaleRowError, match="window ring: 15 stale rows"):
        driver.run({0: 1})


def test_a_stale_window_is_counted_and_rebuilt_where_the_server_must_go_on(config: CedConfig) -> None:
    state = CacheState(config, SLOTS * CONTEXT, SLOTS, page_size=2, strict=False)
    driver = Driver(state)
    driver.admit(0, 0, 40)
    driver.run({0: 40})
    state.window.tags[0] -= 1
    step = driver.run({0: 1})
    assert (state.stats.stale_rows, step.num_replay_rows) == (15, 40)
    assert driver.run({0: 1}).num_replay_rows == 0


def test_a_row_of_another_request_is_refused(config: CedConfig) -> None:
    """The same slot and position, written by the slot's previous owner, is stale."""
    driver = Driver(CacheState(config, SLOTS * CONTEXT, SLOTS, page_size=2))
    driver.admit(1, 0, 20)
    driver.run({1: 20})
    step = driver.run({1: 1})
    driver.state.window.tags[0, step.encoder.prior_rows[3]] += 1 << TAG_SHIFT
    with pytest.raises(StaleRowError, match="window ring: 1 stale rows"):
        driver.run({1: 1})


def test_a_pending_half_of_another_request_is_refused(config: CedConfig) -> None:
    driver = Driver(CacheState(config, SLOTS * CONTEXT, SLOTS, page_size=2))
    driver.admit(1, 0, 21)
    driver.run({1: 21})
    driver.state.pending.tags += 1 << TAG_SHIFT
    with pytest.raises(StaleRowError, match="pending pair"):
        driver.run({1: 1})


def test_an_odd_page_is_refused(config: CedConfig) -> None:
    with pytest.raises(ValueError, match="page size 3: must be a multiple of 2"):
        CacheState(config, 96, 2, page_size=3)


def test_outputs_below_the_decoder_rows_are_refused(config: CedConfig) -> None:
    state = CacheState(config, 512, 2, replay="bounded", page_size=2)
    span = Span(0, 1, list(range(100)), 0, 100, 100, output_from=3)
    with pytest.raises(ValueError, match="output_from 3"):
        state.plan([span], torch.arange(1024).view(2, 512))


def test_bytes_of_the_released_model(released_config: dict) -> None:
    layout = CacheLayout(CedConfig.from_dict(released_config))
    assert layout.global_bytes_per_token == 890.0
    assert (layout.global_record.nbytes, layout.index_record.nbytes, layout.window_record.nbytes) == (288, 68, 528)
    plain = CacheLayout(CedConfig.from_dict(released_config), "bfloat16")
    assert plain.global_bytes_per_token == 3200.0
    assert (plain.global_record.nbytes, plain.index_record.nbytes, plain.window_record.nbytes) == (1024, 256, 528)


def test_an_unknown_kv_format_is_named(config: CedConfig) -> None:
    with pytest.raises(ValueError, match="KV format: 'fp8' is not one of published, bfloat16"):
        CacheState(config, 640, 5, kv_format="fp8")


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_pools_have_the_bytes_that_the_layout_promises(config: CedConfig, kv_format: str) -> None:
    state = CacheState(config, 640, 5, page_size=64, kv_format=kv_format)
    assert state.global_kv.nbytes == 640 * state.layout.global_bytes_per_token
    assert state.window.data.nbytes + state.window.tags.nbytes == 5 * state.layout.window_bytes_per_slot
    assert state.pending.data.nbytes + state.pending.tags.nbytes == 5 * state.layout.pending_bytes_per_slot
