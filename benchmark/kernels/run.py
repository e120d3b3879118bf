"""What the CPU kernels buy, measured in one run: `make bench-kernels`. The last line printed is one JSON object.

    QUICK=1    8 layers instead of 40 and shorter lists, under a minute; not comparable with the full run

Compared are the offline engine with its fast kernels and with the references (CED_KERNELS=reference), a decode step
and the bandwidth of the machine, and single ops with plain torch. The full run replaces benchmark/results/kernels.json.
"""

from __future__ import annotations

import os

# Before torch starts OpenMP: threads wait as they do by default. Asleep between ops, they wake too late for any engine.
os.environ.pop("OMP_WAIT_POLICY", None)

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmark.decode import DecodeTimes, prompt
from benchmark.kernels import micro
from benchmark.kernels.bound import decode_bytes
from benchmark.kernels.load import load_figures
from benchmark.measure import commit, machine, print_change, read_bandwidth, require_current_kernels, save, seconds
from benchmark.shape.ced_bench import checkpoint_dir

from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.kernels import registry

HEADLINES = [
    "decode_x_reference",
    "prefill_x_reference",
    "decode_bound_share",
    "index_512k_x",
    "index_8k_x",
    "mhc_x",
    "gate_x",
    "attention_fp4_x",
]


@dataclass(frozen=True)
class Size:
    """How much is measured. prefill: tokens of the prompt that fast and reference kernels both run."""

    context: int
    prefill: int
    steps: int
    reference_steps: int
    long_index: int
    pool: int
    budget: float


FULL = Size(context=512, prefill=64, steps=32, reference_steps=1, long_index=1 << 19, pool=1 << 17, budget=2.0)
QUICK = Size(context=256, prefill=32, steps=16, reference_steps=1, long_index=1 << 16, pool=1 << 15, budget=0.5)


@contextmanager
def kernels(mode: str) -> Iterator[None]:
    """Run a block with other kernels. Both sorts give the same bits, so they may take turns on one request."""
    registry.activate(mode)
    try:
        yield
    finally:
        registry.activate("auto")


