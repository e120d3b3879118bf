"""Every refused option names itself, and nothing else is refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import pytest
from sglang.srt.server_args import ServerArgs

from sglang_ced.plugin.defaults import DEFAULTS
from sglang_ced.plugin.errors import PluginError
from sglang_ced.plugin.flags import Options
from sglang_ced.plugin.refusals import REFUSALS, check

SGLANG_DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(ServerArgs)}
DEFAULT_ARGUMENTS = SGLANG_DEFAULTS | asdict(Options())

# A value that is refused, by option.
REFUSED: dict[str, Any] = {
    "tp_size": 2,
    "pp_size": 2,
    "ep_size": 2,
    "dp_size": 2,
    "attn_dp_size": 2,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "moe_dp_size": 2,
    "nnodes": 2,
    "disaggregation_mode": "prefill",
    "speculative_algorithm": "EAGLE",
    "speculative_draft_model_path": "draft",
    "lora_paths": ["adapter"],
    "page_size": 1,
    "chunked_prefill_size": 32,
    "kv_cache_dtype": "fp8_e4m3",
    "hicache_storage_backend": "file",
    "load_format": "dummy",
    "dtype": "float32",
    "quantization": "fp8",
    "modelopt_quant": "fp8",
    "model_impl": "transformers",
    "cpu_offload_gb": 1,
    "startup_weight_load_mode": "overlap",
    "weight_cache_mode": "auto",
    "device": "cuda",
    "attention_backend": "torch_native",
    "prefill_attention_backend": "triton",
    "decode_attention_backend": "triton",
    "moe_runner_backend": "triton",
    "moe_a2a_backend": "deepep",
    "fp8_gemm_runner_backend": "triton",
    "fp4_gemm_runner_backend": "marlin",
    "sampling_backend": "flashinfer",
    "dllm_algorithm": "x",
}

# Options that are refused only beside another.
BESIDE: dict[str, dict[str, Any]] = {
    "enable_encoder_swa_bounded_replay": {"swa_bounded_replay": False},
    "enable_decoder_swa_bounded_replay": {"swa_bounded_replay": False},
}


def test_every_refused_field_is_one_of_sglang() -> None:
    assert {refusal.field for refusal in REFUSALS} <= SGLANG_DEFAULTS.keys()


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.field)
def test_every_refused_option_says_why(refusal: Any) -> None:
    value = REFUSED.get(refusal.field, True)
    with pytest.raises(PluginError) as caught:
        check(DEFAULT_ARGUMENTS | BESIDE.get(refusal.field, {}) | {refusal.field: value})
    flag = "--" + refusal.field.replace("_", "-")
    assert f"{flag}{'' if value is True else f' {value}'}: {refusal.why}" in str(caught.value)


def test_all_refused_options_are_listed_at_once() -> None:
    with pytest.raises(PluginError) as caught:
        check(DEFAULT_ARGUMENTS | {"tp_size": 2, "page_size": 3, "enable_lora": True})
    assert [line.split()[0].rstrip(":") for line in str(caught.value).splitlines()[1:]] == [
        "--tp-size",
        "--enable-lora",
        "--page-size",
    ]


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"page_size": 2},
        {"page_size": 256, "chunked_prefill_size": 256},
        {"chunked_prefill_size": -1},
        {"enable_mixed_chunk": True},
        {"attention_backend": "ced"},
        {"kv_cache_dtype": "auto", "dtype": "bfloat16", "load_format": "safetensors"},
        {"return_hidden_states_mode": "full", "enable_fp32_lm_head": True},
        {"max_running_requests": 3, "max_total_tokens": 4096, "disable_radix_cache": True},
        {"enable_encoder_swa_bounded_replay": True, "enable_decoder_swa_bounded_replay": True},
        {"enable_decoder_swa_bounded_replay": False},
        {"swa_bounded_replay": False, "enable_decoder_swa_bounded_replay": False},
    ],
    ids=str,
)
def test_what_is_served_is_not_refused(given: dict[str, Any]) -> None:
    check(DEFAULT_ARGUMENTS | given)


def test_replicas_with_cores_of_their_own_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    check(DEFAULT_ARGUMENTS | {"dp_size": 2})


def test_a_chunk_smaller_than_a_page_is_refused_as_a_pair() -> None:
    with pytest.raises(PluginError, match="--chunked-prefill-size 64"):
        check(DEFAULT_ARGUMENTS | {"page_size": 128, "chunked_prefill_size": 64})


def test_defaults_replace_what_sglang_has_without_the_user() -> None:
    for default in DEFAULTS:
        assert DEFAULT_ARGUMENTS[default.name] in default.unset
        assert default.value not in default.unset
