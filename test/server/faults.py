"""Faults that tests put into a server or an engine, to see that they are noticed. Each patches one place, for good."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ced.cache import state, step
from sglang_ced.cache.layout import CacheLayout
from sglang_ced.cache.replay import ReplayPlan
from sglang_ced.cache.step import HalfPlan, StepShape
from sglang_ced.cache.window import WindowRing
from sglang_ced.kernels import registry
from sglang_ced.kernels.linear import matmul

# -- replay -----------------------------------------------------------------------------------------------------------


def _change_plan(change: Callable[[ReplayPlan, int], ReplayPlan]) -> None:
    original = state.plan_replay

    def plan_replay(mode: Any, hit: int, *rest: Any) -> ReplayPlan:
        return change(original(mode, hit, *rest), hit)

    state.plan_replay = plan_replay


def one_row_short() -> None:
    """Replay begins one row late."""

    def change(plan: ReplayPlan, hit: int) -> ReplayPlan:
        start = min(plan.start + 1, hit)
        return replace(plan, start=start, decoder_start=max(start, plan.decoder_start))

    _change_plan(change)


def no_replay() -> None:
    """After a hit the windows begin empty."""
    _change_plan(lambda plan, hit: replace(plan, start=hit, decoder_start=max(hit, plan.decoder_start)))


# -- window -----------------------------------------------------------------------------------------------------------


def window_short() -> None:
    """Rows see one key less: the oldest one of their window is missing."""

    def shape(**given: Any) -> StepShape:
        return StepShape(**given | {"window": given["window"] - 1})

    state.StepShape = shape  # type: ignore[assignment, misc]


def window_without_newest() -> None:
    """Rows do not see their own key."""
    original = step._HalfBuilder.build

    def build(self: Any, *arguments: Any) -> HalfPlan:
        plan = original(self, *arguments)
        last = (plan.window >= 0).sum(-1, keepdim=True) - 1
        newest = torch.arange(plan.window.shape[-1]) == last
        return replace(plan, window=plan.window.masked_fill(newest, -1))

    step._HalfBuilder.build = build  # type: ignore[method-assign]


def stale_row() -> None:
    """The first row of each ring is written once; later its tags are right and its values are of another token."""
    make, exchange = WindowRing.__init__, WindowRing.exchange

    def init(self: Any, layout: CacheLayout, *rest: Any, **more: Any) -> None:
        make(self, layout, *rest, **more)
        self.capacity = layout.ring_capacity

    def stale(self: Any, layer: int, plan: HalfPlan, kv: Tensor) -> Tensor:
        late = (plan.ring_rows % self.capacity == 0) & (self.data[layer, plan.ring_rows] != 0).any(-1)
        written = replace(plan, kept_rows=plan.kept_rows[~late], ring_rows=plan.ring_rows[~late])
        return exchange(self, layer, written, kv)

    WindowRing.__init__ = init  # type: ignore[method-assign]
    WindowRing.exchange = stale  # type: ignore[method-assign]


# -- selection and routing --------------------------------------------------------------------------------------------


def _wrap_op(name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap whatever version of an op a launch chooses."""
    original = registry.activate

    def activate(*arguments: Any, **more: Any) -> dict[str, str]:
        active = original(*arguments, **more)
        registry.OPS[name]._run = wrap(registry.OPS[name]._run)
        for each in registry.OPS.values():
            if each.joined:  # as a chain of its parts, of which this may be one
                each._run = each.reference
        return active

    registry.activate = activate


def ties_reversed() -> None:
    """Of groups with equal scores, the higher index is picked."""

    def wrap(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def top_groups(scores: Tensor, k: int) -> Tensor:
            groups, ids = scores.shape[-1], run(scores.flip(-1), k)
            ids = torch.where(ids < 0, groups, groups - 1 - ids).sort(-1).values
            return torch.where(ids == groups, -1, ids)

        return top_groups

    _wrap_op("indexer.top_groups", wrap)


def router_bias_weighs() -> None:
    """The router's balancing bias enters the weights of the experts, not their choice alone."""

    def wrap(run: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def route(
            x: Tensor, weight: Tensor, bias: Tensor, top_k: int, scale: float, temperature: float = 1.0
        ) -> tuple[Tensor, Tensor]:
            chosen, _ = run(x, weight, bias, top_k, scale, temperature)
            scores = F.softplus(matmul(x, weight).double() / temperature).sqrt().float() + bias
            weights = scores.gather(-1, chosen)
            return chosen, weights / weights.sum(-1, keepdim=True) * scale

        return route

    _wrap_op("moe.route", wrap)


FAULTS: dict[str, Callable[[], None]] = {
    each.__name__: each
    for each in (
        *(one_row_short, no_replay),
        *(window_short, window_without_newest, stale_row),
        *(ties_reversed, router_bias_weighs),
    )
}
