"""SGLang's own test kits against this server: API contract, streaming sessions, aborts."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server

pytestmark = pytest.mark.slow

# The kits ask for up to 100 000 new tokens, which SGLang cuts to the context only with --allow-auto-truncate.
ARGUMENTS = (
    *("--enable-streaming-session", "--allow-auto-truncate", "--page-size", "16", "--chunked-prefill-size", "256"),
    *("--max-running-requests", "32", "--max-total-tokens", "300000", "--enable-mixed-chunk"),
)


@pytest.fixture(scope="module")
def kit(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[type[unittest.TestCase]]:
    """All kits in one test case, over one server."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer
    from sglang.test.kits.abort_timeout_kit import AbortAllMixin
    from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
    from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin, StreamingSessionKitMixin

    class Kit(
        BasicAPIContractMixin, StreamingSessionKitMixin, AbortLeakReproKitMixin, AbortAllMixin, unittest.TestCase
    ):
        abort_all_num_requests = 16

    server = Server(model, tmp_path_factory.mktemp("kits") / "log.txt", ARGUMENTS)
    try:
        server.wait_ready()
        Kit.base_url, Kit.process, Kit.tokenizer = server.url, server.process, get_tokenizer(str(model))
        yield Kit
    finally:
        server.stop()


@pytest.mark.parametrize(
    "name",
    [
        "test_health",
        "test_health_generate",
        "test_get_server_info",
        "test_get_model_info",
        "test_openai_chat_completion",
        "test_kv_cache_inheritance",
        "test_leak_logprob_concurrent",
        "test_stress_concurrent_sessions",
        "test_nth_mid_abort_recovery",
        "test_first_mid_abort_recovery",
        "test_preabort_recovery",
        "test_abort_heavy_chunked_prefill_does_not_leak",
        "test_abort_all",
    ],
)
def test_kit(kit: Any, name: str) -> None:
    getattr(kit(name), name)()
