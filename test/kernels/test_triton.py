"""The Triton versions, in a process of their own (triton/conftest.py says why); `make test-triton` runs the slow tests
too, which compile for GPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_triton_versions_in_a_process_of_their_own() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TRITON_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", str(FOLDER)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, check=False)
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]
