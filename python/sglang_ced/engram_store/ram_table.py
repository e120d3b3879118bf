"""Placement `ram`: a table in memory."""

from __future__ import annotations

from torch import Tensor

from sglang_ced.kernels import engram


class RamTable:
    """codes uint8 [N, D], scales uint8 [N, D/32], in memory that stays as it is."""

    hits = rows_read = bytes_read = 0

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    def values(self, rows: Tensor, serial: bool) -> Tensor:
        return engram.look_up(self.codes, self.scales, rows, serial)

    def stored(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.codes[rows], self.scales[rows]
