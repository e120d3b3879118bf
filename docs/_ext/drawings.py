"""Drawings that are made from the code while the pages are built, so that nothing in them can drift.

    ```{ced-drawing} NAME
    ```

draws what the function NAME below gives: a picture and its caption. They follow the light or dark theme of the page.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from html import escape

from curve_drawing import training_curve
from docutils import nodes
from replay_drawing import replay_rows
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from svg import Svg
from tables import ROOT, released

from sglang_ced.config import LayerPlan
from sglang_ced.formats import Record

Drawing = tuple[Svg, str]


# -- the model --------------------------------------------------------------------------------------------------------

_STEP, _LEFT = 16.5, 46.0


def model() -> Drawing:
    """Layers, what each keeps, and who reads whose global KV: from the layer plan of the released model."""
    config, layout = released().config, released()
    layers, cut = config.layers, config.first_decoder_layer
    svg = Svg(760, 372, "The layers of the model: encoder, decoder, global KV and windows")

    def x(layer: int) -> float:
        return _LEFT + layer * _STEP

    svg.brace(x(0), x(cut) - 3, 34, f"encoder: layers 0 to {cut - 1}")
    svg.brace(x(cut), x(len(layers)) - 2, 34, f"decoder: layers {cut} to {len(layers) - 1}")
    svg.text(4, 86, "tokens")
    svg.arrow(8, 94, _LEFT - 4, 94)
    for plan in layers:
        svg.box(x(plan.index), 64, _STEP - 2, 60, _colour(plan))
        svg.box(x(plan.index), 128, _STEP - 2, 16, "window")
        if plan.has_engram:
            svg.text(x(plan.index) + _STEP / 2 - 1, 57, "E", "strong", "middle")
        if plan.owns_selection:
            svg.text(x(plan.index) + _STEP / 2 - 1, 98, "S", "on", "middle")
    svg.arrow(x(len(layers)) - 1, 94, 750, 94)
    svg.text(752, 86, "logits", anchor="end")
    _global_kv(svg, x)
    _legend(svg, config.sliding_window)
    size = layout.global_bytes_per_token
    caption = (
        f"The released model. Layers {', '.join(map(str, layout.sources[:-1]))} and {layout.sources[-1]} (dark edge) "
        "write global KV; every other layer with a ratio reads the one drawn below it, the whole decoder that of layer "
        f"{layout.sources[-1]}. The prefix cache keeps the green row alone: {size:.0f} bytes a token. The violet "
        f"row, {layout.window_record.nbytes} bytes per token and layer, is kept for the last {config.sliding_window} "
        "tokens of running requests only, and is rebuilt by replay after a cache hit."
    )
    return svg, caption


def _colour(plan: LayerPlan) -> str:
    return ("decoder" if plan.is_decoder else "encoder") + ("" if plan.ratio else " pale")


def _global_kv(svg: Svg, x: Callable[[int], float]) -> None:
    layout, layers = released(), released().config.layers
    ends = [*layout.sources[1:], len(layers)]
    for source, end in zip(layout.sources, ends, strict=True):
        svg.box(x(source), 190, x(end) - x(source) - 4, 40, "kv")
        middle = (x(source) + x(end)) / 2 - 2
        svg.text(middle, 207, f"of layer {source}", "on", "middle")
        ratio = layout.ratio(source)
        svg.text(middle, 222, f"1 per {ratio} tokens" if ratio > 1 else "1 per token", "on", "middle")
        svg.box(x(source), 64, _STEP - 2, 60, "frame")
        svg.arrow(x(source) + 5, 146, x(source) + 5, 188)
        for plan in layers[source:end]:
            if plan.index != source:
                svg.line(x(plan.index) + _STEP / 2 - 1, 188, x(plan.index) + _STEP / 2 - 1, 146, "faint")


def _legend(svg: Svg, window: int) -> None:
    rows = (
        ("encoder", "encoder layer; pale: it has no ratio and sees its window alone"),
        ("decoder", "decoder layer"),
        ("window", f"window KV: own keys and values of the last {window} tokens, in every layer"),
        ("kv", "global KV and index keys: written once per token, read by the layers above"),
    )
    for i, (kind, words) in enumerate(rows):
        svg.box(_LEFT, 252 + 20 * i, 14, 12, kind)
        svg.text(_LEFT + 22, 262 + 20 * i, words)
    svg.text(_LEFT + 3, 344, "E", "strong")
    svg.text(_LEFT + 22, 344, "n-gram memory (Engram) is added before this layer")
    svg.text(_LEFT + 3, 364, "S", "strong")
    svg.text(_LEFT + 22, 364, "this layer selects groups by its index; those after it reuse the selection")


# -- bytes ------------------------------------------------------------------------------------------------------------


def kv_records() -> Drawing:
    """The three records to one scale of bytes, from CacheLayout."""
    layout = released()
    records = (
        ("global KV", layout.global_record, "e2m1", "e4m3"),
        ("index key", layout.index_record, "e2m1", "ue8m0"),
        ("window KV", layout.window_record, "e4m3", "ue8m0"),
    )
    svg = Svg(760, 20 + 76 * len(records), "Bytes of the three kinds of records")
    scale = 590 / max(record.nbytes for _, record, *_ in records)
    for i, (name, record, code, factor) in enumerate(records):
        _record(svg, 30 + 76 * i, scale, name, record, code, factor)
    caption = "Records of the released model, drawn to one scale. Offsets are bytes from the start of a record."
    return svg, caption


def _record(svg: Svg, y: float, scale: float, name: str, record: Record, code: str, factor: str) -> None:
    left, codes, end = 90.0, 90 + scale * record.code_bytes, 90 + scale * record.nbytes
    per_byte, block = record.dim // record.code_bytes, record.dim // record.scale_bytes
    svg.text(0, y + 19, name, "strong")
    svg.box(left, y, codes - left, 28, "kv" if name != "window KV" else "window")
    svg.box(codes, y, end - codes, 28, "scale")
    words = f"{record.dim} × {code}" + (", two per byte" if per_byte == 2 else "")
    if codes - left > 8 * len(words):
        svg.text((left + codes) / 2, y + 18, words, "code-on", "middle")
        svg.text(end + 4, y + 18, f"{record.nbytes} bytes", "small")
    else:
        svg.text(end + 8, y + 18, f"{words}; {record.nbytes} bytes")
    svg.text(left, y + 42, "0", "small", "middle")
    svg.text(codes, y + 42, str(record.code_bytes), "small", "end" if end - codes < 24 else "middle")
    svg.text(end, y + 42, str(record.nbytes), "small", "start" if end - codes < 24 else "middle")
    words = f"{record.scale_bytes} × {factor}, one per {block} values"
    if end < 550:
        svg.text(end + 26, y + 42, words, "small")
    else:
        svg.text(codes - 34, y + 42, words, "small", "end")


def kv_nibbles() -> Drawing:
    """The first bytes of a packed record: which nibble is which value, and which scale is whose."""
    record = released().global_record
    block = record.dim // record.scale_bytes
    svg = Svg(760, 128, "The first bytes of a packed record")
    width = 40.0
    for byte in range(8):
        x = 90 + byte * 2 * width
        svg.text(x + width, 20, f"byte {byte}", "small", "middle")
        svg.box(x, 28, width - 1, 26, "kv pale")
        svg.box(x + width, 28, width - 3, 26, "kv")
        svg.text(x + width / 2, 45, str(2 * byte + 1), "code", "middle")
        svg.text(x + width * 1.5, 45, str(2 * byte), "code-on", "middle")
    svg.text(0, 45, "values")
    svg.text(90 + width / 2, 70, "high bits", "small", "middle")
    svg.text(90 + width * 1.5, 70, "low bits", "small", "middle")
    svg.box(90, 86, 8 * 2 * width - 3, 22, "scale")
    words = f"scale 0, at byte {record.code_bytes}: values 0 to {block - 1}"
    svg.text(90 + 8 * width, 101, words, "code-on", "middle")
    caption = (
        "Global KV, byte by byte: the even value lies in the low four bits, the odd one in the high four. Value i is "
        f"its e2m1 code times the scale at byte {record.code_bytes} + i // {block}."
    )
    return svg, caption


def kv_token() -> Drawing:
    """What one cached token takes, by source layer."""
    layout = released()
    group = layout.global_record.nbytes + layout.index_record.nbytes
    total, scale = layout.global_bytes_per_token, 660 / layout.global_bytes_per_token
    svg, x = Svg(760, 112, "Bytes of one cached token by source layer"), 40.0
    for source in layout.sources:
        ratio = layout.ratio(source)
        kv, index = (r.nbytes / ratio * scale for r in (layout.global_record, layout.index_record))
        svg.box(x, 34, kv - 1, 34, "kv")
        svg.box(x + kv, 34, index - 2, 34, "scale")
        svg.text(x + kv / 2, 55, f"layer {source}", "on", "middle")
        words = f"{group / ratio:.0f} = {group} / {ratio}" if ratio > 1 else f"{group}"
        svg.text(x + (kv + index) / 2, 84, words, "small", "middle")
        x += kv + index
    svg.brace(40, x - 2, 22, f"{total:.0f} bytes for every cached token")
    svg.box(40, 96, 12, 10, "kv")
    svg.text(58, 105, "global KV", "small")
    svg.box(130, 96, 12, 10, "scale")
    svg.text(148, 105, "index keys", "small")
    return svg, "What the prefix cache keeps of a token of the released model, by source layer."


def kv_page() -> Drawing:
    """A page of token slots, and the groups behind them."""
    svg = Svg(760, 190, "A page of token slots and the groups behind them")
    cell = 38.0
    svg.text(0, 40, "token slot")
    svg.text(0, 96, "ratio 1")
    svg.text(0, 156, "ratio 2")
    for slot in range(16):
        x = 100 + slot * cell + (12 if slot > 7 else 0)
        svg.box(x, 22, cell - 2, 26, "idle")
        svg.text(x + cell / 2 - 1, 40, str(slot), "code", "middle")
        svg.line(x + cell / 2 - 1, 49, x + cell / 2 - 1, 78, "faint")
        svg.box(x, 78, cell - 2, 26, "kv")
        svg.text(x + cell / 2 - 1, 96, str(slot), "code-on", "middle")
        if slot % 2 == 0:
            svg.box(x, 138, 2 * cell - 2, 26, "kv")
            svg.text(x + cell - 1, 156, str(slot // 2), "code-on", "middle")
    svg.text(100, 182, "group of slot s = s // ratio", "small")
    for page, x in ((0, 100.0), (1, 100 + 8 * cell + 12)):
        svg.text(x + 4 * cell, 14, f"page {page}", "small", "middle")
    caption = (
        "Token slots and groups, drawn with pages of 8 (the default is 64). Both tokens of a pair lie side by side in "
        "one page, which is why the page size must be even."
    )
    return svg, caption


# -- the house --------------------------------------------------------------------------------------------------------

_ROOMS = {
    "cli": "the ced command",
    "bench": "traces, load on a server, reports",
    "plugin": "the only room that imports sglang: platform, flags, model class, attention backend, KV pool",
    "engine": "drives model and caches without SGLang",
    "model": "the architecture on flat rows; owns weights, keeps nothing between steps",
    "cache": "what outlives a step: global KV, windows, replay plan",
    "engram_store": "n-gram tables, and how their rows get here",
    "kernels": "ops over tensors, each with its reference; knows no model",
    "checkpoint": "the published layout: names, reader, writer",
    "formats": "number formats: round, pack, unpack",
    "config": "what each layer owns, reads and shares",
    "config_file": "the published config.json, read by name and type",
}
_FLOOR, _HALL = 44, 600.0


def house() -> Drawing:
    """The floors, from the import contract in pyproject.toml. A new room must be described in _ROOMS."""
    floors = list(_floors())
    svg = Svg(760, 40 + _FLOOR * len(floors), "The floors of the package: imports point down")
    tops = {room: 12 + _FLOOR * i for i, floor in enumerate(floors) for room in floor}
    for floor in floors:
        width = _HALL / len(floor)
        for i, room in enumerate(floor):
            svg.box(150 + i * width, tops[room], width - 3, _FLOOR - 5, _floor_colour(floor[0]))
            svg.text(162 + i * width, tops[room] + 16, room, "on code-on")
            svg.text(162 + i * width, tops[room] + 31, _purpose(room), "on-small")
    middle = _FLOOR / 2 - 3
    svg.box(0, tops["plugin"] + 4, 118, 32, "idle")
    svg.text(59, tops["plugin"] + 24, "SGLang", "strong", "middle")
    svg.arrow(150, tops["plugin"] + middle, 120, tops["plugin"] + middle)
    svg.box(0, tops["formats"] - 60, 118, 32, "frame")
    svg.text(59, tops["formats"] - 40, "reference.py", "code", "middle")
    svg.line(59, tops["formats"] - 28, 59, tops["formats"] + middle)
    svg.arrow(59, tops["formats"] + middle, 148, tops["formats"] + middle)
    svg.arrow(140, 14, 140, 8 + _FLOOR * len(floors))
    svg.text(132, 22, "imports", "small", "end")
    beside = "beside the house: sgl-kernel-ext (C++ kernels, loaded by kernels), test, benchmark, training, docs, tools"
    svg.text(150, 30 + _FLOOR * len(floors), beside, "small")
    caption = (
        "The house. Every import points down; reference.py stands apart and reads formats and config alone. "
        "Drawn from the import contract that test/unit/test_layers.py checks."
    )
    return svg, caption


def _floors() -> Iterator[list[str]]:
    """Rooms of each floor, from the top."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for floor in next(contract["layers"] for contract in contracts if contract["id"] == "floors"):
        yield floor.split(" | ")


def _purpose(room: str) -> str:
    if room not in _ROOMS:
        raise ValueError(
            f"pyproject.toml has a room {room!r} that docs/_ext/drawings.py does not describe: add it to _ROOMS"
        )
    return _ROOMS[room]


def _floor_colour(name: str) -> str:
    return {"plugin": "decoder", "cli": "encoder", "engine": "encoder", "model": "encoder"}.get(name, "kv")


DRAWINGS: dict[str, Callable[[], Drawing]] = {
    each.__name__.replace("_", "-"): each
    for each in (model, kv_records, kv_nibbles, kv_token, kv_page, house, replay_rows, training_curve)
}


class CedDrawing(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        svg, caption = DRAWINGS[self.arguments[0]]()
        figure = f'<figure class="ced-drawing" tabindex="0">{svg}<figcaption>{escape(caption)}</figcaption></figure>'
        return [nodes.raw("", figure, format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("ced-drawing", CedDrawing)
    return {"parallel_read_safe": True}
