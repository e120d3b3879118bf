"""Which build of the hot loops runs."""

from __future__ import annotations

from sgl_kernel_ext._library import ops


def cpu_capability() -> str:
    """The level in use: "generic", "avx2" (with FMA) or "avx512" (with VNNI and VBMI: Ice Lake, Zen 4 and later)."""
    level: str = ops.cpu_capability()
    return level


def supported_cpu_capabilities() -> list[str]:
    """The levels that this CPU can run, lowest first."""
    levels: list[str] = ops.supported_cpu_capabilities()
    return levels


def force_cpu_capability(level: str | None) -> None:
    """Use `level` from now on, in the whole process; None goes back to the best one.

    Raises:
        ValueError: this CPU or this build does not have `level`.
    """
    ops.force_cpu_capability(level or "")
