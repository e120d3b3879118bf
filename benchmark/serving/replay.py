"""What bounded replay buys, measured in one run: `make bench-replay`. The last line printed is one JSON object.

The model has the released 40-layer schedule (window 128, sources, reindexing, candidates, Engram) in small widths
with random weights. The full run replaces benchmark/results/replay.json. QUICK=1 uses prompts an eighth as long, takes
under a minute, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from benchmark.measure import commit, machine, print_change, require_current_kernels, save

from sglang_ced.cache.layout import CacheLayout
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.checkpoint.writer import write_random_checkpoint
from sglang_ced.cli.models import bundled_path
from sglang_ced.config import CedConfig
from sglang_ced.engine.offline import OfflineEngine

CONFIG = Path(__file__).with_name("bench40.json")
GOLDEN = Path(__file__).parents[2] / "test" / "golden" / "data"
RESULT = "replay.json"
HEADLINES = ["cold_8k_x", "hit_vs_cold_x", "hit_vs_exact_x", "hits_8_over_1", "decode_kept_under_prefill"]
PAGE, NEW, MIXED_CHUNK, DECODE_BATCH, HITS = 64, 64, 16, 4, 8


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Bench:
    """Engines of both modes over one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, scale: int) -> None:
        self.checkpoint, self.scale = checkpoint, scale

    def engine(self, replay: str, tokens: int, requests: int = 2) -> OfflineEngine:
        engine = OfflineEngine(
            self.checkpoint,
            max_requests=requests,
            max_tokens=tokens + 2 * PAGE * requests,
            page_size=PAGE,
            replay=replay,
        )
        engine.generate([ids(40, 99)], 2, stop=[])  # first-call costs
        return engine

    def cold(self, length: int, replay: str) -> float:
        """Time to the first token of a cold prompt."""
        engine = self.engine(replay, length)
        request = engine.start(ids(length, 0))
        return seconds(lambda: engine.prefill(request, [2048]))

    def hit(self, length: int, replay: str, together: int = 1) -> float:
        """Time to the first token of `together` requests in one forward, each a hit of `length` plus NEW tokens."""
        engine = self.engine(replay, length + (together + 1) * (NEW + PAGE), together + 1)
        prompt = ids(length, 0)
        first = engine.start(prompt)
        engine.prefill(first, [2048])
        requests = [
            engine.start(prompt + ids(NEW, seed), prefix_of=first, hit=length) for seed in range(1, together + 1)
        ]
        return seconds(lambda: engine.step([(request, NEW) for request in requests]))

    def decode_kept(self, length: int) -> float:
        """Decode rate of DECODE_BATCH requests while a prompt is prefilled beside them, over their rate alone."""
        engine = self.engine("bounded", length + DECODE_BATCH * 2048, DECODE_BATCH + 1)
        running = [engine.start(ids(300 + 20 * i, i)) for i in range(DECODE_BATCH)]
        for request in running:
            engine.prefill(request)

        def step(extra: list[tuple[Any, int]]) -> float:
            for request in running:
                request.tokens.append(7)
            return seconds(lambda: engine.step([*((request, 1) for request in running), *extra]))

        alone = [step([]) for _ in range(24)]
        prompt, mixed = engine.start(ids(length, 50)), []
        while not prompt.prompt_done and len(mixed) < 1024:
            mixed.append(step([(prompt, min(MIXED_CHUNK, prompt.prompt_len - prompt.computed))]))
        alone += [step([]) for _ in range(24)]
        return statistics.median(alone) / statistics.mean(mixed)


def bytes_of(config: CedConfig) -> dict[str, float]:
    """Cache bytes per token with and without window KV kept, and the tokens that fit in 1 GiB."""
    layout = CacheLayout(config)
    without = layout.global_bytes_per_token
    stored = without + config.num_hidden_layers * layout.window_record.nbytes
    return {
        "bytes_per_token": without,
        "bytes_per_token_with_windows": stored,
        "tokens_in_1_gib": int(2**30 / without),
        "tokens_in_1_gib_with_windows": int(2**30 / stored),
    }


