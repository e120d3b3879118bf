"""What the published vLLM and SGLang work for this model contains, and where each part stands here, as a table.

Figures are read from the committed result files. A result that has not been committed yet is named as missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from results import RESULTS

Row = tuple[str, ...]

_VLLM = "https://github.com/vllm-project/vllm/pull/"


@dataclass(frozen=True)
class Figure:
    """`key` of benchmark/results/`file`, which `command` writes, as `words` with {} for the number."""

    file: str
    key: str
    words: str
    command: str

    def text(self) -> str:
        path = RESULTS / self.file
        value = json.loads(path.read_text(encoding="utf-8")).get(self.key) if path.is_file() else None
        if value is None:
            return f"no committed result of `make {self.command}` yet"
        return f"{self.words.format(value)} (`make {self.command}`)"


@dataclass(frozen=True)
class Part:
    """One part of the work. vllm: pull requests, with what they do."""

    name: str
    vllm: str
    sglang: str
    here: str
    figures: tuple[Figure, ...] = ()

    def row(self) -> Row:
        measured = "; ".join(figure.text() for figure in self.figures) or "–"
        return self.name, self.vllm, self.sglang, self.here, measured


def _pull(*numbers: int) -> str:
    return ", ".join(f"[{number}]({_VLLM}{number})" for number in numbers)


def _replay(key: str, words: str) -> Figure:
    return Figure("replay.json", key, words, "bench-replay")


def _kernels(key: str, words: str) -> Figure:
    return Figure("kernels.json", key, words, "bench-kernels")


PARTS = (
    Part(
        "encoder bounded replay",
        f"{_pull(56227)}, on by default",
        "`--enable-encoder-swa-bounded-replay`, off by default; not with mixed chunks",
        "on by default, in every scheduling mode",
        (
            _replay("hit_vs_cold_x", "first token after a hit {:.0f} times sooner than cold"),
            _replay("hit_vs_exact_x", "{:.0f} times sooner than exact"),
        ),
    ),
    Part(
        "decoder bounded replay",
        _pull(56752, 58132),
        "`--enable-decoder-swa-bounded-replay`, on where supported",
        "on by default; rows do not depend on chunks",
        (_replay("cold_8k_x", "cold prompt of 8,192 tokens {:.1f} times faster than exact"),),
    ),
    Part(
        "replay that equals the cold run",
        f"{_pull(57281)}, opt-in",
        "replay off: windows are cached",
        "`--no-swa-bounded-replay`, held to the cold run bit for bit",
    ),
    Part(
        "global KV in fp4",
        "`nvfp4_ds_mla`, on sm_100",
        "layouts `v41`, by environment variable",
        "the default, on every machine: 890 bytes a token",
        (_kernels("attention_fp4_x", "attention over bfloat16 groups takes {:.2f} times that over packed ones"),),
    ),
    Part(
        "sparse indexer, candidates",
        _pull(56254, 57109),
        "`v41_indexer`",
        "packed keys multiplied in integers, candidates scored where they lie",
        (_kernels("index_512k_x", "{:.0f} times plain torch at 524,288 groups"),),
    ),
    Part(
        "top-k selection",
        f"{_pull(56464)} (DeepSelect)",
        "`full_topk`",
        "with a rule for ties, so that a choice does not depend on the batch",
    ),
    Part(
        "attention",
        f"{_pull(56935)} (one kernel)",
        "FlashMLA, TRT-LLM and others",
        "one op over window and groups on CPU; Triton version compiled, timed on no GPU",
    ),
    Part(
        "hyper-connections",
        f"{_pull(56962, 57603)} (Mega-mHC)",
        "fused kernels",
        "fused on CPU, sums in a wider type",
        (_kernels("mhc_x", "{:.1f} times plain torch, one row"),),
    ),
    Part(
        "router",
        f"{_pull(56266)} (Mega gate)",
        "fused kernels",
        "fused on CPU",
        (_kernels("gate_x", "{:.1f} times plain torch, one row"),),
    ),
    Part(
        "experts",
        f"{_pull(57204, 57604)} (MegaMoE)",
        "DeepGEMM, Marlin and others",
        "fp4 weights multiplied as stored, on CPU",
        (
            _kernels("decode_x_reference", "decode step of all kernels {:.0f} times the references"),
            _kernels("decode_bound_share", "{:.0%} of the bandwidth bound"),
        ),
    ),
    Part(
        "n-gram memory (Engram)",
        f"{_pull(56220, 56357, 56512)}: overlap, prefetch, sharding",
        "host tables, staging",
        "mapped from the checkpoint; its own page tells what placement and prefetch there are",
        (Figure("engram.json", "e2e_decode_slowdown", "decode slowed by {:.1%}", "bench-engram"),),
    ),
    Part("speculation (DSpark)", f"yes; {_pull(57432)}", "`--speculative-algorithm DSPARK`", "not built"),
    Part("tensor, expert, data parallelism", "yes", "yes", "not built; replicas behind a router"),
    Part("images", f"yes; {_pull(56625)}", "yes", "not built"),
    Part("external caches, disaggregated prefill", "yes", "yes", "refused by name"),
    Part("chat encoding, tools, reasoning", "own", "own", "SGLang's, unchanged"),
    Part(
        "a CPU",
        "no",
        "no",
        "the whole model",
        (
            Figure("peers.json", "ftllm_decode_x", "decode {:.0f} times ftllm", "bench-peers"),
            Figure("peers.json", "ftllm_ttft_x", "first token {:.0f} times sooner", "bench-peers"),
        ),
    ),
    Part(
        "agent traffic, all parts together",
        "figures on GPUs",
        "figures on GPUs",
        "a ratio on one machine, all on over all off",
        (
            Figure("agents.json", "decode_c1_x", "decode at concurrency 1 {:.1f} times", "bench-agents"),
            Figure(
                "agents.json", "throughput_at_equal_speed_x", "throughput at equal speed {:.1f} times", "bench-agents"
            ),
        ),
    ),
)


def published_work() -> Iterator[Row]:
    yield "part", "vLLM", "SGLang 0.5.23", "here", "measured here"
    for part in PARTS:
        yield part.row()


TABLES: dict[str, Callable[[], Iterator[Row]]] = {"published-work": published_work}
