"""`ced-bench`: the released 40-layer schedule in a shape whose weights exceed every cache, written once and kept.

    python -m benchmark.shape.ced_bench            prints its directory, and writes it first if it is not there
    python -m benchmark.shape.ced_bench --quick    the same with 8 layers

Weights are random: what it says is noise, what it costs is not. Nothing of it is committed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_ced.checkpoint.writer import write_random_checkpoint
from sglang_ced.cli.models import bundled_path

CONFIG = Path(__file__).with_name("ced_bench.json")
CACHE = Path(__file__).parents[2] / "build" / "ced-bench"
SEED = 0
WRITER = 1  # raise it when the same seed and config no longer give the same bytes
SHARD_BYTES = 256 << 20

# The schedule of the golden toy8: every kind of layer once.
QUICK = {
    "num_hidden_layers": 8,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4,
    "engram_layer_ids": [1, 3],
}


def raw_config(quick: bool = False) -> dict[str, Any]:
    """config.json of the shape; `quick`: with 8 layers instead of 40."""
    raw: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    if quick:
        raw["text_config"] |= QUICK
    return raw


def checkpoint_dir(quick: bool = False, seed: int = SEED, changes: Mapping[str, Any] | None = None) -> Path:
    """The finished directory of this config and seed; written first if there is none (a minute at most).

    changes: fields of the text config that are to be others.

    Its name has a digest of both, and a directory gets its name when it is complete: what an interrupted write has
    left is removed here, once its process is gone.
    """
    raw = raw_config(quick)
    raw["text_config"] |= changes or {}
    digest = hashlib.sha256(json.dumps([WRITER, seed, raw], sort_keys=True).encode()).hexdigest()[:12]
    path = CACHE / f"{'ced-bench-quick' if quick else 'ced-bench'}-{digest}"
    if path.is_dir():
        return path
    remove_interrupted()
    write_random_checkpoint(
        path, raw, seed, fp4_codes=True, shard_bytes=SHARD_BYTES, tokenizer_from=bundled_path("ced-toy")
    )
    return path


def remove_interrupted() -> None:
    """Remove what writes that did not end have left in CACHE."""
    for left in CACHE.glob(".*.partial"):
        process = re.search(r"\.(\d+)\.partial$", left.name)
        if process and not _runs(int(process[1])):
            shutil.rmtree(left)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 layers instead of 40")
    print(checkpoint_dir(parser.parse_args().quick))


if __name__ == "__main__":
    main()
