"""One softmax over window keys and selected global groups; keys are values (architecture.md 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_ced.formats import record_of
from sglang_ced.kernels.registry import joined, op

SOFTMAX_BLOCK = 64
ROWS_AT_ONCE = 64


@joined
def join_keys(window: Tensor, groups: Tensor | None, num_window_rows: int) -> Tensor:
    """One key list int64 [T, W + K] per row: its window rows, then its group slots, then -1; no holes.

    window int64 [T, W]: row numbers ascending, -1 only at the end. groups int64 [T, K]: pool slots, -1 only at the end.
    Group slot s is written as num_window_rows + s. Softmax blocks count attended keys, so holes would show in the
    rounding.
    """
    if groups is None or groups.shape[1] == 0:
        return window
    joined = torch.cat((window, torch.where(groups < 0, -1, groups + num_window_rows)), 1)
    order = torch.sort(joined < 0, dim=1, stable=True).indices
    return joined.take_along_dim(order, 1)


@op
def attend(q: Tensor, window: Tensor, pool: Tensor | None, keys: Tensor, sink: Tensor) -> Tensor:
    """q bfloat16 [T, H, D] over its keys -> bfloat16 [T, H, D], before the inverse rotation.

    window bfloat16 [M, D]: window rows; pool uint8 [S, global record of D]: groups, packed or
    bfloat16 (its width tells), or None.
    keys int64 [T, N]: < M a window row, >= M pool slot + M, -1 none. sink float32 [H] joins the denominator only.
    Online softmax over blocks of 64 entries of `keys`; probabilities are rounded to bfloat16 per block. A row
    without keys gives zeros.
    """
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        out[rows] = _attend_rows(q[rows], window, pool, keys[rows], sink)
    return out


def _attend_rows(q: Tensor, window: Tensor, pool: Tensor | None, keys: Tensor, sink: Tensor) -> Tensor:
    scale, wide = q.shape[-1] ** -0.5, q.double()
    top = torch.full(q.shape[:-1], -torch.inf, device=q.device)
    total, out = torch.zeros_like(top, dtype=torch.float64), torch.zeros_like(wide)
    for index in keys.split(SOFTMAX_BLOCK, 1):
        values = _gather(window, pool, index).double()
        scores = torch.einsum("thd,tkd->thk", wide, values).float() * scale
        scores = scores.masked_fill((index < 0).unsqueeze(1), -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        base = torch.where(new_top == -torch.inf, 0.0, new_top)
        fade, p = _exp(top - base), _exp(scores - base.unsqueeze(-1))
        total = total * fade + p.double().sum(-1)
        out = out * fade.unsqueeze(-1) + torch.einsum("thk,tkd->thd", p.to(torch.bfloat16).double(), values)
        top = new_top
    base = torch.where(top == -torch.inf, 0.0, top)
    return (out / (total + _exp(sink - base)).unsqueeze(-1)).to(torch.bfloat16)


def _exp(x: Tensor) -> Tensor:
    return torch.exp(x.double()).float()


def _gather(window: Tensor, pool: Tensor | None, index: Tensor) -> Tensor:
    """Keys by list entry: bfloat16 [T, N, D]; entries of -1 give some finite row."""
    first_slot, dim = window.shape[0], window.shape[1]
    out = window[index.clamp(0, first_slot - 1)]
    if pool is not None:
        from_pool = index >= first_slot
        slots = index[from_pool] - first_slot
        out[from_pool] = record_of(pool, dim, "global").decode(pool[slots])
    return out
