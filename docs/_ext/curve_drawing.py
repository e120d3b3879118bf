"""How `ced-tiny` was trained: loss and accuracy by step, from the curve that is kept with the recipe."""

from __future__ import annotations

import json
from itertools import groupby
from math import log10
from typing import Any

from svg import Svg
from tables import ROOT

CURVE = ROOT / "training" / "curve.jsonl"
_LEFT, _WIDTH, _HEIGHT, _TOP = 44.0, 560.0, 150.0, (30.0, 218.0)
_COLOURS = {"recall": "encoder", "edit": "decoder", "fact": "kv", "pattern": "window", "sum": "scale", "chat": "replay"}
_LOSSES = (0.01, 0.1, 1.0, 10.0)


def training_curve() -> tuple[Svg, str]:
    """Answer loss (log scale) above, accuracy by skill below; stages of the recipe as bands."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in CURVE.read_text().splitlines()]
    last = rows[-1]["step"]
    svg = Svg(760, 400, "Loss and accuracy of ced-tiny by step of its training")

    def x(step: float) -> float:
        return _LEFT + _WIDTH * step / last

    _stages(svg, rows, x)
    span = log10(_LOSSES[-1] / _LOSSES[0])
    for loss in _LOSSES:
        _grid(svg, 0, log10(loss / _LOSSES[0]) / span, f"{loss:g}")
    heights = [(x(row["step"]), min(1.0, max(0.0, log10(row["answer"] / _LOSSES[0]) / span))) for row in rows]
    svg.path([(at, _y(0, height)) for at, height in heights], "curve")
    svg.text(_LEFT + _WIDTH + 8, _y(0, heights[-1][1]) + 4, "loss on answers", "small")
    for share in (0.0, 0.5, 1.0):
        _grid(svg, 1, share, f"{100 * share:.0f} %")
    _accuracies(svg, [row for row in rows if "accuracy" in row], x)
    for step in range(0, last + 1, 500):
        svg.text(x(step), _TOP[1] + _HEIGHT + 16, str(step), "small", "middle")
    caption = (
        "Training of ced-tiny by step (4096 tokens each), stages of the recipe as bands. Above: loss on the answers. "
        "Below: share of right answers in 32 texts of 256 tokens never trained on. Drawn from training/curve.jsonl."
    )
    return svg, caption


def _y(panel: int, height: float) -> float:
    return _TOP[panel] + _HEIGHT * (1 - height)


def _grid(svg: Svg, panel: int, height: float, words: str) -> None:
    svg.line(_LEFT, _y(panel, height), _LEFT + _WIDTH, _y(panel, height), "faint")
    svg.text(_LEFT - 6, _y(panel, height) + 4, words, "small", "end")


def _stages(svg: Svg, rows: list[dict[str, Any]], x: Any) -> None:
    begin = 0
    for number, (name, group) in enumerate(groupby(rows, key=lambda row: row["stage"])):
        end = list(group)[-1]["step"]
        for top in _TOP:
            if number % 2 == 0:
                svg.box(x(begin), top, x(end) - x(begin), _HEIGHT, "idle pale", rounded=0)
        # every other name stands a line higher, since the first stages are narrow
        svg.text((x(begin) + x(end)) / 2, _TOP[0] - (6 if number % 2 else 18), name, "small", "middle")
        begin = end


def _accuracies(svg: Svg, rows: list[dict[str, Any]], x: Any) -> None:
    skills = [skill for skill in _COLOURS if skill in rows[-1]["accuracy"]]
    for skill in skills:
        points = [(x(row["step"]), _y(1, row["accuracy"].get(skill, 0.0))) for row in rows]
        svg.path(points, f"curve {_COLOURS[skill]}-line")
    for place, skill in enumerate(skills):
        svg.box(_LEFT + _WIDTH + 8, _TOP[1] + 8 + 22 * place, 12, 4, _COLOURS[skill])
        words = f"{skill} {100 * rows[-1]['accuracy'][skill]:.0f} %"
        svg.text(_LEFT + _WIDTH + 26, _TOP[1] + 14 + 22 * place, words, "small")
