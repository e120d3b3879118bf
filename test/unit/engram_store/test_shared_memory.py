"""One copy for all processes, which no one can change, and which goes with its last holder."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_ced.engram_store import shared_memory
from sglang_ced.engram_store.shared_memory import HUGE_PAGE, share

SIZE = HUGE_PAGE + 5

JOIN = """
import sys
from sglang_ced.engram_store.shared_memory import share
copy = share("test", int(sys.argv[1]), lambda to: to.fill_(9))
print(copy.filled, int(copy.bytes[0]), int(copy.bytes[-1]), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of holders of its own for every test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def join() -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", JOIN, str(SIZE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.communicate("")
    assert process.returncode == 0


def mappings() -> int:
    return sum("memfd:sglang-ced-test" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_processes_share_one_copy_that_lives_as_long_as_any_of_them() -> None:
    first, told = join()
    assert told == "True 9 9"
    second, told = join()
    assert told == "False 9 9"
    end(first)
    mine = share("test", SIZE, lambda to: pytest.fail("there is a copy"))
    assert not mine.filled
    end(second)
    assert not shared_memory.share("test", SIZE, lambda to: pytest.fail("it is mine now")).filled
    assert mine.bytes.shape == (SIZE,)
    assert bool((mine.bytes == 9).all())


def test_after_the_last_holder_the_next_one_fills() -> None:
    copy = share("test", SIZE, lambda to: to.fill_(1))
    view = copy.bytes[3:]
    del copy
    gc.collect()
    assert (mappings(), int(view[0])) == (1, 1)
    del view
    gc.collect()
    assert mappings() == 0
    assert int(share("test", SIZE, lambda to: to.fill_(2)).bytes[0]) == 2


def test_a_fill_that_fails_leaves_nothing() -> None:
    def fail(to: torch.Tensor) -> None:
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        share("test", SIZE, fail)
    assert mappings() == 0
    assert share("test", SIZE, lambda to: to.fill_(3)).filled


def test_no_one_can_write_or_shorten_it(folder: Path) -> None:
    copy = share("test", SIZE, lambda to: to.fill_(1))
    (listed,) = folder.glob("*/test")
    process, descriptor = listed.read_text().split()
    code = f"import os; fd = os.open('/proc/{process}/fd/{descriptor}', os.O_RDWR); os.{{}}(fd, {{}})"
    for call, argument in (("write", "b'x'"), ("ftruncate", "0")):
        run = subprocess.run([sys.executable, "-c", code.format(call, argument)], capture_output=True, text=True)
        assert "PermissionError" in run.stderr
    assert int(copy.bytes[0]) == 1


def test_a_folder_that_others_can_enter_is_refused(folder: Path) -> None:
    shared_memory._folder().chmod(0o755)
    with pytest.raises(PermissionError, match="must be a folder of this user that no other can enter"):
        share("test", SIZE, lambda to: to.fill_(1))


def test_a_list_that_names_something_else_is_not_believed(folder: Path) -> None:
    other = (folder / "other").open("wb+")
    other.truncate(2 * SIZE)
    (shared_memory._folder() / "test").write_text(f"{os.getpid()} {other.fileno()}\n1 0\nnonsense\n")
    assert share("test", SIZE, lambda to: to.fill_(4)).filled
