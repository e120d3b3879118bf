"""Compile every Triton kernel as its op launches it at the released model's sizes, for GPUs that need not be there.

    python -m sglang_ced.kernels.triton.compile [--sm 80 90 100] [--op moe] [--json]

The ops are called with tensors that have shapes and no memory; what they would launch is compiled instead. The table
says, by kernel and GPU, how many registers a thread takes, how many bytes of them ptxas spilled, and how many bytes of
memory are shared; with --json, for every launch.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sglang_ced.kernels.triton import cases

ARCHITECTURES = (80, 90, 100)
TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """One way in which an op launches a kernel: what Triton would compile for it."""

    op: str = field(compare=False)  # the first one, where several launch the same
    kernel: JITFunction[Any]
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, object], ...]
    divisible: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    def compile(self, sm: int) -> Report:
        """Raises whatever Triton or ptxas raises where the kernel does not compile."""
        attributes = {(i,): [["tt.divisibility", 16]] for i in self.divisible}
        source = ASTSource(self.kernel, dict(self.signature), dict(self.constants), attributes)
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=dict(self.options))
        text = log.getvalue()
        registers = [int(count) for count in re.findall(r"Used (\d+) registers", text)]
        if not registers:
            raise RuntimeError(f"{self.op}: ptxas said nothing about registers: {text!r}")
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", text)))
        warps = dict(self.options).get("num_warps", 4)
        return Report(self.op, self.name, sm, max(registers), spilled, made.metadata.shared, warps)

    @property
    def name(self) -> str:
        function = self.kernel.fn
        return f"{function.__module__.rsplit('.', 1)[-1]}.{function.__name__.lstrip('_')}"


@dataclass(frozen=True)
class Report:
    """registers: per thread. spilled, shared: bytes. warps: per program."""

    op: str
    kernel: str
    sm: int
    registers: int
    spilled: int
    shared: int
    warps: int


def launches(prefix: str = "") -> list[Launch]:
    """What the ops whose names begin with `prefix` launch at the sizes of `cases`, each once."""
    found: dict[Launch, None] = {}
    op = ""

    def record(kernel: JITFunction[Any], *args: Any, grid: object, warmup: bool, **options: Any) -> None:
        found.setdefault(_launch(op, kernel, args, options))

    with mock.patch.object(JITFunction, "run", record):
        for name, function, args in cases.CASES:
            if name.startswith(prefix):
                op = name
                function(*args)
    return list(found)


def _launch(op: str, kernel: JITFunction[Any], args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    kept = {name: value for name, value in options.items() if name in OPTIONS}
    rest = {name: value for name, value in options.items() if name not in OPTIONS}
    bound = inspect.signature(kernel.fn).bind(*args, **rest).arguments
    signature, constants, divisible = {}, {}, []
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, bound[parameter.name]
        signature[name] = "constexpr"
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            constants[name] = value
        elif isinstance(value, Tensor):
            signature[name] = "*" + TYPES[value.dtype]
            divisible.append(index)
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            divisible += [index] if value % 16 == 0 else []
        else:
            signature[name] = "fp32"
    items = tuple(signature.items()), tuple(constants.items()), tuple(divisible), tuple(kept.items())
    return Launch(op, kernel, *items)


@contextlib.contextmanager
def _loud_and_uncached() -> Iterator[None]:
    """Kernels found in a cache come without ptxas's report."""
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope(), knobs.compilation.scope(), knobs.nvidia.scope():
        knobs.cache.dir = folder
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        yield


def reports(
    architectures: tuple[int, ...], op: str = "", progress: Callable[[Report], None] = lambda report: None
) -> list[Report]:
    """Compile what the ops whose names begin with `op` launch, for each of the architectures (80 = sm_80)."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing would be compiled; unset it")
    out = []
    with _loud_and_uncached():
        for launch in launches(op):
            for sm in architectures:
                out.append(launch.compile(sm))
                progress(out[-1])
    return out


def table(found: list[Report]) -> str:
    """Markdown: a row per kernel, over all ways in which it is launched the most registers / spilled / shared bytes."""
    architectures = sorted({report.sm for report in found})
    lines = ["| kernel | launches | " + " | ".join(f"sm_{sm}" for sm in architectures) + " |"]
    lines.append("| --- " * (2 + len(architectures)) + "|")
    for kernel in sorted({report.kernel for report in found}):
        cells = []
        for sm in architectures:
            some = [report for report in found if (report.kernel, report.sm) == (kernel, sm)]
            most = (max(getattr(report, name) for report in some) for name in ("registers", "spilled", "shared"))
            cells.append(" / ".join(f"{number:,}" for number in most))
        lines.append(f"| `{kernel}` | {len(some)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sglang_ced.kernels.triton.compile", description=__doc__)
    parser.add_argument("--sm", type=int, nargs="+", default=ARCHITECTURES, help="e.g. 80 90 100")
    parser.add_argument("--op", default="", help="compile the ops whose name begins so")
    parser.add_argument("--json", action="store_true", help="print a list of reports instead of a table")
    options = parser.parse_args()

    def progress(report: Report) -> None:
        print(f"{report.op}: {report.kernel} for sm_{report.sm}", file=sys.stderr)

    found = reports(tuple(sorted(options.sm)), options.op, progress)
    print(json.dumps([asdict(report) for report in found]) if options.json else table(found))


if __name__ == "__main__":
    main()
