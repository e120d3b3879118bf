"""Which version of each op runs: its reference, or a fast one registered beside it.

Exactness rule of the references: products and long sums in float64, then one rounding, so that neither the order of
a sum nor the shape of the batch shows in the result. Short sums are float32 in a written order.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

MODES = ("auto", "reference")
ENVIRONMENT = "CED_KERNELS"


class Op(Generic[P, R]):
    """A function with a reference and any number of fast versions, called like the reference."""

    def __init__(self, reference: Callable[P, R]) -> None:
        self.name = f"{reference.__module__.rsplit('.', 1)[-1]}.{reference.__name__}"
        self.reference, self.fast = reference, dict[str, Callable[P, R]]()
        self.__doc__ = reference.__doc__
        self.active = "reference"
        self.joined = False
        self._run = reference

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(*args, **kwargs)

    def register(self, backend: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorator: offer a fast version under a backend's name ("cpu", "triton")."""

        def keep(function: Callable[P, R]) -> Callable[P, R]:
            self.fast[backend] = function
            return function

        return keep

    def select(self, backend: str) -> None:
        """Run `backend` if this op has it, else the reference."""
        self.active = backend if backend in self.fast else "reference"
        self._run = self.fast.get(backend, self.reference)


OPS: dict[str, Op[..., object]] = {}


def op(reference: Callable[P, R]) -> Op[P, R]:
    """Decorator: make a reference function an `Op` and list it."""
    made = Op(reference)
    OPS[made.name] = made  # type: ignore[assignment]
    return made


def joined(reference: Callable[P, R]) -> Op[P, R]:
    """Decorator: an `Op` that is a chain of others, worth one call where each of them is short. Its reference runs the
    active versions of its parts."""
    made = op(reference)
    made.joined = True
    return made


def activate(mode: str | None = None, device: str | torch.device = "cpu") -> dict[str, str]:
    """Choose the version of every op; returns op name -> active version.

    mode: "auto" (the fast versions for `device`), "reference", or None = $CED_KERNELS, else auto. device: where the
    tensors will be; CUDA devices run the Triton versions. Raises ValueError for any other word, RuntimeError for a
    CUDA device without Triton.
    """
    mode = mode or os.environ.get(ENVIRONMENT) or "auto"
    if mode not in MODES:
        raise ValueError(f"kernels: {mode!r} is not one of {', '.join(MODES)} (flag --ced-kernels or ${ENVIRONMENT})")
    backend = _fast_backend(torch.device(device)) if mode == "auto" else "reference"
    for each in OPS.values():
        each.select(backend)
    return {name: each.active for name, each in sorted(OPS.items())}


def _fast_backend(device: torch.device) -> str:
    """Imports, and thereby registers, the fast versions for a device."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise RuntimeError(f"kernels: device {device} needs Triton: pip install triton, or run the references")
        from sglang_ced.kernels import triton  # noqa: F401

        return "triton"
    from sglang_ced.kernels import cpu

    return "cpu" if device.type == "cpu" and cpu.available() else "reference"
