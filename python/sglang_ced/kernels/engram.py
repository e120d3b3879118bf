"""N-gram memory: hash, table look-up, fusion into the streams (architecture.md 5)."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_ced.formats import dequantize_e4m3
from sglang_ced.kernels.norm import inverse_rms
from sglang_ced.kernels.registry import op


@op
def ngram_rows(
    classes: Tensor, pad_class: int, multipliers: Sequence[int], primes: Sequence[Sequence[int]], offsets: Sequence[int]
) -> Tensor:
    """classes int64 [T, max_ngram]: n-gram classes of a token and its predecessors, newest first; -1 = blocked
    -> table rows int64 [T, (max_ngram - 1) * heads].

    Once a step back is blocked (start of text, image token), it and all older ones count as `pad_class`.
    """
    blocked = (classes < 0).cummax(1).values
    classes = torch.where(blocked, pad_class, classes)
    mixed, rows = torch.zeros_like(classes[:, 0]), []
    for back, multiplier in enumerate(multipliers):
        mixed = mixed ^ (classes[:, back] * multiplier)
        if back:
            rows.append(mixed[:, None] % torch.tensor(primes[back - 1], device=classes.device))
    return torch.cat(rows, 1) + torch.tensor(offsets, device=classes.device)


@op
def look_up(codes: Tensor, scales: Tensor, rows: Tensor, serial: bool = False) -> Tensor:
    """codes uint8 [N, D], scales uint8 [N, D/32], rows int64 [T, R] -> bfloat16 [T, R * D].

    The table may be in the host's memory while rows, and the result, are on another device. serial: by the calling
    thread alone, for one that works beside a forward.
    """
    wanted = rows.to(codes.device)
    return dequantize_e4m3(codes[wanted], scales[wanted]).to(torch.bfloat16).flatten(1).to(rows.device)


@op
def read_rows(fd: int, offset: int, rows: Tensor, out: Tensor) -> tuple[int, int]:
    """Rows int64 [n] of an open file, whose row 0 begins at byte `offset` -> out uint8 [n, bytes of a row], written.

    Returns (-1, 0), or the index of the first row that could not be read and why, as an errno (ENODATA: the file ends
    before it); `out` is then not to be used. Reads by calls, not through a mapping: where a file has lost a page of its
    mapping, a look at it kills the process.
    """
    width = out.shape[1]
    into = out.numpy()
    for i, row in enumerate(rows.tolist()):
        try:
            got = os.preadv(fd, [into[i]], offset + row * width)
        except OSError as error:
            return i, error.errno or errno.EIO
        if got < width:
            return i, errno.ENODATA
    return -1, 0


@op
def fuse(streams: Tensor, keys_value: Tensor, qk_weight: Tensor, eps: float, alive: Tensor | None = None) -> Tensor:
    """Add the gated memory to each stream.

    streams bfloat16 [T, n, d], keys_value bfloat16 [T, (n + 1) d] (n keys, then one value), qk_weight float32 [n, d],
    alive bool [T] (False: the row stays as it is) -> bfloat16 [T, n, d].
    """
    n, d = streams.shape[1:]
    wide, x = keys_value.float(), streams.float()
    keys, value = wide[:, : n * d].unflatten(-1, (n, d)), wide[:, n * d :]
    dot = (x * qk_weight * keys).double().sum(-1, keepdim=True).float()
    dot = dot * inverse_rms(x, eps) * inverse_rms(keys, eps) * d**-0.5
    root = dot.abs().clamp_min(1e-6).double().sqrt().float()  # torch's own float32 root may miss the last place
    gate = torch.sigmoid((dot.sign() * root).double()).float()
    if alive is not None:
        gate = gate * alive[:, None, None]
    out: Tensor = x + gate * value.unsqueeze(1)
    return out.to(torch.bfloat16)
