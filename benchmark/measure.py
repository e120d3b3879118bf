"""What the benchmarks share: interleaved timing, ceilings of the machine, and result files."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]

# -- time -------------------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved(cases: Mapping[str, Callable[[], object]], budget: float = 2.0, repeats: int = 15) -> dict[str, float]:
    """Median seconds per call of each case. Cases take turns, so that all meet the same state of the machine.

    Stops after `repeats` turns, or after `budget` seconds and at least three; the first call of each is not counted.
    """
    for run in cases.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in cases}
    start = time.perf_counter()
    for turn in range(repeats):
        if turn >= 3 and time.perf_counter() - start > budget:
            break
        for name, run in cases.items():
            times[name].append(seconds(run))
    return {name: statistics.median(each) for name, each in times.items()}


# -- ceilings ---------------------------------------------------------------------------------------------------------

STREAM_BYTES = 1 << 30


def read_bandwidth(nbytes: int = STREAM_BYTES, repeats: int = 5) -> float:
    """Bytes per second of reading `nbytes`, which no cache holds, with torch's threads: the fastest of some passes of
    a sum, a dot product with itself and a matrix-vector product."""
    block = torch.from_numpy(np.ones(nbytes // 4, np.float32))
    matrix, vector = block.view(-1, 1 << 16), torch.ones(1 << 16)
    passes = (block.sum, lambda: torch.dot(block, block), lambda: matrix @ vector)
    return nbytes / min(seconds(run) for _ in range(repeats) for run in passes)


def multiply_rate(size: int = 1024, repeats: int = 5) -> float:
    """Multiply-adds per second of a float32 matrix product with torch's threads, the best of some."""
    a = torch.randn(size, size)
    a @ a
    return size**3 / min(seconds(lambda: a @ a) for _ in range(repeats))


# -- results ----------------------------------------------------------------------------------------------------------


def machine() -> str:
    """Processor, cores, and threads in use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def commit() -> str:
    """Short hash of HEAD, with + if a tracked file differs from it."""
    head = _git("rev-parse", "--short", "HEAD").strip() or "unknown"
    return head + (
        "+" if _git("status", "--porcelain", "--untracked-files=no", "--", "python", "sgl-kernel-ext") else ""
    )


def require_current_kernels() -> None:
    """Raise RuntimeError if the kernels in use were built before their sources changed: the commit would be wrong."""
    import sgl_kernel_ext

    library = max(file.stat().st_mtime for file in Path(sgl_kernel_ext.__file__).parent.glob("*.so"))
    newer = [f.name for f in (ROOT / "sgl-kernel-ext" / "csrc").rglob("*.[ch]*") if f.stat().st_mtime > library]
    if newer:
        raise RuntimeError(f"sgl-kernel-ext was built before {', '.join(sorted(newer)[:3])} changed: run `make setup`")


def committed(name: str) -> dict[str, Any]:
    """The last committed benchmark/results/<name>; empty if there is none."""
    text = _git("show", f"HEAD:benchmark/results/{name}")
    result: dict[str, Any] = json.loads(text) if text else {}
    return result


def save(name: str, result: Mapping[str, Any]) -> None:
    """Write benchmark/results/<name>."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def print_change(name: str, result: Mapping[str, Any], keys: list[str]) -> None:
    """One line per key: its value, and its change since the committed result if that is there."""
    before = committed(name)
    if before:
        print(f"\nagainst the committed result of {before['commit']} on {before['machine']}:")
        for key in (key for key in keys if before.get(key) and result.get(key)):
            print(f"  {key:<22} {result[key]:>9.3f}  {result[key] / before[key] - 1:+8.1%}")


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else ""
