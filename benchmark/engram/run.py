"""Engram tables that are not to cost a forward anything, measured in one run: `make bench-engram`. The last line
printed is one JSON object.

    python -m benchmark.engram.run            writes benchmark/results/engram.json
    python -m benchmark.engram.run --quick    8 layers, small tables, under a minute; prints only

The shape is ced-bench with rows as the released model has them: 24 of 264 bytes per token and table, and tables that
weigh more than all other weights together. `plain` is the gather one would write first: the mapped checkpoint in pages
of 4 KiB, when a layer asks. All times are those that a forward spends on rows: asking for them and waiting. Hashing is
not in them; it is the same for all. Cold: the page cache is emptied of the tables before every prompt and every decode
step; prompts and steps are random, so that hardly an n-gram comes again.
"""

from __future__ import annotations

import os

os.environ.pop("OMP_WAIT_POLICY", None)  # threads wait as they do by default, see benchmark/kernels/profile.py

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.engram import tables
from benchmark.measure import commit, machine, print_change, require_current_kernels, save, seconds

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engine.offline import OfflineEngine, Request
from sglang_ced.engram_store.placement import StoreOptions, stored_tables, table_bytes
from sglang_ced.engram_store.store import EngramStore


@dataclass(frozen=True)
class Size:
    """table_vocab: 24 * 264 bytes of each table per unit. chunk, chunks: of a prompt. steps: of decode, in each of
    `rounds`, which are what takes the time: some four minutes each."""

    table_vocab: int
    chunk: int
    chunks: int
    steps: int
    rounds: int


FULL, QUICK = Size(400_000, 2048, 2, 24, 3), Size(20_000, 64, 2, 4, 1)
KINDS = ("plain", "mmap", "mmap-sync", "ram", "ram-sync")
COLD_KINDS = KINDS[:3]
BATCHES = (1, 16)
HEADLINES = ["prefill_lookup_x", "decode_lookup_x", "e2e_decode_slowdown"]

Times = dict[str, float]


class Bench:
    """One engine, whose store is changed between measurements. Prompts are random, and none comes twice."""

    def __init__(self, path: Path, size: Size, options: StoreOptions) -> None:
        self.size, self.checkpoint, self.draw = size, Checkpoint.open(path), random.Random(0)
        tokens = (size.chunk * size.chunks + 256) * 2 + max(BATCHES) * 1024
        self.engine = OfflineEngine(
            self.checkpoint, max_requests=max(BATCHES), max_tokens=tokens, replay="bounded", engram=options
        )
        self.files = tables.table_files(self.checkpoint)

    def ids(self, count: int) -> list[int]:
        return self.draw.choices(range(3, 250), k=count)

    @contextmanager
    def store(self, kind: str, cold: bool) -> Iterator[EngramStore]:
        """The engine with a fresh store of this kind, over a full or an empty page cache."""
        rows, before = self.engine.model.engram_rows, self.engine.model.engram_rows.store
        rows.store, self.cold = tables.open_store(self.checkpoint, kind), cold
        if not cold:
            tables.touch(rows.store)
        try:
            yield rows.store
        finally:
            rows.store = before

    def _cool(self, store: EngramStore) -> None:
        if self.cold:
            tables.cool(store, self.checkpoint, self.files)

    def prefill(self, store: EngramStore) -> list[float]:
        """Seconds spent on rows in each chunk of one prompt."""
        self._cool(store)
        request, spent = self.engine.start(self.ids(self.size.chunk * self.size.chunks)), []
        for _ in range(self.size.chunks):
            before = store.stats.wait_seconds
            self.engine.step([(request, self.size.chunk)])
            spent.append(store.stats.wait_seconds - before)
        self.engine.finish(request)
        return spent

    def decode(self, store: EngramStore, batch: int) -> tuple[list[float], list[float]]:
        """Seconds of single steps: spent on rows, and in all."""
        requests = [self.engine.start(self.ids(20)) for _ in range(batch)]
        self.engine.step([(request, 20) for request in requests])
        on_rows, whole = [], []
        for _ in range(self.size.steps):
            self._cool(store)
            before = store.stats.wait_seconds
            whole.append(seconds(lambda: self._token(requests)))
            on_rows.append(store.stats.wait_seconds - before)
        for request in requests:
            self.engine.finish(request)
        return on_rows, whole

    def _token(self, requests: list[Request]) -> None:
        self.engine.append(*((request, self.draw.randrange(3, 250)) for request in requests))
        self.engine.step([(request, 1) for request in requests])


def lookups(bench: Bench, cold: bool) -> dict[str, Times]:
    """Kind -> median milliseconds per chunk, and per decode step by batch."""
    kinds = COLD_KINDS if cold else KINDS
    chunks: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    steps: dict[str, dict[int, list[float]]] = {kind: {batch: [] for batch in BATCHES} for kind in kinds}
    for done in range(bench.size.rounds):
        print(f"look-ups, page cache {'cold' if cold else 'warm'}: {done} of {bench.size.rounds} rounds", flush=True)
        for kind in kinds:
            with bench.store(kind, cold) as store:
                chunks[kind].append(bench.prefill(store))
            for batch in BATCHES:
                with bench.store(kind, cold) as store:
                    steps[kind][batch] += bench.decode(store, batch)[0]
    out = {}
    for kind in kinds:
        first, later = ([each[i] for each in chunks[kind]] for i in (0, -1))
        out[kind] = {"first_chunk_ms": _ms(first), "next_chunk_ms": _ms(later)}
        out[kind] |= {f"decode_{batch}_ms": _ms(steps[kind][batch]) for batch in BATCHES}
    return out


