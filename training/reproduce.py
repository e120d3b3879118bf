"""Train the first steps anew and hold their losses against the kept curve: `python -m training.reproduce`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from training import train

CURVE = Path(__file__).with_name("curve.jsonl")
# Machines and numbers of processes sum in different orders; within the first hundred steps that moves a loss by less.
TOLERANCE = 0.02


def read(path: Path) -> dict[int, dict[str, Any]]:
    """Rows of a curve by step."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["step"]: row for row in rows}


def differences(kept: dict[int, dict[str, Any]], found: dict[int, dict[str, Any]]) -> dict[int, float]:
    """Relative difference of the loss on answers by step, at the steps of `found`."""
    return {step: abs(row["answer"] / kept[step]["answer"] - 1) for step, row in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Do the first steps of training give the kept losses again?")
    parser.add_argument("--steps", type=int, default=3 * train.LOG_EVERY, help=f"a multiple of {train.LOG_EVERY}")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as out:
        subprocess.run([sys.executable, "-m", "training.train", "--out", out, "--until", str(steps)], check=True)
        kept, found = read(CURVE), read(Path(out) / "curve.jsonl")
    far = differences(kept, found)
    for step, share in far.items():
        print(
            f"step {step}: loss {found[step]['answer']:.4f}, kept {kept[step]['answer']:.4f}, {100 * share:.2f} % apart"
        )
    if not far or max(far.values()) > TOLERANCE:
        sys.exit(f"The first {steps} steps differ from {CURVE} by more than {100 * TOLERANCE:.0f} %.")


if __name__ == "__main__":
    main()
