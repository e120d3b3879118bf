"""ftllm on the checkpoint that ours serves, by its own benchmark command."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from benchmark.peers.environment import FTLLM
from benchmark.peers.point import Measured, Point

TIMEOUT = 3600


def measure(checkpoint: Path, point: Point, threads: int) -> Measured:
    """One run of `ftllm benchmark`. Raises RuntimeError with its last lines if it fails or prints no figures."""
    command = [FTLLM.bin / "ftllm", "benchmark", "-p", checkpoint, "--device", "cpu", "-t", str(threads)]
    command += ["--input_tokens", str(point.prompt), "--output_tokens", str(point.output), "--batch", str(point.batch)]
    # It warms up while it loads; --warmup N would run the whole benchmark N times before.
    command += ["--max_batch", str(point.batch), "--fast_prefill", "--warmup", "0"]
    environment = os.environ | {"PATH": f"{FTLLM.bin}:{os.environ['PATH']}"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    first = re.search(r"TTFT avg\s+([\d.]+) ms", run.stdout)
    token = re.search(r"TPOP avg\s+([\d.]+) ms", run.stdout)
    if run.returncode or not first or not token:
        raise RuntimeError(f"{command[0]} ended with {run.returncode}:\n{(run.stdout + run.stderr)[-2000:]}")
    return Measured(float(first[1]) / 1e3, float(token[1]) / 1e3)
