"""PNGs of curves. Every figure says machine, commit and flags."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.summary import Curve, Point, ttft_by_context

MISSING = "figures need matplotlib: pip install 'sglang-ced[bench]'"


def require_matplotlib() -> None:
    """Raise BenchError, saying what to install, if it is not there: before a long run, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BenchError(MISSING) from None


def draw_all(curves: Sequence[Curve], out: Path, records: dict[str, Any], target: float | None) -> dict[str, str]:
    """Write the figures into `out`; file name -> what it shows. records: name of a curve -> all its records."""
    drawings: dict[str, tuple[str, Callable[[Any], None]]] = {
        "throughput.png": (
            "Output tokens per second of all agents against output speed of each; a number is that of the agents",
            lambda axes: _throughput(axes, curves, target),
        ),
        "agentx.png": ("AgentX measure: 1 / p90(end-to-end seconds / output tokens)", lambda a: _agentx(a, curves)),
        "ttft.png": ("Median time to the first token by length of the prompt", lambda a: _ttft(a, records)),
        "hits.png": ("Cached and replayed tokens, as shares of input tokens", lambda a: _hits(a, curves)),
        "memory.png": ("Peak of resident memory, weights included", lambda a: _memory(a, curves)),
    }
    for file, (_, draw) in drawings.items():
        _save(out / file, draw, curves)
    return {file: text for file, (text, _) in drawings.items()}


def _save(file: Path, draw: Callable[[Any], None], curves: Sequence[Curve]) -> None:
    require_matplotlib()
    from matplotlib.figure import Figure

    about = _about(curves)
    lines = about.count("\n") + 1
    figure = Figure(figsize=(8, 5 + 0.16 * lines), dpi=110, layout="constrained")
    draw(figure.subplots())
    figure.supxlabel(about, fontsize=7, x=0.01, ha="left", color="0.3")
    figure.savefig(file)


def _about(curves: Sequence[Curve]) -> str:
    conditions = {"; ".join(str(v) for v in curve.run.conditions.values()) for curve in curves}
    flags = [f"{curve.name}: {' '.join(curve.run.arguments) or 'no flags'}" for curve in curves]
    return "\n".join(part for line in [*sorted(conditions), *flags] for part in textwrap.wrap(line, 150))


def _throughput(axes: Any, curves: Sequence[Curve], target: float | None) -> None:
    for curve in curves:
        axes.plot([p.speed for p in curve.points], [p.throughput for p in curve.points], "o-", label=curve.name)
        for point in curve.points:
            axes.annotate(str(point.agents), (point.speed, point.throughput), (4, 4), textcoords="offset points")
    if target is not None:
        axes.axvline(target, color="0.5", linestyle=":", label=f"{target:g} tok/s each")
    axes.set(xlabel="output tok/s of one agent", ylabel="output tok/s of all agents")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()


def _agentx(axes: Any, curves: Sequence[Curve]) -> None:
    for curve in curves:
        axes.plot([p.agents for p in curve.points], [p.agentx for p in curve.points], "o-", label=curve.name)
    axes.set(xlabel="agents", ylabel="1 / p90(E2EL / OSL), tok/s")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend()


def _ttft(axes: Any, records: dict[str, Any]) -> None:
    for name, all_of in records.items():
        octaves = ttft_by_context(all_of)
        axes.plot([low for low, _, _, _ in octaves], [seconds for _, _, seconds, _ in octaves], "o-", label=name)
    axes.set(xlabel="tokens of the prompt, from", ylabel="median time to the first token, s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend()


def _hits(axes: Any, curves: Sequence[Curve]) -> None:
    _bars(axes, curves, {"cached": lambda p: p.hit_rate, "replayed": lambda p: p.replay_share})
    for ideal in {round(float(curve.run.trace["ideal_hit_rate"]), 4) for curve in curves}:
        axes.axhline(ideal, color="0.5", linestyle=":", label=f"a cache that forgets nothing: {ideal:.0%}")
    axes.set(ylabel="share of input tokens")
    axes.legend()


def _memory(axes: Any, curves: Sequence[Curve]) -> None:
    _bars(axes, curves, {"peak": lambda p: None if p.peak_rss is None else p.peak_rss / 2**30})
    axes.set(ylabel="GiB")


def _bars(axes: Any, curves: Sequence[Curve], values: dict[str, Callable[[Point], float | None]]) -> None:
    """A group of bars for each curve, at its largest number of agents; what is not known has no bar."""
    width = 0.8 / len(values)
    for k, (label, value) in enumerate(values.items()):
        known = [(i, value(curve.points[-1])) for i, curve in enumerate(curves)]
        bars = [(i + k * width, y) for i, y in known if y is not None]
        axes.bar([x for x, _ in bars], [y for _, y in bars], width, label=label)
    names = [f"{curve.name}\n{curve.points[-1].agents} agents" for curve in curves]
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(curves))], names, fontsize=8)
