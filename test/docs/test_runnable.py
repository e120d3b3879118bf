"""Every block of README and the pages that is marked runnable runs as written, and prints what the page says."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "server")]  # the modules there
from blocks import Block, PageError, blocks_of, matches
from servers import Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNNABLE = [(page, blocks) for page in PAGES if (blocks := blocks_of(page))]
SECONDS = 300

Run = Callable[[Block, str], None]


def _named(kind: str) -> list[object]:
    """A parameter per page that has blocks of the kind; the blocks of one page run in order, in one directory."""
    return [
        pytest.param(page, chosen, id=str(page.relative_to(ROOT)))
        for page, blocks in RUNNABLE
        if (chosen := [block for block in blocks if block.kind == kind])
    ]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a block as from a clone of the repository: its folders are there, its tools are on the path."""
    tools = Path(sys.executable).parent
    for name in ("python", "test", "benchmark"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    env = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONWARNINGS": "ignore"}

    def run_block(block: Block, url: str = "") -> None:
        for i, step in enumerate(block.steps):
            text = step.command.replace("http://127.0.0.1:30000", url or "http://127.0.0.1:30000")
            if step.is_python:
                file = tmp_path / f"line_{block.line}_{i}.py"
                file.write_text(text)
                command = [sys.executable, str(file)]
            else:
                command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS)
            where = f"{block.page.relative_to(ROOT)}:{block.line}"
            assert done.returncode == 0, f"{where}: {text}\nended with {done.returncode}:\n{done.stdout}{done.stderr}"
            if step.expected is not None:
                assert matches(step.expected, done.stdout), f"{where}: {text}\nprinted:\n{done.stdout}"

    return run_block


@pytest.fixture(scope="module")
def server_of_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = ROOT / "python" / "sglang_ced" / "assets" / "ced-tiny"
    arguments = ("--served-model-name", "ced-tiny", "--enable-metrics")
    server = Server(model, tmp_path_factory.mktemp("server") / "log.txt", arguments)
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.mark.parametrize(("page", "blocks"), _named("quick"))
def test_blocks_run_as_written(page: Path, blocks: list[Block], run: Run) -> None:
    for block in blocks:
        run(block, "")


@pytest.mark.extra
@pytest.mark.parametrize(("page", "blocks"), _named("slow"))
def test_slow_blocks_run_as_written(page: Path, blocks: list[Block], run: Run) -> None:
    for block in blocks:
        run(block, "")


@pytest.mark.extra
@pytest.mark.server
@pytest.mark.parametrize(("page", "blocks"), _named("server"))
def test_blocks_run_against_a_server(page: Path, blocks: list[Block], run: Run, server_of_tiny: Server) -> None:
    server_of_tiny.post("/flush_cache")
    for block in blocks:
        run(block, server_of_tiny.url)


# -- the marks ---------------------------------------------------------------------------------------------------------


def _page(tmp_path: Path, text: str) -> Path:
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_a_block_that_prints_something_else_fails(tmp_path: Path, run: Run) -> None:
    page = _page(tmp_path, "<!-- run -->\n```text\n$ echo one\ntwo\n```\n")
    with pytest.raises((AssertionError, ValueError)):
        run(blocks_of(page)[0], "")


def test_a_command_that_fails_fails_the_block(tmp_path: Path, run: Run) -> None:
    page = _page(tmp_path, "<!-- run -->\n```text\n$ false\n```\n")
    with pytest.raises((AssertionError, ValueError)):
        run(blocks_of(page)[0], "")


@pytest.mark.parametrize(
    "mark", ["<!-- run -->\n\n```text\n$ true\n```\n", "<!-- run: fast -->\n```text\n$ true\n```\n"]
)
def test_a_mark_without_a_block_is_an_error(tmp_path: Path, mark: str) -> None:
    with pytest.raises(PageError):
        blocks_of(_page(tmp_path, mark))


def test_sessions_scripts_and_outputs_are_told_apart(tmp_path: Path) -> None:
    text = (
        "<!-- run -->\n```text\n$ echo 'a\nb'\na\nb\n$ true\n```\n"
        "<!-- run -->\n```python\nprint(1)\n```\n\n<!-- output -->\n```text\n1\n```\n"
        "```text\n$ not run\n```\n"
    )
    session, file = blocks_of(_page(tmp_path, text))
    assert [(step.command, step.expected) for step in session.steps] == [("echo 'a\nb'", "a\nb"), ("true", "")]
    assert [(step.command, step.expected) for step in file.steps] == [("print(1)", "1")]


def test_dots_stand_for_anything() -> None:
    assert matches("speed ... tokens", "speed 3.2\n tokens")
    assert not matches("speed ... tokens", "speed 3.2 tokens\nand more")


def test_pages_have_runnable_blocks() -> None:
    """The marks are there: a renamed one would silently run nothing."""
    assert sum(len(blocks) for _, blocks in RUNNABLE) >= 15
    assert ROOT / "README.md" in [page for page, _ in RUNNABLE]
