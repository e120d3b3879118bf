"""The Muon optimiser for stacks of equal matrices.

torch.optim.Muon takes one matrix at a time and iterates in bfloat16, which this needs neither of: hundreds of small
experts are orthogonalised together, in float32. Source of the method and of the coefficients: K. Jordan et al., "Muon",
2024; scale to AdamW's update size: J. Liu et al., arXiv 2502.16982.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Matrices only. lr as for AdamW."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[tuple(parameter.shape)].append(parameter)
            for (rows, columns), parameters in by_shape.items():
                update = orthogonal(torch.stack([self._moved(p, group["momentum"]) for p in parameters]))
                size = -group["lr"] * 0.2 * max(rows, columns) ** 0.5
                for parameter, direction in zip(parameters, update, strict=True):
                    parameter.mul_(1 - group["lr"] * group["decay"]).add_(direction, alpha=size)

    def _moved(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov momentum of the gradient."""
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        average: Tensor = state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(average, momentum)


def orthogonal(stack: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix of each of [N, R, C], by a Newton-Schulz iteration."""
    tall = stack.shape[1] > stack.shape[2]
    x = stack.transpose(1, 2) if tall else stack
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x
