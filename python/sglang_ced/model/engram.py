"""The n-gram memory before one layer."""

from __future__ import annotations

from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.kernels import engram
from sglang_ced.kernels.linear import linear


class Engram:
    """token_map int64 [vocab]: token id -> n-gram class."""

    def __init__(self, checkpoint: Checkpoint, layer: int, token_map: Tensor) -> None:
        config, name = checkpoint.config, f"layers.{layer}.engram"
        self.constants, self.eps = config.engram_hashes[layer], config.rms_norm_eps
        self.token_map, self.image_token = token_map, config.image_token_id
        self.pad_class = int(token_map[config.engram_pad_token_id])
        self.codes, self.scales = checkpoint.table(f"{name}.embed")
        self.wkv = checkpoint.weight(f"{name}.wkv")
        self.qk_weight = checkpoint.tensor(f"{name}.q_weight").float() * checkpoint.tensor(f"{name}.k_weight").float()

    def __call__(self, streams: Tensor, history: Tensor) -> Tensor:
        """streams [T, n, d], history int64 [T, max_ngram] (newest first, -1 before the text) -> streams."""
        alive = None
        classes = self.token_map[history.clamp_min(0)].masked_fill(history < 0, -1)
        if self.image_token is not None:
            classes = classes.masked_fill(history == self.image_token, -1)
            alive = history[:, 0] != self.image_token
        c = self.constants
        rows = engram.ngram_rows(classes, self.pad_class, c.multipliers, c.primes, c.offsets)
        memory = linear(engram.look_up(self.codes, self.scales, rows), self.wkv)
        return engram.fuse(streams, memory, self.qk_weight, self.eps, alive)
