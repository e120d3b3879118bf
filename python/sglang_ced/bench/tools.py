"""Programs that `ced bench` drives. Each gets a virtual environment of its own, made when it is first needed, as their
pins conflict with SGLang's."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sglang_ced.bench.errors import BenchError

HOME = Path("build") / "tools"


@dataclass(frozen=True)
class Tool:
    """What pip installs, and the command that it brings."""

    name: str
    requirement: str
    command: str

    def executable(self, home: Path = HOME) -> Path:
        """Its command, installed first if it is not there; an interrupted installation counts as not there.

        Raises BenchError, with the end of pip's output, if that fails.
        """
        place = (home / self.name).absolute()
        stamp = place / "installed"
        if stamp.is_file() and stamp.read_text() == self.requirement:
            return place / "bin" / self.command
        print(f"Installing {self.requirement} into {place}, which is done once", file=sys.stderr, flush=True)
        for step in (
            [sys.executable, "-m", "venv", str(place)],
            [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", self.requirement],
        ):
            run = subprocess.run(step, capture_output=True, text=True, check=False)
            if run.returncode:
                raise BenchError(
                    f"{self.requirement} could not be installed into {place}: {(run.stdout + run.stderr)[-1000:]}\n"
                    f"--tools DIR names another place; to try by hand: {' '.join(step)}"
                )
        stamp.write_text(self.requirement)
        return place / "bin" / self.command


AIPERF = Tool("aiperf", "aiperf==0.13.0", "aiperf")
ROUTER = Tool("sglang-router", "sglang-router==0.3.2", "python")
FTLLM = Tool("ftllm", "ftllm==1.9.0", "ftllm")
