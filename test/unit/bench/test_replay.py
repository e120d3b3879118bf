"""The client yields to the server that it measures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sglang_ced.bench import replay


def test_the_client_and_its_session_yield_to_others() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        replay._yield_to_others(child.pid)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == replay.CLIENT_NICENESS
        group = Path(f"/proc/{child.pid}/autogroup")
        if group.is_file() and group.read_text():
            assert group.read_text().endswith(f"nice {replay.CLIENT_NICENESS}\n")
    finally:
        child.communicate(b"\n")
