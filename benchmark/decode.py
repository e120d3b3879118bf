"""Decode steps of the offline engine, timed one by one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from sglang_ced.engine.offline import OfflineEngine, Request

P = ParamSpec("P")
R = TypeVar("R")


def prompt(length: int, seed: int) -> list[int]:
    """Random ids of readable tokens."""
    return random.Random(seed).choices(range(3, 250), k=length)


class DecodeTimes:
    """Times of single steps of one request: whole, and the part within the model."""

    def __init__(self, engine: OfflineEngine) -> None:
        self.engine, self.inside = engine, 0.0
        self.draw = random.Random(0)
        model = engine.model
        model.forward = self._timed(model.forward)  # type: ignore[method-assign]
        model.logits = self._timed(model.logits)  # type: ignore[method-assign]

    def _timed(self, function: Callable[P, R]) -> Callable[P, R]:
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.inside += time.perf_counter() - start

        return run

    def step(self, request: Request) -> tuple[float, float]:
        """One more token, drawn at random, so that the experts it takes differ from step to step."""
        request.tokens.append(self.draw.randrange(3, 250))
        self.inside, start = 0.0, time.perf_counter()
        self.engine.step([(request, 1)])
        return time.perf_counter() - start, self.inside