def measure(bench: Bench) -> dict[str, Any]:
    short, long, prefill = 4096 // bench.scale, 8192 // bench.scale, 16384 // bench.scale
    out: dict[str, Any] = {"lengths": [short, long, prefill]}
    for name, length in (("cold_4k_x", short), ("cold_8k_x", long)):
        off, on = bench.cold(length, "exact"), bench.cold(length, "bounded")
        out[name] = round(off / on, 3)
        print(
            f"cold prompt of {length:>5}: first token {off:7.2f} s exact, {on:7.2f} s bounded   {off / on:5.2f}x",
            flush=True,
        )
    one, exact = bench.hit(long, "bounded"), bench.hit(long, "exact")
    eight = bench.hit(long, "bounded", HITS)
    out["hit_vs_cold_x"] = round(on / one, 3)
    out["hit_vs_exact_x"] = round(exact / one, 3)
    out["hits_8_over_1"] = round(eight / one, 3)
    print(f"hit of {long} + {NEW} new: {one:.3f} s bounded, {exact:.3f} s exact; {on / one:.1f}x faster than cold")
    print(f"{HITS} such hits in one forward: {eight:.3f} s, {eight / one:.2f}x of one", flush=True)
    out["decode_kept_under_prefill"] = round(bench.decode_kept(prefill), 3)
    print(
        f"{DECODE_BATCH} running requests keep {out['decode_kept_under_prefill']:.0%} of their rate "
        f"beside a prompt of {prefill} in chunks of {MIXED_CHUNK}"
    )
    return out


def difference(model: Path, prompts: int = 16) -> dict[str, float]:
    """Bounded against exact on one checkpoint: KL of the next-token distribution (nats) and top-1 agreement."""
    checkpoint = Checkpoint.open(model)
    window, out = checkpoint.config.sliding_window, {}
    for name, hit in (("cold", 0), ("hit", 4 * window)):
        rows = {}
        for replay in ("exact", "bounded"):
            engine, rows[replay] = OfflineEngine(checkpoint, page_size=2, max_tokens=16384, replay=replay), []
            for seed in range(prompts):
                prompt = ids(6 * window, seed)
                first = engine.start(prompt)
                engine.step([(first, max(hit, 1))])
                request = engine.start(prompt, prefix_of=first, hit=hit)
                rows[replay].append(engine.prefill(request)[-1])
                engine.finish(first)
                engine.finish(request)
        exact, bounded = (torch.stack(rows[replay]) for replay in ("exact", "bounded"))
        log_exact, log_bounded = exact.double().log_softmax(-1), bounded.double().log_softmax(-1)
        out[f"kl_{name}"] = round(float((log_exact.exp() * (log_exact - log_bounded)).sum(-1).mean()), 4)
        out[f"top1_{name}"] = float((exact.argmax(-1) == bounded.argmax(-1)).float().mean())
    return out


def bound(config: CedConfig, length: int) -> float:
    """Largest possible ratio for a cold prompt if every layer costs the same per row.

    Decoder layers score twice as many groups as encoder layers do, so a measured ratio may lie above it.
    """
    encoder, decoder, window = config.num_encoder_layers, config.num_decoder_layers, config.sliding_window
    return length * (encoder + decoder) / (length * encoder + min(window, length) * decoder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", default=os.environ.get("QUICK") == "1")
    args = parser.parse_args()
    require_current_kernels()
    raw = json.loads(CONFIG.read_text())
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "model"
        write_random_checkpoint(model, raw, seed=0, tokenizer_from=bundled_path("ced-toy"))
        bench = Bench(Checkpoint.open(model), scale=8 if args.quick else 1)
        out = measure(bench)
    for name in ("toy8", "toy8_bf16"):
        out[name] = difference(GOLDEN / name / "model")
        print(f"bounded against exact, random weights {name}: {out[name]}", flush=True)
    config = bench.checkpoint.config
    out |= bytes_of(config)
    print(
        f"cache per token: {out['bytes_per_token']} bytes, {out['tokens_in_1_gib']:,} tokens in 1 GiB; "
        f"with window KV kept: {out['bytes_per_token_with_windows']}, {out['tokens_in_1_gib_with_windows']:,}"
    )
    out["cold_8k_bound_x"] = round(bound(config, out["lengths"][1]), 3)
    out |= {"machine": machine(), "commit": commit(), "quick": args.quick}
    if not args.quick:
        print_change(RESULT, out, HEADLINES)
        save(RESULT, out)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
