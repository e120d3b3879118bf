"""Which shard holds which tensor, and is that what the config asks for? Reads headers only, without torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sglang_ced.checkpoint.names import NOT_LOADED, PARTS, UNKNOWN, CheckpointError, TensorSpec, part_of

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_NAMES = 20
_DTYPE_BITS = re.compile(r"[A-Z]+(\d+)")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a shard, as the shard's header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        bits = _DTYPE_BITS.match(self.dtype)  # F32, BF16, F8_E4M3, I8; BOOL has no number and is a byte
        return math.prod(self.shape) * (int(bits[1]) if bits else 8) // 8

    @property
    def parameters(self) -> int:
        """Values of the model held here: two per byte of packed fp4; a block scale is none."""
        return {"F8_E8M0": 0, "I8": 2}.get(self.dtype, 1) * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class StoredRows:
    """Where the rows of a tensor of bytes lie: row i at `offset + i * width` of `file`, for i < `count`."""

    file: Path
    offset: int
    count: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.count * self.width


def rows_of(name: str, stored: StoredTensor) -> StoredRows:
    """Where tensor `name`, of one byte per value and two dimensions, lies in its shard.

    Raises CheckpointError if the shard ends before the tensor does.
    """
    with stored.file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        begin, end = json.loads(stream.read(length))[name]["data_offsets"]
    size = stored.file.stat().st_size
    if size < 8 + length + end:
        raise CheckpointError(f"{stored.file}: truncated: {size} bytes, but {name} ends at {8 + length + end}")
    count, width = stored.shape
    return StoredRows(stored.file, 8 + length + begin, count, width)


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in directory `path`, by name.

    Files: those named by `model.safetensors.index.json`, else `model.safetensors`, else all `*.safetensors`.
    Raises CheckpointError if there are none, one is missing or cannot be read, or index and shards disagree.
    """
    index = path / INDEX_FILE
    if index.is_file():
        return _indexed(path, _read_index(index))
    single = path / SINGLE_FILE
    files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path}: no weights here: neither {INDEX_FILE} nor any *.safetensors file")
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        header = _header(file)
        if twice := sorted(tensors.keys() & header.keys()):
            raise CheckpointError(f"{path}: no {INDEX_FILE}, and in more than one shard: {listed(twice)}")
        tensors |= header
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if any(not isinstance(file, str) for file in weight_map.values()):
            raise TypeError("a file name is not a string")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not a safetensors index ({error!r})") from error
    return dict(weight_map)


def _indexed(path: Path, weight_map: dict[str, str]) -> dict[str, StoredTensor]:
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not (path / shard).is_file()]:
        raise CheckpointError(f"{path}: shards named by {INDEX_FILE} are missing: {listed(missing)}")
    headers = {shard: _header(path / shard) for shard in shards}
    if absent := [f"{name} ({shard})" for name, shard in weight_map.items() if name not in headers[shard]]:
        raise CheckpointError(f"{path}: named by {INDEX_FILE} but not in that shard: {listed(absent)}")
    held = [(name, shard) for shard, header in headers.items() for name in header]
    if stray := [f"{name} ({shard})" for name, shard in held if name not in weight_map]:
        raise CheckpointError(f"{path}: in a shard but not named by {INDEX_FILE}: {listed(stray)}")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _header(file: Path) -> dict[str, StoredTensor]:
    try:
        # The framework does not matter, as no tensor is read; numpy is the light one.
        with safe_open(file, framework="numpy") as shard:
            slices = ((name, shard.get_slice(name)) for name in shard.keys())  # noqa: SIM118 (it is no dict)
            return {name: StoredTensor(file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: {_diagnosis(file)} ({error})") from error


def _diagnosis(file: Path) -> str:
    """What is wrong with a shard that safetensors cannot open, where that can be told from outside."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix == b"version ":
                return "this is a Git LFS pointer, not the shard itself"
            if len(prefix) < 8 or (stream.peek(1)[:1] == b"{" and size < 8 + length):
                return f"truncated: the file ends within its header, after {size} bytes"
            header = json.loads(stream.read(length)) if size >= 8 + length else {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "corrupt shard"
    if not ends:
        return "corrupt shard"
    promised = 8 + length + max(ends)
    what = "truncated" if size < promised else "corrupt shard"
    return f"{what}: {size} bytes, but the header describes {promised}"


# -- checks --------------------------------------------------------------------------------------------------


def check(path: Path, tensors: dict[str, StoredTensor], expected: dict[str, TensorSpec]) -> None:
    """Raise CheckpointError, listing names, if a tensor is missing, unknown, or of another dtype or shape."""
    missing, wrong = [], []
    known: set[str] = set()
    for name, spec in expected.items():
        parts = spec.stored(name)
        known.update(parts)  # not `|=`, which copies the set for a view of keys
        if spec.optional and not parts.keys() & tensors.keys():
            continue
        for stored, want in parts.items():
            found = tensors.get(stored)
            if found is None:
                missing.append(f"{stored} ({want})")
            elif found.dtype not in want.dtypes or found.shape != want.shape:
                wrong.append(f"{stored}: found {found}, expected {want}")
    unknown = [name for name in tensors if name not in known and part_of(name) not in NOT_LOADED]
    faults = [("missing", missing), ("wrong dtype or shape", wrong), ("unknown", unknown)]
    lines = [f"{len(names)} tensors {what}: {listed(names)}" for what, names in faults if names]
    if lines:
        raise CheckpointError("\n  ".join((f"{path}: the tensors are not those that config.json describes", *lines)))


def listed(names: Iterable[str]) -> str:
    """At most `MAX_NAMES` names, and how many there are when that is not all."""
    every = list(names)
    shown = ", ".join(every[:MAX_NAMES])
    return shown if len(every) <= MAX_NAMES else f"{shown}, ... ({len(every)} in total)"


# -- totals --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartTotal:
    """What one part of the model adds up to."""

    tensors: int
    nbytes: int
    parameters: int


def totals_by_part(tensors: dict[str, StoredTensor]) -> dict[str, PartTotal]:
    """Totals of every part that has tensors, in the order of `PARTS`."""
    groups: dict[str, list[StoredTensor]] = {part: [] for part in (*PARTS, UNKNOWN)}
    for name, stored in tensors.items():
        groups[part_of(name)].append(stored)
    return {
        part: PartTotal(len(group), sum(t.nbytes for t in group), sum(t.parameters for t in group))
        for part, group in groups.items()
        if group
    }
