"""A checkpoint's like with n-gram tables of any size, for tables that are not to fit.

Everything but the tables is copied; these get a shard of their own, written in a stream or left as a hole.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import save_file

from sglang_ced.checkpoint.files import INDEX_FILE
from sglang_ced.checkpoint.names import expected_tensors, scale_name
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.config import CedConfig

TABLES, OTHERS = "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"
_BLOCK = 32 << 20


def enlarge(source: Path, target: Path, table_vocab: int, *, sparse: bool) -> None:
    """Write `target`: checkpoint `source` with `engram_vocab_size` table_vocab, and so about
    (engram_max_ngram_size - 1) * engram_n_heads * table_vocab rows a table.

    sparse: the tables are holes of zeros, which take no disk. Else they hold finite random rows, of the same few MiB
    over and over. The other weights keep their values.
    """
    raw = _config(source, table_vocab)
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for file in source.glob("*.json"):
        if file.name not in ("config.json", INDEX_FILE):
            shutil.copyfile(file, target / file.name)
    old = Checkpoint.open(source)
    names = [n for layer in old.config.engram_layer_ids for n in _table_names(layer)]
    others = {}
    for shard in sorted(source.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as stored:
            others |= {name: stored.get_tensor(name) for name in stored.keys() if name not in names}  # noqa: SIM118
    save_file(others, target / OTHERS, metadata={"format": "pt"})
    _write_tables(target / TABLES, CedConfig.from_dict(raw), names, sparse)
    weight_map = dict.fromkeys(others, OTHERS) | dict.fromkeys(names, TABLES)
    (target / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")


def _table_names(layer: int) -> tuple[str, str]:
    name = f"layers.{layer}.engram.embed.weight"
    return name, scale_name(name)


def table_fields(raw: dict[str, Any], table_vocab: int, **fields: int) -> dict[str, Any]:
    """Text fields that give a config tables of `table_vocab`, and other `fields`; their rows are as the hash needs."""
    fields = {"engram_vocab_size": table_vocab, **fields}
    hashes = dataclasses.replace(CedConfig.from_dict(raw), **fields).engram_hashes
    return fields | {"engram_num_embeddings": [each.num_rows for each in hashes.values()]}


def _config(source: Path, table_vocab: int) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    raw.get("text_config", raw).update(table_fields(raw, table_vocab))
    return raw


def _write_tables(file: Path, config: CedConfig, names: list[str], sparse: bool) -> None:
    header, end = {}, 0
    specs = {n: part for name, spec in expected_tensors(config).items() for n, part in spec.stored(name).items()}
    for name in names:
        begin, end = end, end + math.prod(specs[name].shape)
        dtype = "F8_E8M0" if name.endswith("scale") else "F8_E4M3"
        header[name] = {"dtype": dtype, "shape": list(specs[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)
        for name in names if not sparse else ():
            begin, end = header[name]["data_offsets"]
            _fill(out.fileno(), 8 + len(text) + begin, end - begin, _scales if name.endswith("scale") else _codes)


def _fill(fd: int, offset: int, size: int, block: Callable[[], bytes]) -> None:
    data = block()
    for done in range(0, size, _BLOCK):
        os.pwrite(fd, data[: min(_BLOCK, size - done)], offset + done)


def _codes() -> bytes:
    """e4m3 codes of finite numbers."""
    codes = np.random.default_rng(0).integers(0, 254, _BLOCK, np.uint8)
    return np.where(codes >= 127, codes + 1, codes).astype(np.uint8).tobytes()


def _scales() -> bytes:
    """ue8m0 scales around 2**-9, which bring the codes to about 1."""
    return np.random.default_rng(1).integers(116, 119, _BLOCK, np.uint8).tobytes()
