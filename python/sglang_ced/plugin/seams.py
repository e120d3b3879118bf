"""Every name of SGLang that this folder builds on, in one table, and the check that they are what was
expected.

Written against SGLang 0.5.23, which promises none of them. Line numbers are those of its wheel, under
sglang/srt/.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang_ced.plugin.errors import PluginError

EXPECTED_VERSION = "0.5.23"

# When a name is needed: in every process at plugin load; in the launcher; in the scheduler process.
EARLY, LAUNCHER, WORKER = "early", "launcher", "worker"


@dataclass(frozen=True)
class Seam:
    """One name. path: `module:qualified.name` below `sglang.srt`.

    params: parameters that its signature must have, in this order. members: attributes that a class must
    have, as attribute, field, or assigned in `__init__`. hooked: we wrap it through SGLang's hook registry.
    """

    path: str
    stage: str
    why: str
    params: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    hooked: bool = False

    @property
    def target(self) -> str:
        """Dotted path, as the hook registry takes it."""
        return "sglang.srt." + self.path.replace(":", ".")

    def resolve(self) -> Any:
        module, _, name = self.path.partition(":")
        found: Any = importlib.import_module(f"sglang.srt.{module}")
        for part in name.split("."):
            found = getattr(found, part)
        return found


_HOOKS = "plugins.hook_registry"
_BATCH = "model_executor.forward_batch_info"
_LOGITS = "layers.logits_processor"
_POOL = "mem_cache.memory_pool"
_SIZES = "model_executor.pool_configurator"

SEAMS = (
    # -- entry, flags, claim
    Seam("platforms.interface:SRTPlatform", EARLY, "our platform", members=("apply_server_args_defaults",)),
    Seam("platforms.interface:SRTPlatform.get_kv_pool_cls", EARLY, "gives our pool", ("self", "kind")),
    Seam("platforms.cpu:CpuDeviceMixin", EARLY, "memory and device calls of a CPU"),
    Seam("platforms.device_mixin:PlatformEnum", EARLY, "marks it out-of-tree", members=("OOT",)),
    Seam(f"{_HOOKS}:HookRegistry.register", EARLY, "adds a hook", ("target", "hook", "hook_type", "source")),
    Seam(f"{_HOOKS}:HookRegistry.apply_hooks", EARLY, "applies hooks added after plugin load"),
    Seam(f"{_HOOKS}:HookSource", EARLY, "names us in the log", ("plugin_name", "dist_name")),
    Seam(f"{_HOOKS}:HookType", EARLY, "kinds of hooks", members=("BEFORE", "AFTER", "AROUND")),
    Seam("utils.hf_transformers.config:HfModelConfigParser.parse", EARLY, "claims the config",
         ("self", "model"), hooked=True),
    Seam("configs.deepseek_v41:DeepseekV41Config", EARLY, "the config that is claimed",
         members=("model_type", "vision_n_layers")),
    Seam("server_args:ServerArgs.add_cli_args", EARLY, "adds our flags", ("parser",), hooked=True),
    Seam("server_args:ServerArgs.from_cli_args", EARLY, "keeps our flags", ("args",), hooked=True),
    Seam("arg_groups.choices:ATTENTION_BACKEND_CHOICES", EARLY, "names of attention backends"),
    Seam("arg_groups.choices:add_attention_backend_choices", EARLY, "adds ours"),
    Seam("arg_groups.resolution_hooks:register_resolution_hook", EARLY, "refuses options", ("name",)),
    Seam("environ:envs.SGLANG_EXTERNAL_MODEL_PACKAGE", EARLY, "where the model class is found"),
    # -- launcher
    Seam("arg_groups.parallel_hook:handle_deprecated_dp_attention", LAUNCHER, "the first resolution step",
         ("server_args",)),
    Seam("managers.tokenizer_manager:TokenizerManager._validate_one_request", LAUNCHER, "refuses media",
         ("self", "obj", "input_ids"), hooked=True),
    Seam("entrypoints.openai.serving_chat:OpenAIServingChat._validate_media_content", LAUNCHER,
         "names the cause", ("self", "request"), hooked=True),
    # -- model
    Seam("runtime_context:get_model", WORKER, "model path and config overrides"),
    Seam("runtime_context:get_schedule", WORKER, "number of request slots"),
    Seam("runtime_context:get_server_args", WORKER, "our flags"),
    Seam("models.registry:import_model_classes", WORKER, "finds EntryClass", ("package_name",)),
    Seam(f"{_LOGITS}:LogitsProcessor.forward", WORKER, "logits and prompt logprobs",
         ("self", "input_ids", "hidden_states", "lm_head", "logits_metadata")),
    Seam(f"{_LOGITS}:LogitsProcessor._compute_lm_head", WORKER, "calls quant_method.apply of our head",
         ("self", "hidden_states", "lm_head", "embedding_bias")),
    Seam(f"{_LOGITS}:LogitsMetadata.from_forward_batch", WORKER, "row choice", ("forward_batch",)),
    Seam(f"{_LOGITS}:LogitsMetadata", WORKER, "row choice", members=(
        "extend_seq_lens", "extend_seq_lens_cpu", "extend_return_logprob", "extend_logprob_start_lens_cpu")),
    Seam("model_executor.model_runner_components.weight_updater:_unsupported_derived_weight_cache_error",
         WORKER, "refuses weight updates", ("model",)),
    # -- batch
    Seam("model_executor.forward_context:get_attn_backend", WORKER, "the plan of this forward"),
    Seam("layers.attention.attention_registry:register_attention_backend", WORKER, "adds `ced`", ("name",)),
    Seam("layers.attention.base_attn_backend:AttentionBackend.init_forward_metadata", WORKER,
         "plans a batch", ("self", "forward_batch")),
    Seam(f"{_BATCH}:ForwardBatch.init_new", WORKER, "adds token ids", ("batch", "model_runner"), hooked=True),
    Seam(f"{_BATCH}:ForwardBatch", WORKER, "what a step is made of", members=(
        "forward_mode", "input_ids", "req_pool_indices", "seq_lens_cpu", "extend_prefix_lens_cpu",
        "extend_seq_lens_cpu", "extend_logprob_start_lens_cpu", "return_logprob", "capture_hidden_mode",
        "token_indices_to_pool", "model_specific_states")),
    Seam(f"{_BATCH}:ForwardMode", WORKER, "kinds of batches",
         members=("is_idle", "is_decode", "is_extend_without_speculative")),
    Seam(f"{_BATCH}:CaptureHiddenMode", WORKER, "hidden states asked for", members=("is_full", "is_last")),
    Seam("managers.schedule_batch:Req", WORKER, "token ids on the host", members=(
        "origin_input_ids", "output_ids", "full_untruncated_fill_ids", "return_logprob",
        "logprob_start_len", "skip_radix_cache_insert", "discard_output_reason", "to_finish", "finished_len")),
    Seam("managers.schedule_batch:FINISH_ABORT", WORKER, "ends a request by name",
         ("message", "status_code", "err_type")),
    Seam("model_executor.model_runner:ModelRunner.sample", WORKER, "says what comes next",
         ("self", "logits_output", "forward_batch"), hooked=True),
    Seam("managers.schedule_batch:ScheduleBatch", WORKER, "which rows decode",
         members=("reqs", "decoding_reqs", "forward_mode")),
    # -- metrics
    Seam("managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter.__post_init__", WORKER,
         "labels of SGLang's metrics", ("self",), hooked=True),
    Seam("managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter", WORKER,
         "labels of SGLang's metrics", members=("metrics_collector",)),
    Seam("observability.metrics_collector:SchedulerMetricsCollector", WORKER, "labels of SGLang's metrics",
         members=("labels",)),
    # -- pools
    Seam(f"{_SIZES}:create_memory_pool_configurator", WORKER, "true sizes", ("kvc",), hooked=True),
    Seam(f"{_SIZES}:DefaultPoolConfigurator.calculate_pool_sizes", WORKER, "true sizes",
         ("self", "available_bytes", "page_size")),
    Seam(f"{_SIZES}:MemoryPoolConfig", WORKER, "true sizes", members=("max_total_num_tokens",)),
    Seam(f"{_POOL}:MHATokenToKVPool", WORKER, "our pool subclasses it", members=(
        "_create_buffers", "_clear_buffers", "get_kv_size_bytes", "k_buffer", "v_buffer")),
    Seam(f"{_POOL}:MHATokenToKVPool._finalize_allocation_log", WORKER, "logs sizes", ("self", "num_tokens")),
    Seam(f"{_POOL}:ReqToTokenPool", WORKER, "slots of a request, and when a row is reused",
         members=("req_to_token", "req_generation")),
)  # fmt: skip


def check_seams(stage: str | None = None, seams: Iterable[Seam] = SEAMS) -> list[str]:
    """What differs from the table, one line each; empty if nothing. `stage` limits the check to one stage."""
    problems = [_check_version()] + [_check(seam) for seam in seams if stage in (None, seam.stage)]
    return [problem for problem in problems if problem]


def report(problems: list[str]) -> str:
    """The message that stops a launch."""
    lines = "\n".join(f"  {problem}" for problem in problems)
    return f"sglang-ced attaches to SGLang {EXPECTED_VERSION}; what is installed differs:\n{lines}"


def require_patched(stage: str) -> None:
    """Raise PluginError where a hook of `stage` is not in place: SGLang only logs one that it could not
    apply.
    """
    missing = [s.target for s in SEAMS if s.stage == stage and s.hooked and not hasattr(s.resolve(), "__wrapped__")]
    if missing:
        raise PluginError(f"sglang-ced: SGLang did not apply the hooks on {', '.join(missing)}")


def apply_hooks(hooks: dict[str, tuple[Callable[..., Any], str]], stage: str) -> None:
    """Hook targets after SGLang has loaded its plugins: {target: (hook, kind)}. Raises PluginError if one
    failed.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, HookType[kind], source=HookSource("ced", "sglang-ced"))
    HookRegistry.apply_hooks()
    require_patched(stage)


def _check_version() -> str:
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return "sglang is not installed"
    return "" if found == EXPECTED_VERSION else f"version: {found}, expected {EXPECTED_VERSION}"


def _check(seam: Seam) -> str:
    try:
        found = seam.resolve()
    except (ImportError, AttributeError) as error:
        return f"{seam.target}: not found ({error}); needed for: {seam.why}"
    missing = [name for name in seam.members if not _has_member(found, name)]
    if missing:
        return f"{seam.target}: has no {', '.join(missing)}; needed for: {seam.why}"
    if seam.params:
        names = list(inspect.signature(found).parameters)
        if [name for name in names if name in seam.params] != list(seam.params):
            found_names, wanted = ", ".join(names), ", ".join(seam.params)
            return f"{seam.target}: parameters are ({found_names}), expected {wanted}; needed for: {seam.why}"
    return ""


def _has_member(cls: Any, name: str) -> bool:
    if hasattr(cls, name) or any(name in getattr(base, "__annotations__", ()) for base in cls.__mro__):
        return True
    return any(name in base.__init__.__code__.co_names for base in cls.__mro__ if hasattr(base.__init__, "__code__"))
