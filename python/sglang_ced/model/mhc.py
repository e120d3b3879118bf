"""Weights of one hyper-connection site."""

from __future__ import annotations

from torch import Tensor

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.kernels import mhc


class HyperConnection:
    """site: "layers.N.hc_attn" or "layers.N.hc_ffn"; norm: of the sublayer behind it."""

    def __init__(self, checkpoint: Checkpoint, site: str, norm: str) -> None:
        self.norm, self.norm_eps = checkpoint.tensor(f"{norm}.weight"), checkpoint.config.rms_norm_eps
        self.fn, self.base, self.scale = (checkpoint.tensor(f"{site}_{part}") for part in ("fn", "base", "scale"))
        self.iters, self.eps = checkpoint.config.hc_sinkhorn_iters, checkpoint.config.hc_eps

    def __call__(self, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """streams [T, n, d] and pre [T, n] of the site before -> the sublayer's input [T, d], pre (for the next site),
        post, comb (for this one)."""
        return mhc.enter(streams, pre, self.norm, self.norm_eps, self.fn, self.base, self.scale, self.iters, self.eps)
