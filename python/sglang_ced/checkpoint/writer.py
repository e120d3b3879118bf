"""Writes checkpoints of any shape in the published layout: from float tensors, or from a seed.

Tensors go by the names of `names.expected_tensors`, which are those of a published file without the scales:
`layers.0.attn.wq_a.weight`, `layers.0.hc_attn_fn`. They are quantised to the form the config asks for.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_ced.checkpoint.files import INDEX_FILE, SINGLE_FILE, listed
from sglang_ced.checkpoint.names import Kind, TensorSpec, expected_tensors, scale_name
from sglang_ced.config import CedConfig
from sglang_ced.formats import E2m1Weight, quantize_e2m1_ue8m0, quantize_e4m3, quantize_weight_e4m3

SHARD_BYTES = 5 << 30
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor | E2m1Weight]]


def write_checkpoint(
    path: str | os.PathLike[str],
    raw_config: dict[str, Any],
    tensors: Tensors,
    *,
    shard_bytes: int = SHARD_BYTES,
    tokenizer_from: str | os.PathLike[str] | None = None,
    norm_dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a checkpoint directory: config.json (`raw_config` as it is), generation_config.json, weights.

    tensors: float tensors of the shapes that `expected_tensors` gives, in any order; may be a generator, and
        is drawn from shard by shard, so that at most `shard_bytes` and one tensor are held. An fp4 weight may also
        come in its stored form.
    tokenizer_from: a directory whose tokenizer files are copied.
    norm_dtype: bfloat16 or float32, the two that published norm weights are met in.

    The directory appears complete or not at all. Raises FileExistsError if `path` exists and is not empty,
    ConfigError, and ValueError for a tensor that is missing, unknown, given twice, misshapen or not finite.
    """
    path = Path(path)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError(f"{path}: exists and is not empty")
    expected = expected_tensors(CedConfig.from_dict(raw_config))
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.parent / f".{path.name}.{os.getpid()}.partial"
    staging.mkdir()
    try:
        _write_shards(staging, _shards(_stored(pairs, expected, norm_dtype), shard_bytes))
        _write_json(staging / "config.json", raw_config)
        _write_json(staging / "generation_config.json", _generation_config(raw_config))
        for name in TOKENIZER_FILES if tokenizer_from is not None else ():
            shutil.copyfile(Path(tokenizer_from or "") / name, staging / name)
        os.replace(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def write_random_checkpoint(
    path: str | os.PathLike[str], raw_config: dict[str, Any], seed: int = 0, *, fp4_codes: bool = False, **options: Any
) -> None:
    """`write_checkpoint` with `random_tensors`, or `random_tensors_fp4` if `fp4_codes`: same options, same errors.
    Same seed, same bytes."""
    config = CedConfig.from_dict(raw_config)
    tensors = random_tensors_fp4(config, seed) if fp4_codes else random_tensors(config, seed)
    write_checkpoint(path, raw_config, tensors, **options)


# -- stored form ---------------------------------------------------------------------------------------------


def encode(
    name: str, value: Tensor | E2m1Weight, spec: TensorSpec, norm_dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """The tensors that store `value`, by name, in the dtypes of the file.

    Raises ValueError for a stored fp4 weight where the config asks for another form.
    """
    if isinstance(value, E2m1Weight):
        if spec.kind is not Kind.FP4:
            raise ValueError(f"{name}: given as fp4, but the config stores it as {spec.kind}")
        codes, scales = value.packed, value.scales
        return {name: codes.view(torch.int8), scale_name(name): scales.view(torch.float8_e8m0fnu)}
    value = value.detach().cpu()
    if spec.kind is Kind.FP8:
        codes, scales = quantize_weight_e4m3(value)
    elif spec.kind is Kind.TABLE:
        codes, scales = quantize_e4m3(value)
    elif spec.kind is Kind.FP4:
        codes, scales = quantize_e2m1_ue8m0(value)
    else:
        dtype = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16, Kind.PLAIN: norm_dtype}[spec.kind]
        return {name: value.to(dtype, copy=True).contiguous()}  # a copy, as tied tensors cannot be saved
    stored = torch.int8 if spec.kind is Kind.FP4 else torch.float8_e4m3fn
    return {name: codes.view(stored), scale_name(name): scales.view(torch.float8_e8m0fnu)}


def _stored(
    pairs: Iterable[tuple[str, Tensor | E2m1Weight]], expected: dict[str, TensorSpec], norm_dtype: torch.dtype
) -> Iterator[dict[str, Tensor]]:
    left = dict(expected)
    for name, value in pairs:
        spec = left.pop(name, None)
        if spec is None:
            raise ValueError(f"{name}: {'given twice' if name in expected else 'no such tensor in this config'}")
        if tuple(value.shape) != spec.shape:
            raise ValueError(f"{name}: shape {list(value.shape)}, expected {list(spec.shape)}")
        if isinstance(value, Tensor) and not value.isfinite().all():
            raise ValueError(f"{name}: not finite")
        yield encode(name, value, spec, norm_dtype)
    if missing := [name for name, spec in left.items() if not spec.optional]:
        raise ValueError(f"missing tensors: {listed(missing)}")


def _shards(stored: Iterable[dict[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Fill shards in order; a tensor and its scale stay together, and a larger one has a shard of its own."""
    shard: dict[str, Tensor] = {}
    size = 0
    for group in stored:
        nbytes = sum(t.nbytes for t in group.values())
        if shard and size + nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard |= group
        size += nbytes
    yield shard


def _write_shards(directory: Path, shards: Iterable[dict[str, Tensor]]) -> None:
    """One file, or numbered shards and an index; how many there are shows only at the end."""
    contents: list[tuple[Path, list[str]]] = []
    total = 0
    for shard in shards:
        file = directory / f"{len(contents)}.partial"
        save_file(shard, file, metadata={"format": "pt"})
        file.chmod(0o666 & ~_umask())  # safetensors makes it readable to its owner alone
        contents.append((file, list(shard)))
        total += sum(t.nbytes for t in shard.values())
    if len(contents) == 1:
        contents[0][0].rename(directory / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(contents, 1):
        final = f"model-{number:05}-of-{len(contents):05}.safetensors"
        file.rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _generation_config(raw_config: dict[str, Any]) -> dict[str, Any]:
    text = raw_config.get("text_config", {})
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: text.get(name, raw_config.get(name)) for name in names}
    return {name: value for name, value in ids.items() if value is not None} | {"do_sample": False}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# -- random weights ------------------------------------------------------------------------------------------


def random_tensors(config: CedConfig, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """float32 values for every expected tensor, one at a time: a network that neither dies nor explodes.

    A tensor's values depend on the seed and its name alone, and come from numpy, whose stream does not depend
    on the machine.
    """
    for name, spec in expected_tensors(config).items():
        yield name, _random_values(name, spec, config, seed)


def random_tensors_fp4(config: CedConfig, seed: int = 0) -> Iterator[tuple[str, Tensor | E2m1Weight]]:
    """`random_tensors` whose fp4 weights are drawn as uniform codes: a fiftieth of the time, for checkpoints that only
    have to be large."""
    for name, spec in expected_tensors(config).items():
        if spec.kind is Kind.FP4:
            yield name, _random_codes(_generator(name, seed), *spec.shape)
        else:
            yield name, _random_values(name, spec, config, seed)


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _random_values(name: str, spec: TensorSpec, config: CedConfig, seed: int) -> Tensor:
    noise = _generator(name, seed).standard_normal(spec.shape, np.float32)
    return _initial(name, torch.from_numpy(noise), config.hc_mult)


def _random_codes(generator: np.random.Generator, rows: int, columns: int) -> E2m1Weight:
    """Uniform codes, whose mean square is 8.56, and scales for values of about 1 / sqrt(columns)."""
    packed = np.frombuffer(generator.bytes(rows * columns // 2), np.uint8).reshape(rows, -1)
    exponent = math.floor(-math.log2(columns * 8.56) / 2)
    scales = generator.integers(127 + exponent, 129 + exponent, (rows, columns // 32), np.uint8)
    return E2m1Weight(torch.from_numpy(packed.copy()), torch.from_numpy(scales))


def _initial(name: str, noise: Tensor, streams: int) -> Tensor:
    leaf = name.rpartition(".")[2]
    if leaf in ("q_weight", "k_weight") or name.endswith("norm.weight"):
        return 1 + 0.1 * noise
    if leaf.startswith("hc_") and leaf.endswith("_scale"):
        return 0.5 + 0.05 * noise
    if leaf.startswith("hc_") and leaf.endswith("_base"):
        return _mix_bias(streams) + 0.3 * noise
    if leaf in ("bias", "bias_vl"):
        return 0.1 * noise
    if leaf == "attn_sink" or ("embed" in name and noise.dim() == 2):
        return noise
    return noise / math.sqrt(noise.shape[-1])


def _mix_bias(streams: int) -> Tensor:
    """With this bias streams collapse to their mean, are written to with weight 1, and mix little."""
    collapse = torch.full((streams,), -math.log(max(streams - 1, 1)))
    return torch.cat((collapse, torch.zeros(streams), 2 * torch.eye(streams).flatten()))
