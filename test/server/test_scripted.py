"""The scheduler step by step (SGLang's `scripted_runtime`): what each event leaves in slots, rings and pools."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import scripts

pytestmark = pytest.mark.slow

ENVIRONMENT = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python", "CED_STRICT": "1"}


@pytest.fixture(scope="module")
def runtime(model: Path) -> Iterator[Any]:
    """A server that runs scripts. Small chunks, mixed with decode."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setitem(os.environ, name, value)
        from sglang.test.scripted_runtime import http_server

        patch.setattr(http_server, "SHUTDOWN_JOIN_TIMEOUT_S", 3)  # it is then stopped by a signal
        patch.setattr(http_server, "_launch_scripted_http_server", scripts.launch)
        server = http_server.ScriptedHttpServer.start(
            model_path=str(model),
            page_size=2,
            chunked_prefill_size=32,
            enable_mixed_chunk=True,
            max_total_tokens=8192,
            max_running_requests=8,
            kv_canary="none",  # it pins memory, which takes a GPU
            kv_canary_real_data="none",
            kv_canary_sweep_interval=0,
        )
        try:
            yield server
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (scripts.abort_in_mid_chunk, ()),
        (scripts.abort_in_mid_decode, ()),
        (scripts.retract_and_resume, ("chunk",)),
        (scripts.retract_and_resume, ("decode",)),
        (scripts.slots_are_used_again, ()),
        (scripts.decode_goes_on_during_a_long_prefill, ()),
        (scripts.eight_hits_take_one_forward, ()),
        (scripts.stale_windows_are_rebuilt, ()),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value),
)
def test_script(runtime: Any, script: Any, arguments: tuple) -> None:
    runtime.execute_script(script, args=arguments)
