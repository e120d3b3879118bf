"""How long a checkpoint takes to load, how much memory it takes, and a decode step, in a process of its own.

    python -m benchmark.kernels.load DIR        one JSON object

peak_bytes is the resident set at its highest, mapped pages of the checkpoint included, after a prompt of 512 tokens
and some decode steps. import_bytes of it are the interpreter and torch, before the checkpoint is opened. own_bytes is
memory that is not a file's: the kernel can drop the rest and read it again.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmark.decode import DecodeTimes, prompt
from benchmark.measure import ROOT

from sglang_ced.checkpoint.files import read_headers
from sglang_ced.engine.offline import OfflineEngine


def load_figures(path: Path, **environment: str) -> dict[str, Any]:
    """Figures of a fresh process, and their ratio to the checkpoint."""
    command = [sys.executable, "-m", "benchmark.kernels.load", path]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    stored = sum(tensor.nbytes for tensor in read_headers(path).values())
    return figures | {
        "checkpoint_bytes": stored,
        "peak_over_checkpoint": figures["peak_bytes"] / stored,
        "peak_less_import_over_checkpoint": (figures["peak_bytes"] - figures["import_bytes"]) / stored,
    }


def memory(field: str) -> int:
    """A field of /proc/self/status in bytes: VmHWM (peak), VmRSS, RssAnon."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: memory can be measured on Linux only")


def main() -> None:
    imported = memory("VmRSS")
    start = time.perf_counter()
    engine = OfflineEngine.from_pretrained(sys.argv[1], max_requests=1, max_tokens=1024, replay="bounded")
    loaded = time.perf_counter() - start
    request = engine.start(prompt(512, 0))
    engine.prefill(request)
    timer = DecodeTimes(engine)
    step = statistics.median(timer.step(request)[1] for _ in range(24))
    out = {"load_seconds": loaded, "import_bytes": imported, "peak_bytes": memory("VmHWM")}
    print(json.dumps(out | {"own_bytes": memory("RssAnon"), "step_ms": 1e3 * step}))


if __name__ == "__main__":
    main()
