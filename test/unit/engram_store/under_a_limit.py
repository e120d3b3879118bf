"""Run by test_memory_limit.py, in a process whose memory is limited: python under_a_limit.py MODEL IDS OUT ROWS.

Computes a prompt's logits, looks up ROWS random rows, computes the logits again, and prints what memory did.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.engram_store.placement import StoreOptions

CACHE_MIB = 8


def resident() -> int:
    """Bytes of this process in memory, pages of mapped files included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    model, ids, out, rows = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    engine = OfflineEngine.from_pretrained(
        model, max_tokens=1024, page_size=2, engram=StoreOptions("mmap", True, CACHE_MIB)
    )
    logits = [engine.prefill(engine.start(ids), [64], all_rows=True)]
    store, config = engine.model.engram_rows.store, engine.config
    before, generator = resident(), torch.Generator().manual_seed(0)
    for _ in range(rows // 4096):
        wanted = {
            layer: torch.randint(
                count, (4096 // config.engram_rows_per_token, config.engram_rows_per_token), generator=generator
            )
            for layer, count in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
        }
        for fetch in store.start(wanted).values():
            fetch.result()
    grown = resident() - before
    logits.append(engine.prefill(engine.start(ids), [64], all_rows=True))
    torch.save(logits, out)
    print(json.dumps({"grown": grown, "file_rows": store.update_stats().file_rows}))


if __name__ == "__main__":
    main()
