"""`Checkpoint`: the tensors of a directory, checked by their headers, read as views of the files."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from sglang_ced.checkpoint.files import StoredRows, StoredTensor, check, read_headers, rows_of, totals_by_part
from sglang_ced.checkpoint.names import (
    DRAFT,
    NOT_LOADED,
    CheckpointError,
    Kind,
    TensorSpec,
    expected_tensors,
    part_of,
    scale_name,
)
from sglang_ced.config import CedConfig
from sglang_ced.formats import E2m1Weight, E4m3Weight, Weight, dequantize_e4m3

logger = logging.getLogger(__name__)


class Checkpoint:
    """An open checkpoint.

    Every tensor it returns is a view of a private mapping of its shard: the pages are the page cache's,
    nothing is copied, and a view stays valid after `close`. Do not write into one.
    """

    def __init__(
        self,
        path: Path,
        config: CedConfig,
        tensors: dict[str, StoredTensor],
        expected: dict[str, TensorSpec],
    ) -> None:
        """Use `open`. `tensors`: what the headers hold, checked to be what is `expected`."""
        self.path, self.config = path, config
        self._tensors, self._expected = tensors, expected
        self._shards: dict[Path, Any] = {}
        self.device = torch.device("cpu")

    @classmethod
    def open(cls, path: str | os.PathLike[str], config: CedConfig | None = None) -> Checkpoint:
        """Read config.json (unless `config` is given) and all headers, and check names, dtypes and shapes.

        Raises CheckpointError naming files or tensors, ConfigError, or FileNotFoundError (no config.json).
        """
        path = Path(path)
        config = config or CedConfig.from_dir(path)
        tensors, expected = read_headers(path), expected_tensors(config)
        check(path, tensors, expected)
        checkpoint = cls(path, config, tensors, expected)
        for part, total in totals_by_part(tensors).items():
            if part in NOT_LOADED:
                count, size = total.tensors, total.nbytes
                logger.info("%s: not loading the %s part: %d tensors, %d bytes", path, part, count, size)
        return checkpoint

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the shards. Tensors already handed out keep their own mapping."""
        self._shards.clear()

    def on(self, device: str | torch.device) -> Checkpoint:
        """The same files, from which tensors and weights come on `device`; tables stay views in the host's memory."""
        other = copy.copy(self)
        other.device = torch.device(device)
        return other

    # -- tensors ---------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        """Whether a stored tensor has this full name."""
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """A stored tensor by its full name, in its stored dtype. Raises CheckpointError if there is none."""
        return self._view(name).to(self.device)

    def _view(self, name: str) -> Tensor:
        stored = self._tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{self.path}: no tensor named {name}")
        shard = self._shards.get(stored.file)
        if shard is None:
            shard = self._shards[stored.file] = safe_open(stored.file, framework="pt")
        tensor: Tensor = shard.get_tensor(name)
        return tensor

    def weight(self, base: str) -> Weight:
        """`<base>.weight` with its scale, in the form it is stored in: [out, in].

        bf16 (or f32, for a norm): the tensor itself. fp8: E4m3Weight. fp4: E2m1Weight (all uint8).
        Raises CheckpointError if the model has no such weight.
        """
        name, kind = f"{base}.weight", self._spec(f"{base}.weight").kind
        if kind is Kind.FP8:
            return E4m3Weight(self._codes(name), self._codes(scale_name(name)))
        if kind is Kind.FP4:
            return E2m1Weight(self._codes(name), self._codes(scale_name(name)))
        if kind is Kind.TABLE:
            raise CheckpointError(f"{self.path}: {base} is a table of rows, not a weight")
        return self.tensor(name)

    def table(self, base: str) -> tuple[Tensor, Tensor]:
        """Rows of an n-gram table: (e4m3 codes uint8 [N, D], ue8m0 scales uint8 [N, D/32]).

        `base` as in `layers.1.engram.embed`. Raises CheckpointError if that is not a table.
        """
        codes, scales = self._table_names(base)
        return self._view(codes).view(torch.uint8), self._view(scales).view(torch.uint8)

    def table_rows(self, base: str) -> tuple[StoredRows, StoredRows]:
        """Where the rows that `table` gives lie in the files: (codes, scales). Raises CheckpointError as it does, or
        if a file ends before its rows do."""
        codes, scales = self._table_names(base)
        return rows_of(codes, self._tensors[codes]), rows_of(scales, self._tensors[scales])

    def _table_names(self, base: str) -> tuple[str, str]:
        name = f"{base}.weight"
        if self._spec(name).kind is not Kind.TABLE:
            raise CheckpointError(f"{self.path}: {base} is not a table")
        return name, scale_name(name)

    def dequantized(self) -> Iterator[tuple[str, Tensor]]:
        """Every text tensor as a new float32 tensor, one at a time, by the names of `expected_tensors`."""
        for name, spec in self._expected.items():
            if spec.optional and name not in self:
                continue
            base = name.removesuffix(".weight")
            if spec.kind is Kind.TABLE:
                yield name, dequantize_e4m3(*self.table(base))
                continue
            stored = self.tensor(name) if base == name else self.weight(base)
            yield (
                name,
                stored.to(torch.float32, copy=True) if isinstance(stored, Tensor) else stored.dequantize(),
            )

    def _codes(self, name: str) -> Tensor:
        return self.tensor(name).view(torch.uint8)

    def _spec(self, name: str) -> TensorSpec:
        spec = self._expected.get(name)
        if spec is None:
            raise CheckpointError(f"{self.path}: this model has no weight named {name}")
        return spec

    # -- what there is ---------------------------------------------------------------------------------------

    def nbytes_by_part(self) -> dict[str, int]:
        """Stored bytes of every part, scales included, those of parts that are not loaded too."""
        return {part: total.nbytes for part, total in totals_by_part(self._tensors).items()}

    def parameters_by_part(self) -> dict[str, int]:
        """Values of every part: two per byte of packed fp4; block scales are no parameters."""
        return {part: total.parameters for part, total in totals_by_part(self._tensors).items()}

    def draft_names(self) -> list[str]:
        """Stored tensors of the draft stages, sorted."""
        return sorted(name for name in self._tensors if part_of(name) == DRAFT)
