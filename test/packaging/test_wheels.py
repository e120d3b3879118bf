"""Wheels, built from source archives and installed in a fresh environment outside the repository, serve.

The environment is new, but for SGLang, torch and what they need: 11 GB that it reads where they are, from the
environment that runs the tests. What is installed of this project there is out of its sight.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))  # the modules there
from servers import Server

import sgl_kernel_ext
import sglang_ced

pytestmark = [pytest.mark.extra, pytest.mark.server]

ROOT = Path(__file__).parents[2]
SECONDS = 580


def run(command: Sequence[str | Path], cwd: Path) -> str:
    """Output of a command that must end well."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("outside")
    assert ROOT not in place.parents
    return place


@pytest.fixture(scope="session")
def archives(outside: Path) -> list[Path]:
    """Source archives of both packages. The first is built with what its pyproject.toml asks the registry for."""
    out = outside / "sdist"
    build = [sys.executable, "-m", "build", "--sdist", "--outdir", out]
    run([*build, ROOT], outside)
    run([*build, "--no-isolation", ROOT / "sgl-kernel-ext"], outside)
    return sorted(out.glob("*.tar.gz"))


@pytest.fixture(scope="session")
def wheels(archives: list[Path], outside: Path) -> list[Path]:
    """Wheels built from the archives alone; that of the kernels beside the torch that is installed."""
    kernels, package = archives
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", outside / "wheels"]
    run([*pip, package], outside)
    run([*pip, "--no-build-isolation", kernels], outside)
    return sorted((outside / "wheels").glob("*.whl"))


@pytest.fixture(scope="session")
def python(wheels: list[Path], outside: Path) -> Path:
    """The Python of a fresh environment that has the wheels."""
    run([sys.executable, "-m", "venv", outside / "venv"], outside)
    python = outside / "venv" / "bin" / "python"
    run([python, "-m", "pip", "install", "--no-deps", *wheels], outside)
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], outside).strip())
    # A path in a .pth file comes after the environment's own, and .pth files found there are not read: an editable
    # installation of this project stays out of sight.
    (site / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_archives_hold_what_is_needed_to_build(archives: list[Path]) -> None:
    assert [archive.name for archive in archives] == [
        f"sgl_kernel_ext-{sgl_kernel_ext.__version__}.tar.gz",
        f"sglang_ced-{sglang_ced.__version__}.tar.gz",
    ]
    for archive in archives:
        with tarfile.open(archive) as files:
            names = {name.split("/", 1)[-1] for name in files.getnames()}
        assert {"pyproject.toml", "README.md", "LICENSE"} <= names
        assert not [name for name in names if name.startswith(("build/", "test/golden", ".venv"))]


def test_the_kernels_depend_on_no_python(wheels: list[Path]) -> None:
    kernels, package = (wheel.name for wheel in wheels)
    assert "-py3-none-linux_" in kernels or "-py3-none-manylinux" in kernels
    assert package.endswith("-py3-none-any.whl")


def test_the_wheel_holds_the_bundled_checkpoints(wheels: list[Path]) -> None:
    with zipfile.ZipFile(wheels[1]) as files:
        names = set(files.namelist())
    for file in ("assets/ced-tiny/model.safetensors", "assets/ced-toy/tokenizer.json", "py.typed"):
        assert f"sglang_ced/{file}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_both_packages_come_from_the_environment(python: Path, outside: Path) -> None:
    code = "import sglang_ced, sgl_kernel_ext, torch; print(sglang_ced.__file__, sgl_kernel_ext.__file__, sep='\\n')"
    for file in run([python, "-c", code], outside).splitlines():
        assert outside in Path(file).parents


def test_what_they_require_is_there(python: Path, outside: Path) -> None:
    done = subprocess.run([python, "-m", "pip", "check"], cwd=outside, capture_output=True, text=True, timeout=SECONDS)
    ours = [line for line in done.stdout.splitlines() if line.startswith(("sglang-ced", "sgl-kernel-ext"))]
    assert ours == []


def test_the_doctor_finds_no_problem(python: Path, outside: Path) -> None:
    said = run([python.with_name("ced"), "doctor"], outside)
    assert "No problem found" in said
    assert "attention.attend" in said.split("fast: ")[1].splitlines()[0]


def test_they_serve(python: Path, outside: Path) -> None:
    model = Path(run([python.with_name("ced"), "models", "--path", "ced-tiny"], outside).strip())
    assert outside in model.parents
    server = Server(model, outside / "server.txt", command=(str(python), "-m", "sglang.launch_server"))
    try:
        server.wait_ready()
        assert "type=DeepseekV41CedForCausalLM" in server.output()
        message = {"role": "user", "content": "Hello!"}
        answer = server.post("/v1/chat/completions", model="any", messages=[message], max_tokens=8, temperature=0)
        assert answer.json()["choices"][0]["message"]["content"]
    finally:
        left = server.stop() if server.process.poll() is None else []
    assert left == []
