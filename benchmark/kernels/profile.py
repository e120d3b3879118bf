"""Where a decode step and a long prefill of ced-bench spend their time, by family of ops.

    python -m benchmark.kernels.profile            writes benchmark/results/profile.json
    python -m benchmark.kernels.profile --quick    8 layers and short prompts; prints only

Every op of the registry is timed from outside, the outermost one counts. A decode step is the mean of some; the
references run one. The fast kernels prefill the whole prompt. The references would take hours: they run one chunk in
the middle of it, whose rows stop at the decoder, and the last chunk, whose rows go through, on caches that the fast
kernels have filled; the whole is the first times the chunks like it plus the second times the chunks like it.
"""

from __future__ import annotations

import os

# Before torch starts OpenMP: threads wait as they do by default. Asleep between ops, they wake too late for any engine.
os.environ.pop("OMP_WAIT_POLICY", None)

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from benchmark.decode import prompt
from benchmark.measure import commit, machine, require_current_kernels, save
from benchmark.shape.ced_bench import checkpoint_dir

from sglang_ced.engine.offline import OfflineEngine, Request
from sglang_ced.kernels import registry

# First match decides: a name of the registry, or how it begins.
FAMILIES = {
    "attention.": "attention",
    "indexer.": "choice of groups",
    "records.round_index": "choice of groups",
    "records.": "cache records",
    "compressor.": "compressor",
    "moe.route": "router",
    "moe.": "experts",
    "linear.": "projections and head",
    "projection.": "projections and head",
    "mhc.": "hyper-connections",
    "engram.": "n-gram memory",
    "norm.": "norms",
    "rope.": "rotation",
}
PLANNING, BETWEEN = "planning of the step", "torch between ops"
CHUNK = 2048


def family_of(op: str) -> str:
    return next(family for begin, family in FAMILIES.items() if op.startswith(begin))


@dataclass
class Clock:
    """Seconds by family over any number of steps."""

    families: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    depth: int = 0

    def timed(self, family: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, counted for `family` unless another counted one is running."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.families[family] += time.perf_counter() - start

        return run

    def total(self) -> float:
        return sum(self.families.values())


@contextmanager
def profiled(engine: OfflineEngine, mode: str) -> Iterator[Clock]:
    """Time all ops of a block, run by kernels of `mode`; what is in no op is counted at the end."""
    clock, plan = Clock(), engine.state.plan
    registry.activate(mode)
    for name, op in registry.OPS.items():
        op._run = clock.timed(family_of(name), op._run)
    engine.state.plan = clock.timed(PLANNING, plan)  # type: ignore[method-assign]
    start = time.perf_counter()
    try:
        yield clock
    finally:
        clock.families[BETWEEN] = time.perf_counter() - start - clock.total()
        engine.state.plan = plan  # type: ignore[method-assign]
        registry.activate("auto")


def decode(engine: OfflineEngine, context: int, steps: int, mode: str) -> dict[str, float]:
    """Mean seconds by family of a decode step of one request with `context` tokens."""
    request, drawn = engine.start(prompt(context, 1)), prompt(steps + 1, 2)
    engine.prefill(request, [CHUNK])
    request.tokens.append(drawn.pop())
    engine.step([(request, 1)])
    with profiled(engine, mode) as clock:
        for token in drawn:
            request.tokens.append(token)
            engine.step([(request, 1)])
    engine.finish(request)
    return {name: each / steps for name, each in clock.families.items()}


def prefill(engine: OfflineEngine, length: int) -> tuple[dict[str, float], Request]:
    """Seconds by family of a prompt of `length` tokens in chunks, by the fast kernels; and its request, unfinished."""
    request = engine.start(prompt(length, 3))
    with profiled(engine, "auto") as clock:
        engine.prefill(request, [CHUNK])
    return dict(clock.families), request


def reference_prefill(engine: OfflineEngine, computed: Request, chunk: int) -> dict[str, float]:
    """The same by the references, from two chunks of `chunk` rows: one in the middle, and the last."""
    length = computed.prompt_len
    middle = _reference_chunk(engine, computed, length // 2, chunk)
    last = _reference_chunk(engine, computed, length, chunk)
    whole = -(-engine.config.sliding_window // chunk)
    like_middle = length // chunk - whole
    return {name: like_middle * middle.get(name, 0.0) + whole * last.get(name, 0.0) for name in middle | last}


def _reference_chunk(engine: OfflineEngine, computed: Request, end: int, chunk: int) -> dict[str, float]:
    """Seconds by family of the rows [end - chunk, end) of a prompt, on the caches of the request that computed it.

    The rows before are a hit. The fast kernels run the first rows after it, and with them what is replayed.
    """
    hit = (end - 2 * chunk) // engine.page_size * engine.page_size
    request = engine.start(computed.tokens[: computed.prompt_len], prefix_of=computed, hit=hit)
    engine.step([(request, end - chunk - hit)])
    times = _chunk(engine, request, chunk)
    engine.finish(request)
    return times


def _chunk(engine: OfflineEngine, request: Request, rows: int) -> dict[str, float]:
    with profiled(engine, "reference") as clock:
        engine.step([(request, rows)])
    return dict(clock.families)


def print_table(title: str, before: dict[str, float], after: dict[str, float], unit: str) -> None:
    factor, whole = {"ms": 1e3, "s": 1.0}[unit], sum(after.values())
    print(f"\n{title}\n  {'':<24} {'references':>16} {'fast':>16} {'share of fast':>14}")
    rows = [(name, before[name], after[name]) for name in sorted(after, key=lambda key: -after[key])]
    for name, slow, fast in [*rows, ("whole", sum(before.values()), whole)]:
        slow, fast = factor * slow, factor * fast
        print(f"  {name:<24} {slow:>13.2f} {unit:<2} {fast:>13.3f} {unit:<2} {fast / whole / factor:>13.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", default=os.environ.get("QUICK") == "1")
    quick = parser.parse_args().quick
    require_current_kernels()
    context, length, chunk, steps = (256, 512, 32, 8) if quick else (512, 8192, 64, 32)
    with torch.inference_mode():
        engine = OfflineEngine.from_pretrained(
            checkpoint_dir(quick), max_requests=2, max_tokens=length + 1024, replay="bounded", kernels="auto"
        )
        after, request = prefill(engine, length)
        result: dict[str, Any] = {
            "decode": {
                "before": decode(engine, context, 1, "reference"),
                "after": decode(engine, context, steps, "auto"),
            },
            "prefill": {"before": reference_prefill(engine, request, chunk), "after": after},
        }
    print_table(f"decode step, context {context}", **result["decode"], unit="ms")
    print_table(f"prefill of {length} tokens (references: from chunks of {chunk})", **result["prefill"], unit="s")
    result |= {"context": context, "length": length, "reference_chunk": chunk, "steps": steps, "chunk": CHUNK}
    result |= {"machine": machine(), "commit": commit(), "layers": engine.config.num_hidden_layers}
    if not quick:
        save("profile.json", result)


if __name__ == "__main__":
    main()
