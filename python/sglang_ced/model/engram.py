"""The n-gram memory: which rows a step needs, and their fusion before a layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_ced.cache.step import Step
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.checkpoint.token_map import build_token_map
from sglang_ced.engram_store.placement import StoreOptions
from sglang_ced.engram_store.store import EngramStore, Fetch
from sglang_ced.kernels import engram
from sglang_ced.kernels.linear import linear


@dataclass(frozen=True)
class Memory:
    """What a layer adds in this step: its rows, on their way, and the rows of the step that take none (alive bool [T],
    False there; None = all take)."""

    fetch: Fetch
    alive: Tensor | None


class EngramRows:
    """Hashes of a step, for all layers before the first one runs: a row of a table depends on token ids alone."""

    def __init__(self, checkpoint: Checkpoint, options: StoreOptions) -> None:
        config = self._config = checkpoint.config
        self.store = EngramStore(checkpoint, options, checkpoint.device)
        self._expected: tuple[Tensor, dict[int, Memory]] | None = None
        self._token_map = torch.empty(0, dtype=torch.int64)  # int64 [vocab]: token id -> n-gram class
        if config.engram_layer_ids:
            self._token_map = build_token_map(checkpoint.path, config).to(checkpoint.device)
            self._pad_class = int(self._token_map[config.engram_pad_token_id])

    def begin(self, step: Step) -> Mapping[int, Memory]:
        """Start to fetch what each Engram layer needs of this step."""
        if not self._config.engram_layer_ids:
            return {}
        expected, self._expected = self._expected, None
        if expected is not None and torch.equal(expected[0], step.history):
            return expected[1]
        early = [i for i in self._config.engram_layer_ids if i <= self._config.first_decoder_layer]
        late = [i for i in self._config.engram_layer_ids if i > self._config.first_decoder_layer]
        memory = self._begin(step.history, early)
        return memory | self._begin(step.history[step.decoder.rows], late) if late else memory

    @property
    def wants_ahead(self) -> bool:
        """Whether `ahead` does anything."""
        return self.store.prefetch and bool(self._config.engram_layer_ids)

    @torch.inference_mode()
    def ahead(self, history: Tensor) -> None:
        """Rows int64 [T, max_ngram], the history of the step that will probably run next: fetch for it already.

        If another step comes, the work was in vain, but for what it has left in the caches of files. (Engram layers
        behind the cut would want fewer rows than the step has; a model with any of those gets nothing ahead.)
        """
        layers = self._config.engram_layer_ids
        if self.wants_ahead and len(history) and layers[-1] <= self._config.first_decoder_layer:
            self._expected = (history, self._begin(history, list(layers), ahead=True))

    def _begin(self, history: Tensor, layers: list[int], ahead: bool = False) -> dict[int, Memory]:
        image = self._config.image_token_id
        alive = None if image is None else history[:, 0] != image
        return {i: Memory(fetch, alive) for i, fetch in self.store.start(self._rows(history, layers), ahead).items()}

    def _rows(self, history: Tensor, layers: list[int]) -> dict[int, Tensor]:
        """history int64 [T, max_ngram] (newest first, -1 before the text) -> table rows int64 [T, R] by layer."""
        classes = self._token_map[history.clamp_min(0)].masked_fill(history < 0, -1)
        if self._config.image_token_id is not None:
            classes = classes.masked_fill(history == self._config.image_token_id, -1)
        hashes = {layer: self._config.engram_hashes[layer] for layer in layers}
        return {
            layer: engram.ngram_rows(classes, self._pad_class, c.multipliers, c.primes, c.offsets)
            for layer, c in hashes.items()
        }


class Engram:
    """The weights of one layer's memory."""

    def __init__(self, checkpoint: Checkpoint, layer: int) -> None:
        name, self.eps = f"layers.{layer}.engram", checkpoint.config.rms_norm_eps
        self.wkv = checkpoint.weight(f"{name}.wkv")
        self.qk_weight = checkpoint.tensor(f"{name}.q_weight").float() * checkpoint.tensor(f"{name}.k_weight").float()

    def __call__(self, streams: Tensor, memory: Memory) -> Tensor:
        """streams bfloat16 [T, n, d] -> the same with the gated memory added. Raises TableError."""
        keys_value = linear(memory.fetch.result(), self.wkv)
        return engram.fuse(streams, keys_value, self.qk_weight, self.eps, memory.alive)