def end_to_end(path: Path, size: Size) -> tuple[dict[str, Any], OfflineEngine]:
    engine = OfflineEngine.from_pretrained(
        path, max_requests=4, max_tokens=4 * (size.context + 128), replay="bounded", kernels="auto"
    )
    request = engine.start(prompt(size.context, 0))
    engine.prefill(request)
    timer = DecodeTimes(engine)
    fast = [timer.step(request) for _ in range(size.steps // 2)]
    slow = []
    for _ in range(size.reference_steps):
        with kernels("reference"):
            slow.append(timer.step(request)[0])
        fast += [timer.step(request) for _ in range(size.steps // 2)]
    whole, inside = (statistics.median(each) for each in zip(*fast, strict=True))
    prefill = [seconds(lambda: _prefill(engine, size.prefill)) for _ in range(3)]
    with kernels("reference"):
        slow_prefill = seconds(lambda: _prefill(engine, size.prefill))
    out = {
        "decode_x_reference": statistics.median(slow) / whole,
        "prefill_x_reference": slow_prefill / statistics.median(prefill),
        "decode_step_ms": 1e3 * inside,
        "decode_planning_ms": 1e3 * (whole - inside),
        "reference_step_ms": 1e3 * statistics.median(slow),
        "prefill_tokens_per_s": size.prefill / statistics.median(prefill),
        "reference_prefill_tokens_per_s": size.prefill / slow_prefill,
    }
    return out, engine


def _prefill(engine: OfflineEngine, length: int) -> None:
    request = engine.start(prompt(length, 1))
    engine.prefill(request)
    engine.finish(request)


def bound(path: Path, engine: OfflineEngine, size: Size, step_ms: float) -> dict[str, Any]:
    need, rate = decode_bytes(path, engine.config, size.context + size.steps // 2), read_bandwidth()
    return {
        "decode_bound_share": sum(need.values()) / rate / (step_ms / 1e3),
        "decode_weight_bytes": need["weights"],
        "decode_cache_bytes": need["cache"],
        "read_gb_per_s": rate / 1e9,
    }


def single_ops(engine: OfflineEngine, size: Size) -> dict[str, Any]:
    config = engine.config
    long, short = (micro.index_ratios(engine.model, groups, size.budget) for groups in (size.long_index, 8192))
    mhc, gate = micro.mhc_ratios(config, size.budget / 2), micro.gate_ratios(config, size.budget / 2)
    return {
        "index_512k_x": long["packed"],
        "index_512k_x_float_keys": long["float"],
        "index_8k_x": short["packed"],
        "index_8k_x_float_keys": short["float"],
        "mhc_x": mhc["1"],
        "mhc_x_by_rows": mhc,
        "gate_x": gate["1"],
        "gate_x_by_rows": gate,
        "attention_fp4_x": micro.attention_ratio(config, size.pool, size.budget),
    }


def table(r: dict[str, Any], size: Size, layers: int) -> str:
    rows = [
        ("decode step, references over fast kernels", f"{r['decode_x_reference']:.1f}x"),
        ("   fast: in the model", f"{r['decode_step_ms']:.1f} ms"),
        ("   fast: planning the step", f"{r['decode_planning_ms']:.2f} ms"),
        (f"   references ({size.reference_steps} step)", f"{r['reference_step_ms']:.0f} ms"),
        (f"prefill of {size.prefill} tokens, references over fast kernels", f"{r['prefill_x_reference']:.1f}x"),
        ("   fast", f"{r['prefill_tokens_per_s']:.1f} tokens/s"),
        ("   references (one prompt)", f"{r['reference_prefill_tokens_per_s']:.2f} tokens/s"),
        ("decode step, share of the bandwidth bound", f"{r['decode_bound_share']:.1%}"),
        ("   bytes it must read: weights", f"{r['decode_weight_bytes'] / 1e6:.0f} MB"),
        ("   bytes it must read: cache", f"{r['decode_cache_bytes'] / 1e6:.1f} MB"),
        ("   streaming read", f"{r['read_gb_per_s']:.1f} GB/s"),
        (f"choice of groups at {size.long_index >> 10}K, plain torch over ours", f"{r['index_512k_x']:.1f}x"),
        ("   plain torch on keys unpacked to float32 before", f"{r['index_512k_x_float_keys']:.1f}x"),
        ("choice of groups at 8K", f"{r['index_8k_x']:.1f}x"),
        ("   plain torch on keys unpacked to float32 before", f"{r['index_8k_x_float_keys']:.1f}x"),
        *((f"hyper-connection site, {n} rows", f"{x:.1f}x") for n, x in r["mhc_x_by_rows"].items()),
        *((f"router, {n} rows", f"{x:.1f}x") for n, x in r["gate_x_by_rows"].items()),
        (f"attention of one row, pool of {size.pool >> 10}K: bfloat16 over fp4", f"{r['attention_fp4_x']:.2f}x"),
    ]
    load = r["load"]
    rows += [
        ("decode step, threads that sleep while they wait over the default", f"{r['passive_wait_x']:.2f}x"),
        ("loading, file in the page cache", f"{load['load_seconds']:.2f} s"),
        ("peak memory over checkpoint", f"{load['peak_over_checkpoint']:.2f}x"),
        ("   less what Python and torch take", f"{load['peak_less_import_over_checkpoint']:.2f}x"),
        ("   of it memory that is not a file's", f"{load['own_bytes'] / 1e6:.0f} MB"),
    ]
    head = f"ced-bench, {layers} layers, context {size.context}, batch 1, {r['machine']}, commit {r['commit']}"
    return "\n".join((head, *(f"  {name:<64} {value:>14}" for name, value in rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", default=os.environ.get("QUICK") == "1")
    quick = parser.parse_args().quick
    size = QUICK if quick else FULL
    require_current_kernels()
    torch.manual_seed(0)
    path = checkpoint_dir(quick)
    load, asleep = load_figures(path), load_figures(path, OMP_WAIT_POLICY="PASSIVE")
    with torch.inference_mode():
        result, engine = end_to_end(path, size)
        result |= bound(path, engine, size, result["decode_step_ms"])
        result |= single_ops(engine, size)
    result |= {"context": size.context, "prefill": size.prefill, "layers": engine.config.num_hidden_layers}
    result |= {
        "load": load,
        "passive_wait_x": asleep["step_ms"] / load["step_ms"],
        "machine": machine(),
        "commit": commit(),
        "quick": quick,
    }
    if quick:
        print(f"QUICK: {result['layers']} layers, `512k` stands for {size.long_index >> 10}K groups")
    print(table(result, size, result["layers"]))
    if not quick:
        print_change("kernels.json", result, HEADLINES)
        save("kernels.json", result)
    line = {name: round(result[name], 3) for name in HEADLINES}
    print(json.dumps(line | {name: result[name] for name in ("machine", "commit", "quick")}))


if __name__ == "__main__":
    main()
