"""Tables that are read from the code while the pages are built, so that no number in them can drift.

    ```{ced-table} NAME
    ```

writes the table that the function NAME below gives: a header, then rows; all cells are Markdown.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import published
import results
from docutils import nodes
from docutils.statemachine import StringList
from prometheus_client import REGISTRY
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from sglang_ced import config_file, kernels
from sglang_ced.cache.layout import KV_FORMATS, CacheLayout, KvFormat
from sglang_ced.checkpoint.names import expected_tensors
from sglang_ced.cli.main import COMMANDS
from sglang_ced.cli.models import bundled_path
from sglang_ced.config import CedConfig
from sglang_ced.kernels import registry
from sglang_ced.plugin import engram
from sglang_ced.plugin import metrics as metrics_module
from sglang_ced.plugin.defaults import DEFAULTS
from sglang_ced.plugin.flags import Options
from sglang_ced.plugin.refusals import REFUSALS
from sglang_ced.plugin.seams import SEAMS

Row = tuple[str, ...]

ROOT = Path(__file__).parents[2]
# The released config.json where it differs from toy40, which has the same layer schedule in small widths.
RELEASED = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "moe_intermediate_size": 2304,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "engram_num_embeddings": [384006168, 384016682],
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_compressed_vocab_size": 99092,
}


def released(kv_format: KvFormat = "published") -> CacheLayout:
    """Cache layout of the released model."""
    return CacheLayout(CedConfig.from_dir(ROOT / "test" / "golden" / "data" / "toy40" / "model", RELEASED), kv_format)


def toy(kv_format: KvFormat = "published") -> CacheLayout:
    return CacheLayout(CedConfig.from_dir(bundled_path("ced-toy")), kv_format)


# -- caches -----------------------------------------------------------------------------------------------------------


def cache_records() -> Iterator[Row]:
    yield "record", "values", "code bytes", "scale bytes", "record bytes", "per layer and token"
    layout, plain = released(), released("bfloat16")
    group, ring = "one per group of 1 or 2 tokens, source layers only", "one per token in the ring, every layer"
    for name, record, unit in (
        ("global KV", layout.global_record, group),
        ("index key", layout.index_record, group),
        ("global KV, bfloat16", plain.global_record, group),
        ("index key, bfloat16", plain.index_record, group),
        ("window KV", layout.window_record, ring),
    ):
        yield name, *(str(n) for n in (record.dim, record.code_bytes, record.scale_bytes, record.nbytes)), unit


def cache_sizes() -> Iterator[Row]:
    yield "", "released shape", "`ced-toy`"
    layouts = (released(), toy())
    for name in KV_FORMATS:
        sizes = (shape(name).global_bytes_per_token for shape in (released, toy))
        yield f"global KV and index keys, {name}, bytes per token", *(f"{size:,.1f}" for size in sizes)
    yield "ring capacity, tokens", *(str(c.ring_capacity) for c in layouts)
    yield "window rings, bytes per running request", *(f"{c.window_bytes_per_slot:,}" for c in layouts)
    yield "pending pairs, bytes per running request", *(f"{c.pending_bytes_per_slot:,}" for c in layouts)


def cache_sources() -> Iterator[Row]:
    yield "source layer", "tokens per group", "global KV + index key, bytes per group", "bytes per token", "as bfloat16"
    layout, plain = released(), released("bfloat16")
    group, wide = (each.global_record.nbytes + each.index_record.nbytes for each in (layout, plain))
    for source in layout.sources:
        ratio = layout.ratio(source)
        yield str(source), str(ratio), f"{group} ({wide} as bfloat16)", f"{group / ratio:.0f}", f"{wide / ratio:.0f}"
    yield "all", "", "", f"**{layout.global_bytes_per_token:.0f}**", f"**{plain.global_bytes_per_token:.0f}**"


def context_memory() -> Iterator[Row]:
    yield "tokens cached", "global KV and index keys, published", "as bfloat16"
    layouts = [released(name) for name in KV_FORMATS]
    for tokens in (32_768, 131_072, 1_048_576):
        yield f"{tokens:,}", *(f"{tokens * each.global_bytes_per_token / 1e6:,.0f} MB" for each in layouts)
    slot = layouts[0].window_bytes_per_slot + layouts[0].pending_bytes_per_slot
    yield "and each running request, whatever its length", *[f"{slot / 1e6:.1f} MB"] * 2


def layer_plan() -> Iterator[Row]:
    yield "layers", "half", "ratio", "mode", "KV and index keys of", "top-k of", "candidates of", "Engram"
    config, start = released().config, 0
    for end in range(1, config.num_hidden_layers + 1):
        kinds = [(p.ratio, p.mode, p.kv_source, p.index_source, p.candidate_source, p.has_engram, p.is_decoder)
                 for p in config.layers[start : end + 1]]  # fmt: skip
        if len(set(kinds[-2:])) == 1 and end < config.num_hidden_layers:
            continue
        plan, last = config.layers[start], end - 1
        sources = (plan.kv_source, plan.index_source, plan.candidate_source)
        yield (
            str(start) if start == last else f"{start}-{last}",
            "decoder" if plan.is_decoder else "encoder",
            str(plan.ratio),
            plan.mode,
            *("–" if source is None else str(source) for source in sources),
            "yes" if plan.has_engram else "–",
        )
        start = end


# -- options ----------------------------------------------------------------------------------------------------------


def flags() -> Iterator[Row]:
    yield "flag", "environment variable", "default", "meaning"
    for option in fields(Options):
        flag = option.name.replace("_", "-")
        if isinstance(option.default, bool):
            flag, default = f"`--{flag}`, `--no-{flag}`", "on" if option.default else "off"
            values = "`1` or `0`"
        else:
            flag, default = f"`--{flag}`", f"`{option.default}`"
            choices = option.metadata.get("choices")
            values = " or ".join(f"`{choice}`" for choice in choices) if choices else "as the flag"
        yield flag, f"`{option.metadata['env']}`: {values}", default, option.metadata["help"]


def defaults() -> Iterator[Row]:
    yield "option of SGLang", "default here", "why"
    for default in DEFAULTS:
        yield f"`{_flag(default.name)}`", f"`{default.value}`", default.why


def refusals() -> Iterator[Row]:
    yield "option of SGLang", "what the launch says"
    for refusal in REFUSALS:
        yield f"`{_flag(refusal.field)}`", refusal.why


def commands() -> Iterator[Row]:
    yield "command", "what it does"
    for name, summary in COMMANDS.items():
        yield f"`ced {name}`", summary


def metrics() -> Iterator[Row]:
    yield "metric", "kind", "meaning"
    metrics_module._Exporters.make({"model_name": ""})
    engram.Exporters.make({"model_name": ""}, 0.0, False)
    for metric in REGISTRY.collect():
        if metric.name.startswith(metrics_module.PREFIX):
            yield f"`{metric.name.removeprefix(metrics_module.PREFIX)}`", metric.type, metric.documentation


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


# -- config, checkpoint, kernels, seams -------------------------------------------------------------------------------


def fixed_fields() -> Iterator[Row]:
    yield "field", "the one value that is served"
    for name, value in config_file.FIXED.items():
        yield f"`{name}`", f"`{value!r}`"


def tensors() -> Iterator[Row]:
    yield "tensor", "shape in values", "stored as"
    for name, spec in expected_tensors(released().config).items():
        of_layer = name.startswith(("layers.1.engram.", "layers.2.")) or not name.startswith("layers.")
        if of_layer and (".experts." not in name or ".experts.0." in name):
            stored = str(spec.kind) + (", optional" if spec.optional else "")
            yield f"`{name}`", " × ".join(map(str, spec.shape)), stored


def ops() -> Iterator[Row]:
    yield "op", "fast CPU version offered by", "Triton version"
    for room in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"sglang_ced.kernels.{room.name}")
    for name, each in sorted(registry.OPS.items()):
        yield f"`{name}`", "`sgl-kernel-ext`" if _has_wrapper(each) else "–", "yes" if "triton" in each.fast else "–"


def _has_wrapper(each: registry.Op[..., object]) -> bool:
    """Whether kernels/cpu.py has one, be the package installed or not."""
    module, name = each.name.split(".")
    return f"@_fast({module}.{name}," in (Path(kernels.__path__[0]) / "cpu.py").read_text()


def seams() -> Iterator[Row]:
    yield "name, below `sglang.srt`", "checked in", "wrapped", "needed for"
    for seam in SEAMS:
        yield f"`{seam.path.replace(':', ' : ')}`", seam.stage, "yes" if seam.hooked else "–", seam.why


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    each.__name__.replace("_", "-"): each
    for each in (cache_records, cache_sizes, cache_sources, context_memory, layer_plan, flags, defaults, refusals,
                 commands, metrics, fixed_fields, tensors, ops, seams)
}  # fmt: skip
TABLES |= results.TABLES | published.TABLES


class CedTable(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        header, *rows = TABLES[self.arguments[0]]()
        lines = [_line(header), _line(["---"] * len(header)), *map(_line, rows)]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source=__file__), self.content_offset, container)
        return container.children


def _line(cells: Row | list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("ced-table", CedTable)
    return {"parallel_read_safe": True}
