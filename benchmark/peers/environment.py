"""Each peer has a virtual environment of its own below build/peers, as their pins conflict with each other's."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmark.measure import ROOT

HOME = ROOT / "build" / "peers"


@dataclass(frozen=True)
class Peer:
    """A program that is measured beside ours: what pip installs, and the environment it is built under."""

    name: str
    requirements: tuple[str, ...]
    build_environment: dict[str, str] = field(default_factory=dict)

    @property
    def bin(self) -> Path:
        return HOME / self.name / "bin"

    @property
    def version(self) -> str:
        return self.requirements[0]

    def install(self) -> None:
        """Make the environment if it is not there, or was made for other requirements; an interrupted one counts as
        not there. Raises CalledProcessError if pip fails."""
        stamp, wanted = HOME / self.name / "installed", "\n".join(self.requirements)
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        print(f"installing {wanted.replace(chr(10), ', ')} into {HOME / self.name}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", HOME / self.name], check=True)
        command = [self.bin / "pip", "install", "--quiet", *self.requirements]
        subprocess.run(command, env=os.environ | self.build_environment, check=True)
        stamp.write_text(wanted)


FTLLM = Peer("ftllm", ("ftllm==1.9.0",))
LLAMA_CPP = Peer(
    "llamacpp",
    ("llama-cpp-python==0.3.36", "gguf==0.19.0"),
    {
        "CMAKE_BUILD_PARALLEL_LEVEL": "2",
        "CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF "
        "-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF",
    },
)
