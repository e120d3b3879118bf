"""`ced inspect DIR`: what a checkpoint is, from its config and its headers. Loads no tensor."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_ced.cache.layout import KV_FORMATS, CacheLayout
from sglang_ced.checkpoint.files import PartTotal, check, read_headers, totals_by_part
from sglang_ced.checkpoint.names import NOT_LOADED, CheckpointError, expected_tensors
from sglang_ced.config import CedConfig, ConfigError, LayerPlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", metavar="DIR", help="checkpoint directory: config.json and *.safetensors")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 and a line on stderr if the checkpoint cannot be served."""
    try:
        print(report(args.directory))
    except (CheckpointError, ConfigError, FileNotFoundError) as error:
        print(f"ced inspect: {error}", file=sys.stderr)
        return 1
    return 0


def report(path: str | os.PathLike[str]) -> str:
    """The report as text. Raises CheckpointError, ConfigError or FileNotFoundError, as opening it would."""
    path = Path(path)
    config = CedConfig.from_dir(path)
    tensors = read_headers(path)
    check(path, tensors, expected_tensors(config))
    totals = totals_by_part(tensors)
    sections = [_summary(path, config), _parts(totals), memory(config), _layers(config.layers)]
    if left := [part for part in totals if part in NOT_LOADED]:
        sections.append(f"Not loaded: {', '.join(left)} ({sum(totals[p].tensors for p in left)} tensors)")
    if config.unknown_fields:
        sections.append(f"Config fields not known here: {', '.join(config.unknown_fields)}")
    return "\n\n".join(sections)


def _summary(path: Path, c: CedConfig) -> str:
    return "\n".join(
        (
            f"{path}",
            f"  {c.num_encoder_layers} encoder + {c.num_decoder_layers} decoder layers, "
            f"hidden {c.hidden_size}, {c.num_attention_heads} heads of {c.head_dim}, "
            f"vocabulary {c.vocab_size}, context {c.max_position_embeddings}",
            f"  {c.n_routed_experts} routed experts, {c.num_experts_per_tok} per token; "
            f"linears {c.linear_format}, experts {c.expert_format}",
        )
    )


def _parts(totals: dict[str, PartTotal]) -> str:
    rows = [(part, f"{t.tensors:,}", f"{t.parameters:,}", f"{t.nbytes:,}") for part, t in totals.items()]
    sums = [sum(column) for column in zip(*((t.tensors, t.parameters, t.nbytes) for t in totals.values()), strict=True)]
    total = ("total", *(f"{value:,}" for value in sums))
    return _table(("part", "tensors", "parameters", "bytes"), [*rows, total], right=(1, 2, 3))


def memory(config: CedConfig) -> str:
    """What a token and a running request take, as a table."""
    layout = CacheLayout(config)
    per_token = {name: CacheLayout(config, name).global_bytes_per_token for name in KV_FORMATS}
    rows = [
        *((f"Global KV and index keys, {name}", f"{size}", "bytes per token") for name, size in per_token.items()),
        ("Windows", f"{layout.window_bytes_per_slot:,}", "bytes per running request"),
        ("Unpaired tokens", f"{layout.pending_bytes_per_slot:,}", "bytes per running request"),
    ]
    return _table(("cache", "size", ""), rows, right=(1,))


def _layers(plans: Sequence[LayerPlan]) -> str:
    header = ("layer", "half", "ratio", "mode", "KV from", "top-k from", "candidates from", "Engram")
    return _table(header, [_layer_row(plan) for plan in plans], right=(0, 2, 4, 5, 6))


def _layer_row(plan: LayerPlan) -> tuple[str, ...]:
    sources = (plan.kv_source, plan.index_source, plan.candidate_source)
    return (
        str(plan.index),
        "decoder" if plan.is_decoder else "encoder",
        str(plan.ratio),
        plan.mode,
        *("-" if source is None else str(source) for source in sources),
        "yes" if plan.has_engram else "-",
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    """Aligned columns, two spaces apart; the columns in `right` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, (header, *rows)))
