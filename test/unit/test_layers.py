"""The floors of the package: imports point down, and only `plugin` knows SGLang.

The contracts stand in pyproject.toml, under [tool.importlinter].
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "sglang_ced"


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Checks the contracts of `root/pyproject.toml` on the package in `root/python`."""
    return subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root / "python"), "COLUMNS": "120", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def copied_tree(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    ignore = shutil.ignore_patterns("assets", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "python" / "sglang_ced", ignore=ignore)
    return tmp_path


def test_every_import_points_down() -> None:
    report = lint_imports(ROOT)
    assert report.returncode == 0, report.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("kernels/__init__.py", "import sglang_ced.model", "Every import points down"),
        ("config.py", "import sglang_ced.formats", "Every import points down"),
        ("config_file.py", "import sglang_ced.config", "Every import points down"),
        ("new_room.py", "", "Every import points down"),
        ("reference.py", "import sglang_ced.kernels", "The reference imports nothing of ours"),
        ("cache/__init__.py", "import sglang.srt.utils", "The rooms below plugin do not reach SGLang"),
        ("cli/__init__.py", "import sglang", "The commands reach SGLang only through plugin"),
    ],
)
def test_a_forbidden_import_breaks_its_contract(copied_tree: Path, file: str, line: str, broken: str) -> None:
    with (copied_tree / "python" / "sglang_ced" / file).open("a") as source:
        source.write(f"\n{line}\n")
    report = lint_imports(copied_tree)
    assert report.returncode != 0
    verdicts = [verdict for verdict in report.stdout.splitlines() if verdict.endswith("BROKEN")]
    assert any(verdict.startswith(broken) for verdict in verdicts), report.stdout


@pytest.mark.parametrize("module", ["sglang_ced.cli.main", "sglang_ced.engine.offline", "sglang_ced.reference"])
def test_offline_modules_load_without_sglang(module: str) -> None:
    code = f"import sys, {module}; sys.exit('sglang was imported' if 'sglang' in sys.modules else 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def imported_private_names(file: Path) -> list[str]:
    """`from other_room import _name` in `file`. An import graph holds no names, so this reads the syntax."""
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    own_room, parent = parts[1], ".".join(parts[:-1])
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = resolve_name("." * node.level + (node.module or ""), parent).split(".")
        names = [name.name for name in node.names if name.name.startswith("_") and not name.name.endswith("__")]
        if module[0] == PACKAGE.name and module[1:2] != [own_room]:
            found += [f"{file.relative_to(ROOT)}:{node.lineno} imports {'.'.join(module)}.{name}" for name in names]
    return found


def test_no_room_imports_a_private_name_of_another() -> None:
    assert [found for file in sorted(PACKAGE.rglob("*.py")) for found in imported_private_names(file)] == []
