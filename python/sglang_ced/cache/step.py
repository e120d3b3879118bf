"""`Step`: a flat table of rows. Prefill, chunks, mixed batches, decode and verification are all just different
Steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
ToTensor = Callable[[Ints], Tensor]
TAG_SHIFT = 32  # tag of a ring row: generation << 32 | position


@dataclass(frozen=True)
class Span:
    """One request's new rows in this forward: positions [prefix, end).

    slot, generation: request slot and how often it has been handed out. token_ids: the request's own list, from
    position 0 to at least `end`. prefix: tokens whose global KV is in the pool. prompt_len: where the prompt ends
    (later rows are generated ones). output_from: first position whose hidden state is returned (rows before the span
    never are). request_output_from: the same over all chunks of the prompt; None = its last row only. Bounded replay
    needs it in the first chunk.
    """

    slot: int
    generation: int
    token_ids: Sequence[int]
    prefix: int
    end: int
    prompt_len: int
    output_from: int
    decode: bool = False
    request_output_from: int | None = None


@dataclass(frozen=True)
class Placed:
    """A span with the plan's decision: rows [start, end) run, those below the span's prefix as replay rows.

    fresh: the rings hold nothing of this request that the step may read.
    """

    span: Span
    start: int
    encoder_floor: int
    decoder_floor: int
    fresh: bool

    @property
    def decoder_first(self) -> int:
        return max(self.start, self.decoder_floor)


@dataclass(frozen=True)
class HalfPlan:
    """Window traffic of the encoder or the decoder half. M = prior rows + rows of the half.

    rows: which rows of the step run here. window: int64 [rows, W] into the M window rows, ascending, -1 at the end.
    prior_rows/tags: ring rows read, and the tags they must carry. kept_rows: rows of the half that stay in the ring, at
    ring_rows with ring_tags.
    """

    rows: Tensor
    window: Tensor
    prior_rows: Tensor
    prior_tags: Tensor
    kept_rows: Tensor
    ring_rows: Tensor
    ring_tags: Tensor

    @property
    def num_window_rows(self) -> int:
        return len(self.prior_rows) + len(self.rows)


@dataclass(frozen=True)
class PairPlan:
    """Pairs of ratio-2 sources completed in this step.

    first/second: rows into (prior halves, then the step's rows). groups: pool rows written; positions: of each
    pair's first token. prior_rows/tags: pending rows read; kept_rows: the step's rows kept as pending, at ring_rows
    with ring_tags.
    """

    first: Tensor
    second: Tensor
    groups: Tensor
    positions: Tensor
    prior_rows: Tensor
    prior_tags: Tensor
    kept_rows: Tensor
    ring_rows: Tensor
    ring_tags: Tensor


@dataclass(frozen=True)
class Reach:
    """What one span's rows of a half may select from: rows [first, last) of the half, and per ratio the pool rows of
    every group of the request up to the span's end, oldest first."""

    first: int
    last: int
    groups: dict[int, Tensor]


@dataclass(frozen=True)
class Step:
    """Rows of one forward, grouped by span, positions ascending within a span.

    token_ids, positions int64 [N]; history int64 [N, max_ngram]: ids of each row's token and its predecessors,
    newest first, -1 before the text; new_rows int64: rows that write global KV; new_slots int64: their KV slots.
    output_rows: rows of the decoder half whose hidden states are returned.
    """

    spans: tuple[Placed, ...]
    token_ids: Tensor
    positions: Tensor
    history: Tensor
    new_rows: Tensor
    new_slots: Tensor
    encoder: HalfPlan
    decoder: HalfPlan
    pairs: PairPlan | None
    encoder_reach: tuple[Reach, ...]
    decoder_reach: tuple[Reach, ...]
    output_rows: Tensor

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_replay_rows(self) -> int:
        return self.num_rows - len(self.new_rows)


@dataclass(frozen=True)
class StepShape:
    """The constants a step is built with."""

    window: int
    ring_capacity: int
    pending_ring: int
    max_ngram: int
    ratios: tuple[int, ...]
    device: torch.device


def build_step(placed: Sequence[Placed], slot_table: Tensor, shape: StepShape) -> Step:
    """Lay out the rows of all spans. slot_table int [request slots, max context]: KV slot of every position."""
    starts = np.array([p.start for p in placed], dtype=np.int64)
    ends = np.array([p.span.end for p in placed], dtype=np.int64)
    prefixes = np.array([p.span.prefix for p in placed], dtype=np.int64)
    owner, positions = _ranges(starts, ends)
    new = positions >= prefixes[owner]
    slots = np.array([p.span.slot for p in placed], dtype=np.int64)

    def to(array: Ints) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(shape.device)

    new_slots = slot_table[to(slots[owner[new]]), to(positions[new])].to(torch.int64)
    encoder_floors = np.array([p.encoder_floor for p in placed], dtype=np.int64)
    decoder_floors = np.array([p.decoder_floor for p in placed], dtype=np.int64)
    bases = np.array([p.span.generation << TAG_SHIFT for p in placed], dtype=np.int64)
    in_decoder = positions >= decoder_floors[owner]
    histories = [ngram_history(p.span.token_ids, p.start, p.span.end, shape.max_ngram) for p in placed]
    history = np.concatenate(histories) if histories else np.empty((0, shape.max_ngram), np.int64)
    encoder_rows, decoder_rows = np.arange(len(positions)), np.flatnonzero(in_decoder)
    half = _HalfBuilder(owner, positions, slots, bases, shape, to)
    groups = [_group_slots(p, slot_table, shape.ratios) for p in placed]
    outputs = np.maximum(np.array([p.span.output_from for p in placed], dtype=np.int64), prefixes)
    wanted = positions[decoder_rows] >= outputs[owner[decoder_rows]]
    return Step(
        spans=tuple(placed),
        token_ids=to(history[:, 0]),
        positions=to(positions),
        history=to(history),
        new_rows=to(np.flatnonzero(new)),
        new_slots=new_slots,
        encoder=half.build(encoder_rows, encoder_floors),
        decoder=half.build(decoder_rows, decoder_floors),
        pairs=_pairs(owner, positions, new, slots, bases, new_slots, shape, to) if 2 in shape.ratios else None,
        encoder_reach=_reach(owner[encoder_rows], groups),
        decoder_reach=_reach(owner[decoder_rows], groups),
        output_rows=to(np.flatnonzero(wanted)),
    )


def _ranges(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Concatenated ranges [start, end): (which range, value) per element."""
    lengths = ends - starts
    owner = np.repeat(np.arange(len(starts)), lengths)
    offset = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return owner, starts[owner] + offset


def ngram_history(token_ids: Sequence[int], start: int, end: int, depth: int) -> Ints:
    """Of positions [start, end): the token's id and its predecessors', [end - start, depth], newest first, -1 before
    the text."""
    out = np.full((end - start, depth), -1, dtype=np.int64)
    low = max(0, start - depth + 1)
    ids = np.asarray(token_ids[low:end], dtype=np.int64)
    for back in range(depth):
        have = end - max(start, back)
        if have > 0:
            last = end - back - low
            out[end - start - have :, back] = ids[last - have : last]
    return out


def _group_slots(p: Placed, slot_table: Tensor, ratios: Sequence[int]) -> dict[int, Tensor]:
    slots = slot_table[p.span.slot, : p.span.end]
    return {r: slots[: p.span.end // r * r : r].to(torch.int64) // r for r in ratios}


def _reach(owner: Ints, groups: Sequence[dict[int, Tensor]]) -> tuple[Reach, ...]:
    edges = np.searchsorted(owner, np.arange(len(groups) + 1))
    return tuple(
        Reach(int(edges[i]), int(edges[i + 1]), groups[i]) for i in range(len(groups)) if edges[i + 1] > edges[i]
    )


class _HalfBuilder:
    """Builds the window plan of the rows of one half."""

    def __init__(self, owner: Ints, positions: Ints, slots: Ints, bases: Ints, shape: StepShape, to: ToTensor) -> None:
        self.owner, self.positions, self.slots, self.bases = owner, positions, slots, bases
        self.shape, self.to = shape, to

    def build(self, rows: Ints, floors: Ints) -> HalfPlan:
        """rows: rows of the step in this half; floors [spans]: lowest position whose window row may be read."""
        to, window, capacity = self.to, self.shape.window, self.shape.ring_capacity
        owner, positions = self.owner[rows], self.positions[rows]
        spans = len(floors)
        edges = np.searchsorted(owner, np.arange(spans + 1))
        present = edges[1:] > edges[:-1]
        first = np.where(present, positions[np.minimum(edges[:-1], max(len(positions) - 1, 0))] if len(rows) else 0, 0)
        low = np.where(present, np.maximum(floors, first - window + 1), 0)
        low = np.minimum(low, first)
        prior_owner, prior_positions = _ranges(low, first)
        prior_base = np.cumsum(first - low) - (first - low)

        begin = np.maximum(floors[owner], positions - window + 1)
        wanted = begin[:, None] + np.arange(window)
        inside = wanted - first[owner][:, None]
        index = np.where(
            inside >= 0,
            len(prior_positions) + edges[:-1][owner][:, None] + inside,
            (prior_base - low)[owner][:, None] + wanted,
        )
        index = np.where(wanted <= positions[:, None], index, -1)

        ends = np.where(present, first + edges[1:] - edges[:-1], 0)
        kept = np.flatnonzero(positions >= ends[owner] - capacity)
        return HalfPlan(
            rows=to(rows),
            window=to(index),
            prior_rows=to(self._ring(prior_owner, prior_positions, capacity)),
            prior_tags=to(self.bases[prior_owner] | prior_positions),
            kept_rows=to(kept),
            ring_rows=to(self._ring(owner[kept], positions[kept], capacity)),
            ring_tags=to(self.bases[owner[kept]] | positions[kept]),
        )

    def _ring(self, owner: Ints, positions: Ints, capacity: int) -> Ints:
        return self.slots[owner] * capacity + positions % capacity


def _pairs(
    owner: Ints,
    positions: Ints,
    new: npt.NDArray[np.bool_],
    slots: Ints,
    bases: Ints,
    new_slots: Tensor,
    shape: StepShape,
    to: ToTensor,
) -> PairPlan:
    """Pairs whose second token is a new row; its first token is the row before, or a pending half."""
    second = np.flatnonzero(new & (positions % 2 == 1))
    here = (second > 0) & (owner[second - 1] == owner[second]) & (positions[second - 1] == positions[second] - 1)
    missing = second[~here]
    ring = shape.pending_ring
    prior_positions = positions[missing] - 1
    first = len(missing) + second - 1
    first[~here] = np.arange(len(missing))
    ends = np.zeros(len(slots), dtype=np.int64)
    np.maximum.at(ends, owner, positions + 1)
    kept = np.flatnonzero((positions % 2 == 0) & (positions >= ends[owner] - ring))
    order = np.cumsum(new) - 1
    return PairPlan(
        first=to(first),
        second=to(len(missing) + second),
        groups=new_slots[to(order[second])] // 2,
        positions=to(positions[second] - 1),
        prior_rows=to(slots[owner[missing]] * ring + prior_positions % ring),
        prior_tags=to(bases[owner[missing]] | prior_positions),
        kept_rows=to(kept),
        ring_rows=to(slots[owner[kept]] * ring + positions[kept] % ring),
        ring_tags=to(bases[owner[kept]] | positions[kept]),
    )