def _ms(values: list[float]) -> float:
    return statistics.median(values) * 1e3


def end_to_end(large: Bench, trivial: Bench) -> dict[str, Any]:
    """Decode steps, one request, with large tables over those with trivial ones; both take turns.

    A round compares the medians of its own steps; the result is the median over the rounds.
    """
    cases = {
        "ram": ("ram", False),
        "mmap": ("mmap", False),
        "mmap, cold": ("mmap", True),
        "plain": ("plain", False),
        "plain, cold": ("plain", True),
    }
    ratios: dict[str, list[float]] = {name: [] for name in cases}
    base: list[float] = []
    for done in range(large.size.rounds):
        print(f"decode, large and trivial tables: {done} of {large.size.rounds} rounds", flush=True)
        for name, (kind, cold) in cases.items():
            with large.store(kind, cold) as store, trivial.store("ram", False) as small:
                pairs = [(large.decode(store, 1)[1], trivial.decode(small, 1)[1]) for _ in range(2)]
            ours, theirs = ([t for pair in pairs for t in pair[side]] for side in (0, 1))
            ratios[name].append(statistics.median(ours) / statistics.median(theirs) - 1)
            base += theirs
    return {
        "slowdown": {name: statistics.median(each) for name, each in ratios.items()},
        "trivial_step_ms": _ms(base),
    }


def measure(size: Size, quick: bool) -> dict[str, Any]:
    start = time.perf_counter()
    path, small = tables.checkpoints(quick, size.table_vocab)
    large, trivial = (Bench(each, size, StoreOptions("ram")) for each in (path, small))
    print(f"checkpoints and the copy in memory: {time.perf_counter() - start:.1f} s", flush=True)
    held = large.engine.model.engram_rows.store  # keeps the copy, so that later stores of this kind join it
    cold = lookups(large, cold=True)
    ceilings = tables.ceilings(large.files, held, seconds)
    tables.warm(large.files)
    warm = lookups(large, cold=False)
    result: dict[str, Any] = {"cold": cold, "warm": warm, "ceilings": ceilings, "e2e": end_to_end(large, trivial)}
    needed = large.engine.config.engram_rows_per_token * len(large.engine.config.engram_layer_ids)
    result |= {
        "rows_per_token": needed,
        "table_bytes": table_bytes(stored_tables(large.checkpoint)),
        "other_bytes": sum(file.stat().st_size for file in path.glob("*.safetensors") if file not in large.files),
        "huge_page_share": held.huge_page_share,
        "chunk": size.chunk,
        "layers": large.engine.config.num_hidden_layers,
        "prefill_lookup_x": warm["plain"]["first_chunk_ms"] / warm["ram"]["first_chunk_ms"],
        "prefill_lookup_cold_x": cold["plain"]["next_chunk_ms"] / cold["mmap"]["next_chunk_ms"],
        "decode_lookup_x": warm["plain"]["decode_16_ms"] / warm["ram"]["decode_16_ms"],
        "decode_lookup_batch_1_x": warm["plain"]["decode_1_ms"] / warm["ram"]["decode_1_ms"],
        "decode_lookup_cold_x": cold["plain"]["decode_1_ms"] / cold["mmap"]["decode_1_ms"],
        "e2e_decode_slowdown": result["e2e"]["slowdown"]["ram"],
    }
    return result


def table(r: Mapping[str, Any]) -> str:
    gib = 2**30
    lines = [
        f"ced-bench, {r['layers']} layers, tables of {r['table_bytes'] / gib:.2f} GiB beside "
        f"{r['other_bytes'] / gib:.2f} GiB, {r['huge_page_share']:.0%} of the copy in huge pages",
        f"{r['machine']}, commit {r['commit']}",
        "",
        f"ms per forward spent on rows  {'chunk of ' + str(r['chunk']):>14}{'the next one':>14}"
        + "".join(f"{f'decode, {batch}':>14}" for batch in BATCHES),
    ]
    for state in ("cold", "warm"):
        for kind, times in r[state].items():
            lines.append(f"  {kind + ', ' + state:<27} " + "".join(f"{value:>14.3f}" for value in times.values()))
    floor = r["chunk"] * r["rows_per_token"]
    disk, memory = r["ceilings"]["disk_reads_per_s"], r["ceilings"]["memory_rows_per_s"]
    lines += [
        "",
        f"disk: {disk:,.0f} random reads of 4 KiB a second, {floor * 1e3 / disk:,.0f} ms for a chunk with one a row",
        f"memory: {memory:,.0f} random rows a second, {floor * 1e3 / memory:,.1f} ms for a chunk",
        "",
        f"decode step with trivial tables: {r['e2e']['trivial_step_ms']:.2f} ms; slower with large ones by",
    ]
    lines += [f"  {name:<14} {value:>8.1%}" for name, value in r["e2e"]["slowdown"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", default=os.environ.get("QUICK") == "1")
    quick = parser.parse_args().quick
    require_current_kernels()
    result = measure(QUICK if quick else FULL, quick) | {"machine": machine(), "commit": commit(), "quick": quick}
    if quick:
        print("QUICK: a small shape; the times say that it runs, not what it costs")
    print(table(result))
    if not quick:
        print_change("engram.json", result, HEADLINES)
        save("engram.json", result)
    flat = {name: round(value, 4) for name, value in result.items() if isinstance(value, float)}
    print(json.dumps(flat | {name: result[name] for name in ("machine", "commit", "quick")}))


if __name__ == "__main__":
    main()
