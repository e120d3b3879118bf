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


# Options of ggml's build by the names of /proc/cpuinfo. Its own detection would turn on AMX as well, with which
# llama-cpp-python 0.3.36 ends in a segmentation fault on a virtual Sapphire Rapids.
CPU_FEATURES = {
    "avx_vnni": "GGML_AVX_VNNI",
    "avx512f": "GGML_AVX512",
    "avx512vbmi": "GGML_AVX512_VBMI",
    "avx512_vnni": "GGML_AVX512_VNNI",
    "avx512_bf16": "GGML_AVX512_BF16",
}
UNUSED_PARTS = "LLAVA_BUILD MTMD_BUILD LLAMA_CURL LLAMA_BUILD_TESTS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_TOOLS"


def _cmake_arguments() -> str:
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.is_file() else set()
    options = {"GGML_NATIVE": False} | dict.fromkeys(UNUSED_PARTS.split(), False)
    options |= {option: flag in flags for flag, option in CPU_FEATURES.items()}
    return " ".join(f"-D{name}={'ON' if on else 'OFF'}" for name, on in options.items())


FTLLM = Peer("ftllm", ("ftllm==1.9.0",))
LLAMA_CPP = Peer(
    "llamacpp",
    ("llama-cpp-python==0.3.36", "gguf==0.19.0"),
    {"CMAKE_BUILD_PARALLEL_LEVEL": "2", "CMAKE_ARGS": _cmake_arguments()},
)
