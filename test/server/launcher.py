"""Launches SGLang with what only tests want: a trace of what is planned, and faults put in on purpose.

Used as `python launcher.py --model-path ...`. Processes that SGLang spawns run this file as well, so patches are made
at its top. CED_TEST_TRACE: file that gets one JSON line for every forward. CED_TEST_FAULT: a name in `faults.FAULTS`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import faults

from sglang_ced.cache import state


def _trace(path: Path) -> None:
    """Write the spans of every forward: what SGLang decided, and nothing of what we make of it."""
    original, known = state.CacheState.plan, {}

    def plan(self: Any, spans: Any, slot_table: Any) -> Any:
        out = []
        for span in spans:
            low = span.prefix if known.get(span.slot) == span.generation else 0
            known[span.slot] = span.generation
            pages = slot_table[span.slot, : span.end : self.page_size] // self.page_size
            out.append(
                {
                    "slot": span.slot,
                    "generation": span.generation,
                    "prefix": span.prefix,
                    "end": span.end,
                    "prompt_len": span.prompt_len,
                    "decode": span.decode,
                    "outputs_from": span.request_output_from,
                    "low": low,
                    "ids": [int(token) for token in span.token_ids[low : span.end]],
                    "pages": pages.tolist(),
                }
            )
        step = original(self, spans, slot_table)
        with path.open("a") as file:
            file.write(json.dumps(out) + "\n")
        return step

    state.CacheState.plan = plan  # type: ignore[method-assign]


if "CED_TEST_TRACE" in os.environ:
    _trace(Path(os.environ["CED_TEST_TRACE"]))
if "CED_TEST_FAULT" in os.environ:
    faults.FAULTS[os.environ["CED_TEST_FAULT"]]()

if __name__ == "__main__":
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
