"""The report of runs: a table and an answer on the terminal, a page with figures, and one line per request."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ced.bench.figures import draw_all
from sglang_ced.bench.records import Run
from sglang_ced.bench.summary import Curve, Point, answer, curves

PAGE, SUMMARY, ALL_REQUESTS = "report.html", "summary.json", "requests.jsonl"

COLUMNS: dict[str, Callable[[Point], str]] = {
    "agents": lambda p: str(p.agents),
    "tok/s each": lambda p: f"{p.speed:.3g}",
    "tok/s together": lambda p: f"{p.throughput:.3g}",
    "with input": lambda p: f"{p.total_throughput:.4g}",
    "first token, s": lambda p: f"{p.ttft_p50:.3g}",
    "p90": lambda p: f"{p.ttft_p90:.3g}",
    "AgentX": lambda p: f"{p.agentx:.3g}",
    "hits": lambda p: _percent(p.hit_rate),
    "replayed": lambda p: _percent(p.replay_share),
    "peak GiB": lambda p: "-" if p.peak_rss is None else f"{p.peak_rss / 2**30:.2f}",
    "KV B/token": lambda p: "-" if p.kv_per_token is None else f"{p.kv_per_token:g}",
    "runs": lambda p: str(p.repeats),
    "spread": lambda p: f"{p.spread:.0%}",
}


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def write_report(
    runs: Sequence[Run], out: Path, target_speed: float | None = None, target_ttft: float | None = None
) -> str:
    """Write page, figures, summary and requests of all `runs` into `out`; the text to print."""
    out.mkdir(parents=True, exist_ok=True)
    all_curves = curves(runs)
    speed = target_speed if target_speed is not None or target_ttft is not None else _default_speed(all_curves)
    answers = [answer(curve, speed, target_ttft) for curve in all_curves]
    records = {curve.name: [r for run in runs if run.name == curve.name for r in run.records] for curve in all_curves}
    figures = draw_all(all_curves, out, records, speed)
    (out / ALL_REQUESTS).write_text("".join(_request_lines(runs)), encoding="utf-8")
    summary = {
        "answers": answers,
        "curves": {
            curve.name: {
                "points": [asdict(point) for point in curve.points],
                "arguments": curve.run.arguments,
                "conditions": curve.run.conditions,
                "trace": curve.run.trace,
            }
            for curve in all_curves
        },
    }
    (out / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (out / PAGE).write_text(_page(all_curves, answers, figures, out), encoding="utf-8")
    return "\n".join([*_table(all_curves), "", *answers, f"Report: {out / PAGE}"])


def _default_speed(all_curves: Iterable[Curve]) -> float:
    """The speed that the slowest configuration gives one agent: all of them can be asked for it."""
    return min(max(point.speed for point in curve.points) for curve in all_curves)


def _request_lines(runs: Iterable[Run]) -> Iterable[str]:
    for run in runs:
        for record in run.records:
            yield json.dumps({"name": run.name, "agents": run.agents, "repeat": run.repeat} | asdict(record)) + "\n"


def _table(all_curves: Sequence[Curve]) -> list[str]:
    rows = [["", *COLUMNS]] + [[curve.name, *_cells(point)] for curve in all_curves for point in curve.points]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _cells(point: Point) -> list[str]:
    return [cell(point) for cell in COLUMNS.values()]


STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2em .6em;text-align:right;
border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}img{max-width:100%}
.answer{font-size:1.2em;background:#eef5ee;padding:.5em 1em;border-left:4px solid #4a4}code{font-size:.9em}"""


def _page(all_curves: Sequence[Curve], answers: Sequence[str], figures: dict[str, str], out: Path) -> str:
    def text(value: Any) -> str:
        return html.escape(str(value))

    rows = "".join(
        f"<tr><td>{text(curve.name)}</td>{''.join(f'<td>{text(cell)}</td>' for cell in _cells(point))}</tr>"
        for curve in all_curves
        for point in curve.points
    )
    heads = "".join(f"<th>{text(name)}</th>" for name in ["", *COLUMNS])
    pictures = "".join(
        f"<h2>{text(caption)}</h2><img alt='{text(caption)}' src='data:image/png;base64,"
        f"{base64.b64encode((out / file).read_bytes()).decode()}'>"
        for file, caption in figures.items()
    )
    conditions = "".join(
        f"<tr><td>{text(curve.name)}</td><td><code>{text(' '.join(curve.run.arguments) or 'no flags')}</code></td>"
        + "".join(f"<td>{text(value)}</td>" for value in curve.run.conditions.values())
        + "</tr>"
        for curve in all_curves
    )
    trace = all_curves[0].run.trace
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Agents: throughput and speed</title>"
        f"<style>{STYLE}</style><h1>How many agents, at what speed each?</h1>"
        + "".join(f"<p class='answer'>{text(line)}</p>" for line in answers)
        + f"<p>{trace['requests']} requests of {trace['sessions']} sessions; prompts of {trace['input_mean']:.0f} "
        f"tokens on average, {trace['input_max']} at most; answers of {trace['output_mean']:.1f}; trace "
        f"<code>{text(trace['digest'])}</code>. Only measured numbers of agents count; nothing is interpolated.</p>"
        f"<table><tr>{heads}</tr>{rows}</table>{pictures}<h2>Flags and conditions</h2>"
        f"<table>{conditions}</table></html>\n"
    )
