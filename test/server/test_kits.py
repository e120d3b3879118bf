"""SGLang's own test kits against this server: API contract, streaming sessions, aborts."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server

pytestmark = pytest.mark.slow

STREAMING = ("--enable-streaming-session", "--max-total-tokens", "300000")
# Launch options, and the tests that run with them.
KITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    # They ask for up to 100 000 new tokens, which SGLang cuts to the context only with --allow-auto-truncate.
    "wide": (
        (
            *(*STREAMING, "--allow-auto-truncate", "--enable-mixed-chunk"),
            *("--page-size", "16", "--chunked-prefill-size", "256", "--max-running-requests", "32"),
        ),
        (
            "test_health",
            "test_health_generate",
            "test_get_server_info",
            "test_get_model_info",
            "test_openai_chat_completion",
            "test_openai_completion",
            "test_kv_cache_inheritance",
            "test_leak_logprob_concurrent",
            "test_stress_concurrent_sessions",
            "test_nth_mid_abort_recovery",
            "test_first_mid_abort_recovery",
            "test_preabort_recovery",
            "test_abort_all",
        ),
    ),
    # It counts on prompts of 600 tokens being more than the context.
    "narrow": (
        (*STREAMING, "--context-length", "512", "--page-size", "256", "--chunked-prefill-size", "4096"),
        ("test_abort_heavy_chunked_prefill_does_not_leak",),
    ),
}


@pytest.fixture(scope="module")
def kit(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[type[unittest.TestCase]]:
    """All kits in one test case, over one server."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer
    from sglang.test.kits.abort_timeout_kit import AbortAllMixin
    from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
    from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin, StreamingSessionKitMixin

    class Kit(
        BasicAPIContractMixin, StreamingSessionKitMixin, AbortLeakReproKitMixin, AbortAllMixin, unittest.TestCase
    ):
        abort_all_num_requests = 16

    server = Server(model, tmp_path_factory.mktemp("kits") / "log.txt", KITS[request.param][0])
    try:
        server.wait_ready()
        Kit.base_url, Kit.process, Kit.tokenizer = server.url, server.process, get_tokenizer(str(model))
        yield Kit
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("kit", "name"),
    [(kit, name) for kit, (_, names) in KITS.items() for name in names],
    indirect=["kit"],
    scope="module",  # else every test gets a server of its own
)
def test_kit(kit: Any, name: str) -> None:
    getattr(kit(name), name)()
