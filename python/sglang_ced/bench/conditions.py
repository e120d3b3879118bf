"""Under what a figure was measured: machine, version and commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from sglang_ced import __version__


def machine() -> str:
    """Processor and cores, and the accelerator if torch sees one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    accelerator = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {os.cpu_count()} cores{accelerator}"


def commit() -> str:
    """Version, and in a checkout the last commit of package or kernels, with + if a tracked file differs from it."""
    package = Path(__file__).parents[1]
    if package.parent.name != "python":  # installed from a wheel
        return __version__
    sources = (".", str(package.parents[1] / "sgl-kernel-ext"))
    head = _git(package, "log", "-1", "--format=%h", "--", *sources).strip()
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", *sources)
    return f"{__version__}, {head}{'+' if changed else ''}" if head else __version__


def _git(directory: Path, *arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else ""
