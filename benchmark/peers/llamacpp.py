"""llama.cpp on a mixture of experts of like active bytes: how near each engine's decode step comes to the bandwidth."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmark.decode import DecodeTimes, prompt
from benchmark.kernels.bound import decode_bytes
from benchmark.measure import read_bandwidth
from benchmark.peers.environment import HOME, LLAMA_CPP

from sglang_ced.config import CedConfig
from sglang_ced.engine.offline import OfflineEngine

WORKER = Path(__file__).with_name("llamacpp_worker.py")


def like_shape(c: CedConfig) -> dict[str, int]:
    """A model that llama.cpp has (qwen3moe) with our hidden size, layers and experts; half the heads, as its output
    projection is whole where ours has a low rank; the shared expert counts as one more in use."""
    return {
        "hidden": c.hidden_size,
        "layers": c.num_hidden_layers,
        "heads": c.num_attention_heads // 2,
        "kv_heads": 1,
        "head_dim": c.head_dim,
        "experts": c.n_routed_experts,
        "used": c.num_experts_per_tok + c.n_shared_experts,
        "inner": c.moe_intermediate_size,
        "vocab": c.vocab_size,
    }


def bound_shares(checkpoint: Path, context: int, steps: int, threads: int, rounds: int) -> dict[str, Any]:
    """Active bytes / bandwidth / step time of both, measured in turns; medians over the rounds."""
    engine = OfflineEngine.from_pretrained(
        checkpoint, max_requests=1, max_tokens=context + rounds * steps + 64, replay="bounded", kernels="auto"
    )
    model, timer, request = _gguf(engine.config), DecodeTimes(engine), engine.start(prompt(context, 0))
    engine.prefill(request)
    theirs, ours, rates = [], [], []
    for _ in range(rounds):
        rates.append(read_bandwidth())
        theirs.append(_time(model, threads, context, steps))
        ours.append(statistics.median(timer.step(request)[1] for _ in range(steps)))
    rate = max(rates)
    our_bytes = sum(decode_bytes(checkpoint, engine.config, context + rounds * steps // 2).values())
    their_seconds, our_seconds = statistics.median(t["seconds"] for t in theirs), statistics.median(ours)
    return {
        "llamacpp_bound_share": theirs[0]["bytes"] / rate / their_seconds,
        "our_bound_share": our_bytes / rate / our_seconds,
        "llamacpp_step_ms": 1e3 * their_seconds,
        "our_step_ms": 1e3 * our_seconds,
        "llamacpp_bytes": theirs[0]["bytes"],
        "our_bytes": our_bytes,
        "read_gb_per_s": rate / 1e9,
        "llamacpp_version": f"llama-cpp-python {theirs[0]['version']}",
    }


def _gguf(config: CedConfig) -> Path:
    shape = like_shape(config)
    path = HOME / "models" / ("-".join(map(str, shape.values())) + ".gguf")
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        described = path.with_suffix(".json")
        described.write_text(json.dumps(shape))
        subprocess.run([LLAMA_CPP.bin / "python", WORKER, "write", path, described], check=True)
    return path


def _time(model: Path, threads: int, context: int, steps: int) -> dict[str, Any]:
    command = [LLAMA_CPP.bin / "python", WORKER, "time", model, str(threads), str(context), str(steps)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"llama.cpp ended with {run.returncode}:\n{run.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result
