"""Two other CPU engines beside ours, in one run: `make bench-peers`. The last line printed is one JSON object.

    QUICK=1               8 layers, short prompts; its figures are not comparable with the full run's
    --points 512x1,2048x1 only these prompt lengths and batch sizes of the comparison with ftllm

ftllm serves this model family on a CPU and gets the same checkpoint, lengths and threads; ours runs as a server.
llama.cpp does not know the model: it runs a mixture of experts of like active bytes, and what is compared is the share
of the bandwidth bound. The full run replaces benchmark/results/peers.json.
"""

from __future__ import annotations

import os

# Before torch starts OpenMP: threads wait as they do by default. Asleep between ops, they wake too late for any engine.
os.environ.pop("OMP_WAIT_POLICY", None)

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmark.measure import commit, machine, print_change, require_current_kernels, save
from benchmark.peers import ftllm, llamacpp, server
from benchmark.peers.environment import FTLLM, HOME, LLAMA_CPP
from benchmark.peers.point import Measured, Point
from benchmark.shape.ced_bench import checkpoint_dir

HEADLINES = ["ftllm_decode_x", "ftllm_ttft_x", "llamacpp_bound_share", "our_bound_share"]
POINTS, QUICK_POINTS = "512x1,512x8,2048x1,2048x8", "64x1"


def compare(checkpoint: Path, points: list[Point], threads: int) -> dict[str, Any]:
    """Both engines at every point, ours and ftllm in turns."""
    tokens = max(p.batch * (p.prompt + p.output + 128) for p in points)
    out: dict[str, Any] = {}
    for seed, point in enumerate(points):
        with our_server(checkpoint, threads, point, tokens) as address:
            ours = server.measure(address, point, 1000 + seed)
        theirs = ftllm.measure(checkpoint, point, threads)
        out[str(point)] = {
            "output": point.output,
            "ours": _figures(point, ours),
            "ftllm": _figures(point, theirs),
            "decode_x": theirs.per_token / ours.per_token,
            "ttft_x": theirs.first_token / ours.first_token,
        }
        print(_line(str(point), out[str(point)]), flush=True)
    return out


@contextmanager
def our_server(checkpoint: Path, threads: int, point: Point, tokens: int) -> Iterator[str]:
    """A server that has answered once. It runs alone: an idle one would still hold the memory of its weights."""
    log = HOME / "server.log"
    with server.serving(checkpoint, threads, max(2, point.batch), tokens, log) as address:
        server.measure(address, Point(prompt=point.prompt, batch=1, output=4), seed=0)
        yield address


def _figures(point: Point, m: Measured) -> dict[str, float]:
    return {
        "first_token_s": round(m.first_token, 4),
        "per_token_ms": round(1e3 * m.per_token, 3),
        "decode_tokens_per_s": round(point.batch / m.per_token, 3),
    }


def _line(point: str, row: dict[str, Any]) -> str:
    ours, theirs = row["ours"], row["ftllm"]
    return (
        f"  {point:>8}: first token {ours['first_token_s']:8.2f} s ours, {theirs['first_token_s']:8.2f} s ftllm "
        f"({row['ttft_x']:5.2f}x); decode {ours['decode_tokens_per_s']:7.2f} tokens/s ours, "
        f"{theirs['decode_tokens_per_s']:7.2f} ftllm ({row['decode_x']:5.2f}x)"
    )


def parse_points(text: str, output: int) -> list[Point]:
    pairs = (each.split("x") for each in text.split(","))
    return [Point(int(prompt), int(batch), output) for prompt, batch in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", default=os.environ.get("QUICK") == "1")
    parser.add_argument("--points", help=f"prompt tokens x batch, comma-separated (default: {POINTS})")
    parser.add_argument("--output", type=int, help="tokens of each answer (default: 16; quick: 8)")
    args = parser.parse_args()
    quick, threads = args.quick, torch.get_num_threads()
    points = parse_points(args.points or (QUICK_POINTS if quick else POINTS), args.output or (8 if quick else 16))
    require_current_kernels()
    for peer in (FTLLM, LLAMA_CPP):
        peer.install()
    checkpoint = checkpoint_dir(quick)
    print(f"{'QUICK: 8 layers; ' if quick else ''}ced-bench, {threads} threads; prompt tokens x batch", flush=True)
    rows = compare(checkpoint, points, threads)
    with torch.inference_mode():
        result = llamacpp.bound_shares(
            checkpoint, 128 if quick else 512, 8 if quick else 32, threads, 1 if quick else 3
        )
    first = rows[str(points[0])]
    result |= {"ftllm_decode_x": first["decode_x"], "ftllm_ttft_x": first["ttft_x"], "points": rows}
    result |= {"machine": machine(), "commit": commit(), "quick": quick, "sglang_version": version("sglang")}
    result |= {"ftllm_version": FTLLM.version, "headline_point": str(points[0])}
    print(
        f"  share of the bandwidth bound ({result['read_gb_per_s']:.1f} GB/s): llama.cpp "
        f"{result['llamacpp_bound_share']:.1%} ({result['llamacpp_step_ms']:.1f} ms a step), ours "
        f"{result['our_bound_share']:.1%} ({result['our_step_ms']:.1f} ms)"
    )
    if not quick:
        print_change("peers.json", result, HEADLINES)
        save("peers.json", result)
    line = {name: round(result[name], 3) for name in HEADLINES}
    print(json.dumps(line | {name: result[name] for name in ("machine", "commit", "quick")}))


if __name__ == "__main__":
    main()
