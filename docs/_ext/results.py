"""Tables of measured figures, from the committed files of benchmark/results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmark" / "results"
TRAINED = Path(__file__).parents[2] / "training" / "results"

Row = tuple[str, ...]

NO_RESULT: tuple[Row, ...] = (("", ""), ("no result of a full run is committed yet", "–"))


def _read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return result


# -- profile ----------------------------------------------------------------------------------------------------------


def profile_conditions() -> Iterator[Row]:
    r = _read("profile.json")
    yield "", "decode step", "prefill"
    yield "tokens", f"after {r['context']:,}", f"{r['length']:,}"
    yield "references", "one step", f"from two chunks of {r['reference_chunk']} rows"
    yield "fast kernels", f"mean of {r['steps']} steps", f"whole, in chunks of {r['chunk']:,}"
    yield "layers", str(r["layers"]), str(r["layers"])
    yield "machine", r["machine"], r["machine"]
    yield "commit", f"`{r['commit']}`", f"`{r['commit']}`"


def profile_decode() -> Iterator[Row]:
    return _families("decode", "ms", 1e3)


def profile_prefill() -> Iterator[Row]:
    return _families("prefill", "s", 1.0)


def _families(part: str, unit: str, factor: float) -> Iterator[Row]:
    before, after = (_read("profile.json")[part][when] for when in ("before", "after"))
    slow, fast = sum(before.values()), sum(after.values())
    yield "", f"references, {unit}", "share", f"fast kernels, {unit}", "share", "times faster"
    for name in sorted(after, key=lambda key: -after[key]):
        yield (
            name,
            _number(factor * before[name]),
            f"{before[name] / slow:.1%}",
            _number(factor * after[name]),
            f"{after[name] / fast:.1%}",
            _number(before[name] / after[name]),
        )
    yield "**whole**", _number(factor * slow), "", _number(factor * fast), "", _number(slow / fast)


# -- kernels and peers ------------------------------------------------------------------------------------------------


def bench_kernels() -> Iterator[Row]:
    r = _read("kernels.json")
    load = r["load"]
    yield "", f"{r['machine']}, commit `{r['commit']}`"
    yield "decode step in the model, after " + f"{r['context']} tokens", f"{r['decode_step_ms']:.1f} ms"
    yield "the same with `OMP_WAIT_POLICY=PASSIVE`, times as long", f"{r['passive_wait_x']:.2f}"
    yield "planning of the step", f"{r['decode_planning_ms']:.2f} ms"
    yield "decode step, references over fast kernels (`decode_x_reference`)", f"{r['decode_x_reference']:.1f}"
    yield f"prompt of {r['prefill']} tokens, the same (`prefill_x_reference`)", f"{r['prefill_x_reference']:.1f}"
    yield "share of the bandwidth bound (`decode_bound_share`)", f"{r['decode_bound_share']:.1%}"
    yield "streaming read", f"{r['read_gb_per_s']:.1f} GB/s"
    for size, name in (("512k", "524,288"), ("8k", "8,192")):
        yield f"choice among {name} groups (`index_{size}_x`)", f"{r[f'index_{size}_x']:.1f}"
        yield f"choice among {name} groups, keys unpacked before", f"{r[f'index_{size}_x_float_keys']:.1f}"
    for key, what in (("mhc", "hyper-connection site"), ("gate", "router")):
        for rows, ratio in r[f"{key}_x_by_rows"].items():
            yield f"{what}, {f'{rows} rows' if rows != '1' else f'one row (`{key}_x`)'}", f"{ratio:.2f}"
    yield "attention, bfloat16 over packed groups (`attention_fp4_x`)", f"{r['attention_fp4_x']:.2f}"
    yield "loading, file in the page cache", f"{load['load_seconds']:.2f} s"
    yield "peak memory over checkpoint", f"{load['peak_over_checkpoint']:.2f}"
    yield "the same less what Python and torch take", f"{load['peak_less_import_over_checkpoint']:.2f}"


def bench_peers() -> Iterator[Row]:
    r = _read("peers.json")
    yield "prompt × batch", "first token, ours", "ftllm", "ratio", "decode, ours", "ftllm", "ratio"
    for point, row in r["points"].items():
        ours, theirs = row["ours"], row["ftllm"]
        yield (
            point.replace("x", " × "),
            f"{ours['first_token_s']:.2f} s",
            f"{theirs['first_token_s']:.2f} s",
            f"{row['ttft_x']:.1f}",
            f"{ours['decode_tokens_per_s']:.2f} tokens/s",
            f"{theirs['decode_tokens_per_s']:.2f} tokens/s",
            f"{row['decode_x']:.1f}",
        )


def bench_bound() -> Iterator[Row]:
    r = _read("peers.json")
    yield "", "active bytes", "decode step", "share of the bandwidth bound"
    for name, label in (("our", "ours"), ("llamacpp", r["llamacpp_version"])):
        size, step, share = (r[f"{name}_{field}"] for field in ("bytes", "step_ms", "bound_share"))
        yield label, f"{size / 1e6:.0f} MB", f"{step:.1f} ms", f"{share:.1%}"


# -- replay -----------------------------------------------------------------------------------------------------------


def replay_gains() -> Iterator[Row]:
    r = _read("replay.json")
    yield f"`make bench-replay`, {r['machine']}, commit `{r['commit']}`", "times"
    yield "first token of a cold prompt of 8,192 tokens, exact over bounded", _number(r["cold_8k_x"])
    yield "first token after a hit of 8,192 tokens with 64 new ones, exact over bounded", _number(r["hit_vs_exact_x"])
    yield "the same, the cold prompt over the hit", _number(r["hit_vs_cold_x"])
    yield (
        "tokens that 1 GiB of cache holds, over a cache that keeps windows too",
        _number(r["tokens_in_1_gib"] / r["tokens_in_1_gib_with_windows"]),
    )


def replay_measured() -> Iterator[Row]:
    r = _read("replay.json")
    yield f"{r['machine']}, commit `{r['commit']}`", "ratio"
    for length in r["lengths"]:
        key = f"cold_{length // 1024}k_x"
        if key in r:
            yield f"first token of a cold prompt of {length:,} tokens, exact over bounded", _number(r[key])
    yield "the bound of the latter at 8,192 tokens, if every layer cost the same per row", _number(r["cold_8k_bound_x"])
    yield "first token after a hit of 8,192 tokens with 64 new ones, cold over hit", _number(r["hit_vs_cold_x"])
    yield "the same, exact over bounded", _number(r["hit_vs_exact_x"])
    yield "eight such hits in one forward over one hit", _number(r["hits_8_over_1"])
    yield (
        "decode rate of four requests beside a prompt prefilled in chunks of 16, over their rate alone",
        _number(r["decode_kept_under_prefill"]),
    )


def long_prompt() -> Iterator[Row]:
    k, r = _read("kernels.json"), _read("replay.json")
    yield "measured", "times", "command, machine, commit"
    kernels, replay = (
        f"`make {name}`, {each['machine']}, `{each['commit']}`"
        for name, each in (("bench-kernels", k), ("bench-replay", r))
    )
    yield "choice among 524,288 groups, plain torch over the kernels", _number(k["index_512k_x"]), kernels
    yield "choice among 8,192 groups, the same", _number(k["index_8k_x"]), kernels
    yield "first token of a cold prompt of 8,192 tokens, exact over bounded replay", _number(r["cold_8k_x"]), replay


# -- Engram -----------------------------------------------------------------------------------------------------------


def engram_lookups() -> Iterator[Row]:
    r = _read("engram.json")
    yield "ms of a forward spent on rows", f"chunk of {r['chunk']:,}", "the next one", "decode", "decode, 16 requests"
    for state in ("warm", "cold"):
        for kind, times in r[state].items():
            yield f"`{kind}`, page cache {state}", *(_number(value) for value in times.values())


def engram_ratios() -> Iterator[Row]:
    r = _read("engram.json")
    yield f"`make bench-engram`, {r['machine']}, commit `{r['commit']}`", ""
    yield "tables, and all other weights", f"{r['table_bytes'] / 2**30:.1f} and {r['other_bytes'] / 2**30:.1f} GiB"
    yield "share of the copy in huge pages", f"{r['huge_page_share']:.0%}"
    for key, what in (
        ("prefill_lookup_x", "a prompt's first chunk, plain over `ram`"),
        ("prefill_lookup_cold_x", "a prompt's second chunk, plain over `mmap`, page cache cold"),
        ("decode_lookup_x", "a step of 16 requests, plain over `ram`"),
        ("decode_lookup_batch_1_x", "a step of one request, the same"),
        ("decode_lookup_cold_x", "a step of one request, plain over `mmap`, page cache cold"),
    ):
        yield f"{what} (`{key}`)", _number(r[key])
    for kind, slowdown in r["e2e"]["slowdown"].items():
        headline = " (`e2e_decode_slowdown`)" if kind == "ram" else ""
        yield f"decode step of one request slowed by large tables, `{kind}`{headline}", f"{slowdown:.1%}"
    yield "the same step with trivial tables", f"{r['e2e']['trivial_step_ms']:.1f} ms"
    yield "random reads of 4 KiB that the disk does a second", f"{r['ceilings']['disk_reads_per_s']:,.0f}"
    yield "random rows a second from huge pages", f"{r['ceilings']['memory_rows_per_s']:,.0f}"


# -- agents -----------------------------------------------------------------------------------------------------------


def agents_headline() -> Iterator[Row]:
    if not (RESULTS / "agents.json").is_file():
        yield from NO_RESULT
        return
    r = _read("agents.json")
    yield f"`make bench-agents`, {r['machine']}, commit `{r['commit']}`", ""
    yield "output speed of one agent, all on over all off (`decode_c1_x`)", _number(r["decode_c1_x"])
    yield (
        "throughput with at least the speed of one agent with all off, over its throughput "
        f"(`throughput_at_equal_speed_x`); {r['agents_at_equal_speed']} agents",
        _number(r["throughput_at_equal_speed_x"]),
    )
    yield "cached over input tokens, two replicas, cache-aware (`hit_rate_affinity`)", f"{r['hit_rate_affinity']:.1%}"
    yield "the same, round robin (`hit_rate_round_robin`)", f"{r['hit_rate_round_robin']:.1%}"


def agents_curves() -> Iterator[Row]:
    if not (RESULTS / "agents.json").is_file():
        yield from NO_RESULT
        return
    yield "configuration", "agents", "speed per agent, tok/s", "together, tok/s", "first token, s", "hit rate", "runs"
    for name, points in _read("agents.json")["curves"].items():
        for p in points:
            yield (
                name,
                str(p["agents"]),
                _number(p["speed"]) if p["speed"] else "–",
                _number(p["throughput"]),
                _number(p["ttft_p50"]),
                f"{p['hit_rate']:.1%}" if p["hit_rate"] is not None else "–",
                str(p["repeats"]),
            )


# -- ced-tiny ---------------------------------------------------------------------------------------------------------


def tiny_accuracy() -> Iterator[Row]:
    exact = _read("evaluation.json", TRAINED)["exact"]
    yield "skill", *(f"right, texts of {length} tokens" for length in exact)
    for skill in sorted({skill for counts in exact.values() for skill in counts}):
        yield _skill(skill), *(_share(*counts[skill]) if skill in counts else "" for counts in exact.values())


def tiny_replay() -> Iterator[Row]:
    before, after = (
        _read(name, TRAINED)["replay"]["256"] for name in ("evaluation-before-replay.json", "evaluation.json")
    )
    yield "skill", "before: right", "after a hit", "shipped: right", "after a hit", "answers"
    for skill, (right, replayed, count) in after.items():
        if skill in before:
            old = before[skill]
            yield (
                skill,
                *(f"{n / of:.1%}" for n, of in ((old[0], old[2]), (old[1], old[2]), (right, count), (replayed, count))),
                str(count),
            )


def tiny_ablations() -> Iterator[Row]:
    found = _read("ablations.json", TRAINED)
    yield "without", *("nothing" if mechanism == "none" else mechanism for mechanism in found)
    for name in found["none"]:
        yield name, *(f"{right / count:.1%}" for right, count in (answers[name] for answers in found.values()))


def tiny_weights() -> Iterator[Row]:
    yield "", "SHA-256 of `model.safetensors`"
    yield "`ced-tiny`", f"`{_read('evaluation.json', TRAINED)['sha256']}`"


def _skill(name: str) -> str:
    return {"tool": "tool: the call", "result": "tool: telling the result"}.get(name, name)


def _share(right: int, count: int) -> str:
    return f"{right / count:.1%} of {count}"


def _number(value: float) -> str:
    """Three digits or more."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        profile_conditions,
        profile_decode,
        profile_prefill,
        bench_kernels,
        bench_peers,
        bench_bound,
        replay_gains,
        replay_measured,
        long_prompt,
        engram_lookups,
        engram_ratios,
        agents_headline,
        agents_curves,
        tiny_accuracy,
        tiny_replay,
        tiny_ablations,
        tiny_weights,
    )
}
