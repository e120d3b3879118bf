"""Options of SGLang that this plugin does not serve, in one table.

A launch of one of our checkpoints that asks for any of them stops at once, with one line for each: the
option, why it cannot work here, and what to use instead. The check sees the options as the user gave them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sglang_ced.plugin import claim
from sglang_ced.plugin.errors import PluginError
from sglang_ced.plugin.flags import options_of
from sglang_ced.plugin.register import NAME, has_accelerator, is_active

Raw = Mapping[str, Any]


@dataclass(frozen=True)
class Refusal:
    """Option `field` is refused where `when(value, all options)` holds. `why` says what to use instead."""

    field: str
    when: Callable[[Any, Raw], bool]
    why: str

    def message(self, raw: Raw) -> str:
        value, flag = raw[self.field], "--" + self.field.replace("_", "-")
        return f"{flag}{'' if value is True else f' {value}'}: {self.why}"


def _given(value: Any, _: Raw) -> bool:
    return bool(value)


def _above_one(value: Any, _: Raw) -> bool:
    return value is not None and value > 1


def _none_of(*served: Any) -> Callable[[Any, Raw], bool]:
    return lambda value, _: value is not None and value not in served


def _unlike_ours(value: Any, raw: Raw) -> bool:
    return bool(value) and not raw["swa_bounded_replay"]


_ONE_PROCESS = "a checkpoint is served by one process; leave it out"
_DRAFT = "the draft stages are not built yet; leave it out"
_NO_TIER = "the KV pool has no second tier; leave it out"
_OWN_KERNELS = "the kernels are those of sglang-ced; choose with --ced-kernels"
_OWN_FORMAT = "weights are served in the format of the checkpoint; leave it out"
_TEXT = "only text generation is served; leave it out"
_EXACT = "--no-swa-bounded-replay asks for exact answers; leave one of the two out"

REFUSALS: tuple[Refusal, ...] = (
    # -- parallelism
    *(
        Refusal(name, _above_one, _ONE_PROCESS)
        for name in (
            "tp_size",
            "pp_size",
            "ep_size",
            "attn_dp_size",
            "dcp_size",
            "attn_cp_size",
            "moe_dp_size",
            "nnodes",
        )
    ),
    Refusal(
        "dp_size",
        lambda value, _: value > 1 and not os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"),
        "replicas must be told which cores are theirs; set SGLANG_CPU_OMP_THREADS_BIND, as in '0-3|4-7' for two",
    ),
    Refusal("enable_dp_attention", _given, _ONE_PROCESS),
    Refusal("enable_two_batch_overlap", _given, _ONE_PROCESS),
    Refusal("disaggregation_mode", _none_of("null"), "prefill and decode run in one process; leave it out"),
    Refusal("encoder_only", _given, _ONE_PROCESS),
    Refusal("language_only", _given, _ONE_PROCESS),
    Refusal("use_ray", _given, _ONE_PROCESS),
    # -- speculation and adapters
    Refusal("speculative_algorithm", _given, _DRAFT),
    Refusal("speculative_draft_model_path", _given, _DRAFT),
    Refusal("enable_lora", _given, "adapters are not supported; merge them into the checkpoint"),
    Refusal("lora_paths", _given, "adapters are not supported; merge them into the checkpoint"),
    # -- cache
    Refusal(
        "page_size",
        lambda value, _: value is not None and (value < 2 or value % 2 != 0),
        "both tokens of a ratio-2 pair must lie in one page; use an even size, such as --page-size 64",
    ),
    Refusal(
        "chunked_prefill_size",
        lambda value, raw: value is not None and 0 < value < (raw["page_size"] or 64),
        "a chunk must hold at least one page; make it as large as --page-size (64 unless given)",
    ),
    Refusal("kv_cache_dtype", _none_of("auto"), "leave it out; --ced-kv-format chooses between published and bfloat16"),
    *(
        Refusal(name, _given, _NO_TIER)
        for name in (
            "enable_hierarchical_cache",
            "hicache_storage_backend",
            "enable_unified_cache_external_linker",
            "enable_lmcache",
            "enable_flexkv",
            "enable_hisparse",
            "enable_unified_memory",
            "enable_page_major_kv_layout",
        )
    ),
    Refusal("prefill_only_disable_kv_cache", _given, "encoder layers hand over through the KV pool; leave it out"),
    Refusal("enable_encoder_swa_bounded_replay", _unlike_ours, _EXACT),
    Refusal("enable_decoder_swa_bounded_replay", _unlike_ours, _EXACT),
    # -- weights
    Refusal(
        "load_format",
        _none_of("auto", "safetensors"),
        "weights are mapped from safetensors; use --load-format auto",
    ),
    Refusal("dtype", _none_of("auto", "bfloat16"), "activations are bfloat16; use --dtype auto"),
    Refusal("quantization", _given, _OWN_FORMAT),
    Refusal("modelopt_quant", _given, _OWN_FORMAT),
    Refusal(
        "model_impl",
        _none_of("auto", "sglang"),
        "the model class is that of sglang-ced; use --model-impl auto",
    ),
    Refusal("cpu_offload_gb", _given, "weights are mapped from disk already; leave it out"),
    Refusal("enable_memory_saver", _given, "weights are mapped from disk already; leave it out"),
    Refusal("startup_weight_load_mode", _none_of("serial", "auto"), "weights are mapped from disk; leave it out"),
    Refusal("weight_cache_mode", _none_of("off"), "weights are mapped from disk; leave it out"),
    # -- execution
    Refusal("device", _none_of("cpu"), "this version computes on the CPU; leave it out"),
    *(
        Refusal(
            name,
            _none_of(NAME),
            f"the layers share caches that only ours keeps; use --attention-backend {NAME}",
        )
        for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    ),
    Refusal("moe_runner_backend", _none_of("auto"), _OWN_KERNELS),
    Refusal("moe_a2a_backend", _none_of("none"), _OWN_KERNELS),
    Refusal("fp8_gemm_runner_backend", _none_of("auto"), _OWN_KERNELS),
    Refusal("fp4_gemm_runner_backend", _none_of("auto"), _OWN_KERNELS),
    Refusal(
        "sampling_backend",
        _none_of("pytorch"),
        "samplers of SGLang for other devices; use --sampling-backend pytorch",
    ),
    Refusal("enable_torch_compile", _given, _OWN_KERNELS),
    Refusal("enable_deterministic_inference", _given, "results do not depend on the batch anyway; leave it out"),
    # -- services
    Refusal("is_embedding", _given, _TEXT),
    Refusal("enable_multimodal", _given, "vision is not built yet; leave it out"),
    Refusal("enable_mis", _given, _TEXT),
    Refusal("dllm_algorithm", _given, _TEXT),
    Refusal("enable_return_routed_experts", _given, "expert choices are not recorded; leave it out"),
    Refusal("enable_return_indexer_topk", _given, "index choices are not recorded; leave it out"),
    Refusal(
        "enable_return_aux_hidden_states",
        _given,
        "only the last hidden states are kept; use --return-hidden-states-mode",
    ),
)


def check(raw: Raw) -> None:
    """Raise PluginError listing every refused option of `raw`: all server arguments and our options, by field name."""
    found = [refusal.message(raw) for refusal in REFUSALS if refusal.when(raw[refusal.field], raw)]
    if found:
        raise PluginError("sglang-ced does not support\n" + "\n".join(f"  {line}" for line in found))


def before_resolution(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Wrapper of the first resolution step (arg_groups/pipeline.py:47)."""
    if is_active() and claim.is_ours(server_args.model_path):
        check(server_args._raw_input | asdict(options_of(server_args)))
        if has_accelerator():
            raise PluginError(
                f"--attention-backend {NAME}: this version of sglang-ced computes on the CPU, and SGLang would mix it "
                "with the accelerator of this machine; hide that one, as with CUDA_VISIBLE_DEVICES=''"
            )
    previous(server_args)
