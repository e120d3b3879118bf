"""Versions of the ops for GPUs from sm_80, in Triton. Registered on import, chosen by `registry.activate`.

Sums are float32, in an order of their own; docs/explanation/numerics.md says how near the results are to the
references. What a version does not take (float64, float16) runs as the reference.
"""

from __future__ import annotations

from sglang_ced.kernels import projection  # noqa: F401
from sglang_ced.kernels.registry import OPS
from sglang_ced.kernels.triton import (
    attention,
    compressor,
    engram,
    indexer,
    linear,
    mhc,
    moe,
    norm,
    records,
    rope,
)

__all__ = ["attention", "compressor", "engram", "indexer", "linear", "mhc", "moe", "norm", "records", "rope"]

for each in OPS.values():
    if each.joined:  # the chain of its parts' versions
        each.register("triton")(each.reference)
