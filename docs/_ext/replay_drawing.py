"""Which rows run where in a prefill: a picture of what `plan_replay` answers."""

from __future__ import annotations

from svg import Svg

from sglang_ced.cache.replay import Replay, plan_replay
from sglang_ced.cli.models import bundled_path
from sglang_ced.config import CedConfig

_LEFT, _WIDTH = 112.0, 640.0
# Prompt and hit of the panels, in windows.
_PROMPT, _HIT = 16, 12


def replay_rows() -> tuple[Svg, str]:
    """Three prompts of `ced-tiny`: cold and after a hit, bounded and exact."""
    config = CedConfig.from_dir(bundled_path("ced-tiny"))
    prompt, hit = _PROMPT * config.sliding_window, _HIT * config.sliding_window
    panels: tuple[tuple[str, Replay, int], ...] = (
        ("bounded, cold", "bounded", 0),
        (f"bounded, {hit} tokens cached", "bounded", hit),
        (f"exact, {hit} tokens cached", "exact", hit),
    )
    svg = Svg(760, 44 + 118 * len(panels), "Which rows run where in bounded and exact replay")
    for i, (name, mode, cached) in enumerate(panels):
        _panel(svg, 16 + 118 * i, name, mode, cached, prompt, config)
    _legend(svg, 30 + 118 * len(panels))
    layers = config.num_hidden_layers
    caption = (
        f"Which rows run where, for a prompt of {prompt} tokens to ced-tiny: window {config.sliding_window}, "
        f"{config.first_decoder_layer} encoder and {layers - config.first_decoder_layer} decoder layers. A column is a "
        "token, from the first on the left to the last on the right; drawn from plan_replay."
    )
    return svg, caption


def _panel(svg: Svg, y: float, name: str, mode: Replay, hit: int, prompt: int, config: CedConfig) -> None:
    encoder, layers = config.first_decoder_layer, config.num_hidden_layers
    plan = plan_replay(mode, hit, prompt, prompt, config.sliding_window, encoder, layers - encoder)

    def x(token: int) -> float:
        return _LEFT + _WIDTH * token / prompt

    def span(row: int, start: int, end: int, kind: str) -> None:
        if end > start:
            svg.box(x(start), y + 14 + 26 * row, x(end) - x(start) - 1, 22, kind, rounded=0)

    svg.text(_LEFT, y + 6, name, "strong")
    for row, words in enumerate(("decoder layers", "encoder layers", "global KV")):
        svg.text(_LEFT - 8, y + 29 + 26 * row, words, anchor="end")
        span(row, 0, prompt, "idle")
    span(0, plan.decoder_start, min(hit, prompt), "replay")
    span(0, max(plan.decoder_start, hit), prompt, "decoder")
    span(1, plan.start, hit, "replay")
    span(1, max(plan.start, hit), prompt, "encoder")
    span(2, 0, hit, "kv pale")
    span(2, hit, prompt, "kv")
    marks = {plan.start, plan.decoder_start, hit, prompt, 0}
    for token in sorted(marks):
        anchor = "start" if token == 0 else "end" if token == prompt else "middle"
        svg.text(x(token), y + 104, str(token), "small", anchor)


def _legend(svg: Svg, y: float) -> None:
    x = 0.0
    for kind, words, width in (
        ("encoder", "new, encoder", 84),
        ("decoder", "new, decoder", 84),
        ("replay", "replayed: window KV alone", 150),
        ("idle", "do not run", 74),
        ("kv pale", "in the cache: read, not written", 168),
        ("kv", "written", 50),
    ):
        svg.box(x, y - 9, 12, 10, "idle")
        svg.box(x, y - 9, 12, 10, kind)
        svg.text(x + 17, y, words, "small")
        x += width + 20
