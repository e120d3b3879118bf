"""The state of all running requests, and the one decision about it: which rows a span must run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ced.cache.global_kv import GlobalKv
from sglang_ced.cache.layout import PENDING_RING, CacheLayout, KvFormat
from sglang_ced.cache.pending import PendingPairs
from sglang_ced.cache.replay import MODES, Replay, plan_replay
from sglang_ced.cache.stats import ReplayStats
from sglang_ced.cache.step import Placed, Span, Step, StepShape, build_step
from sglang_ced.cache.window import StaleRowError, WindowRing
from sglang_ced.config import CedConfig


@dataclass
class SlotRecord:
    """What the rings hold for a request slot: window rows of positions [low, high) per half, and the request's
    floors."""

    generation: int = -1
    high: int = 0
    encoder_low: int = 0
    decoder_low: int = 0
    encoder_floor: int = 0
    decoder_floor: int = 0


class CacheState:
    """Global KV pool, window ring and pending halves, with the host-side record of each request slot.

    num_kv_slots: token slots of the pool (a multiple of page_size). num_request_slots: rows of the slot table.
    strict: a stale row raises; else it is counted (`stats.stale_rows`) and its request's windows are rebuilt by replay.
    kv_format: how global KV is stored; it changes no bit of what is computed.
    Raises ValueError for an odd page size: both tokens of a pair must share a page.
    """

    def __init__(
        self,
        config: CedConfig,
        num_kv_slots: int,
        num_request_slots: int,
        device: str | torch.device = "cpu",
        replay: Replay = "exact",
        page_size: int = 64,
        strict: bool = True,
        kv_format: KvFormat = "published",
    ) -> None:
        if page_size % config.max_ratio:
            raise ValueError(
                f"page size {page_size}: must be a multiple of {config.max_ratio}, so that no hit splits a pair"
            )
        if replay not in MODES:
            raise ValueError(f"replay: {replay!r} is not one of {', '.join(MODES)}")
        self.config, self.replay, self.page_size, self.strict = config, replay, page_size, strict
        self.layout = CacheLayout(config, kv_format)
        self.global_kv = GlobalKv(self.layout, num_kv_slots, device)
        self.window = WindowRing(self.layout, num_request_slots, device)
        self.pending = PendingPairs(self.layout, num_request_slots, device)
        self.slots = [SlotRecord() for _ in range(num_request_slots)]
        self.stats = ReplayStats()
        self._shape = StepShape(
            window=config.sliding_window,
            ring_capacity=self.layout.ring_capacity,
            pending_ring=PENDING_RING,
            max_ngram=max(1, config.engram_max_ngram_size),
            ratios=tuple(sorted({self.layout.ratio(source) for source in self.layout.sources})),
            device=torch.device(device),
        )

    def plan(self, spans: Sequence[Span], slot_table: Tensor) -> Step:
        """Decide replay rows of every span and lay out the step. slot_table int [request slots, max context].

        Raises StaleRowError if a ring row to be read is not its request's own and the state is strict.
        """
        step = self._build(spans, slot_table)
        try:
            self._check(step)
        except StaleRowError as error:
            if self.strict:
                raise
            self.stats.stale_rows += error.rows
            for span in spans:
                self.slots[span.slot] = SlotRecord()
            step = self._build(spans, slot_table)
            self._check(step)
        return step

    def _build(self, spans: Sequence[Span], slot_table: Tensor) -> Step:
        return build_step([self._place(span) for span in spans], slot_table, self._shape)

    def _check(self, step: Step) -> None:
        self.window.check(0, step.encoder)
        self.window.check(1, step.decoder)
        if step.pairs is not None:
            self.pending.check(step.pairs)

    def commit(self, step: Step) -> None:
        """Note what a finished forward left in the rings."""
        self.window.commit(0, step.encoder)
        self.window.commit(1, step.decoder)
        if step.pairs is not None:
            self.pending.commit(step.pairs)
        self.stats += ReplayStats.of(step, self.config.num_encoder_layers, self.config.num_decoder_layers)
        for placed in step.spans:
            record, end = self.slots[placed.span.slot], placed.span.end
            if placed.fresh:
                record.encoder_low = placed.start
            if placed.fresh or placed.decoder_first > record.high:
                record.decoder_low = placed.decoder_first
            oldest = end - self.layout.ring_capacity
            record.encoder_low = max(record.encoder_low, oldest)
            record.decoder_low = max(record.decoder_low, oldest)
            record.generation, record.high = placed.span.generation, end
            record.encoder_floor, record.decoder_floor = placed.encoder_floor, placed.decoder_floor

    @property
    def ring_occupancy(self) -> float:
        """Part of the ring's rows that hold a window, 0 to 1; a finished request's rows count until its slot is
        reused."""
        held = sum(min(r.high - r.encoder_low, self.layout.ring_capacity) for r in self.slots)
        return held / (len(self.slots) * self.layout.ring_capacity)

    def _place(self, span: Span) -> Placed:
        """Continue from the ring if it holds this request's window, else replay (the rule of
        docs/explanation/replay.md)."""
        record, config = self.slots[span.slot], self.config
        prompt = max(span.prompt_len, span.end)
        outputs = prompt - 1 if span.request_output_from is None else span.request_output_from
        if self._ring_holds(record, span):
            floor = record.decoder_floor
            if self.replay == "bounded" and not span.decode:
                floor = max(floor, min(prompt - config.sliding_window, outputs))
            placed = Placed(span, span.prefix, record.encoder_floor, floor, fresh=False)
        else:
            plan = plan_replay(
                self.replay,
                span.prefix,
                prompt,
                outputs,
                config.sliding_window,
                config.num_encoder_layers,
                config.num_decoder_layers,
            )
            placed = Placed(span, plan.start, plan.start, plan.decoder_start, fresh=True)
        if max(span.output_from, span.prefix) < min(placed.decoder_first, span.end):
            raise ValueError(
                f"output_from {span.output_from}: decoder rows of this request start at {placed.decoder_first}; "
                "say so in request_output_from, from its first chunk on"
            )
        return placed

    def _ring_holds(self, record: SlotRecord, span: Span) -> bool:
        if record.generation != span.generation or record.high < span.prefix:
            return False
        first_needed = span.prefix - self.config.sliding_window + 1
        encoder_ok = record.encoder_low <= max(record.encoder_floor, first_needed)
        return encoder_ok and record.decoder_low <= max(record.decoder_floor, first_needed)
