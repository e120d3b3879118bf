"""What a launch of one of our checkpoints uses where the user gave nothing, and the checks before any process
starts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sglang_ced.cache.layout import CacheLayout
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.config import CedConfig
from sglang_ced.engram_store import host, placement
from sglang_ced.engram_store.table import TableError
from sglang_ced.plugin import claim, memory, requests, seams
from sglang_ced.plugin.errors import PluginError
from sglang_ced.plugin.flags import Options, options_of, replay_of
from sglang_ced.plugin.register import NAME, require_registered

logger = logging.getLogger(__name__)

KV_SHARE_OF_FREE_MEMORY = 0.25


@dataclass(frozen=True)
class Default:
    """Field `name` becomes `value` where it still holds one of `unset` (what SGLang has there without the
    user).
    """

    name: str
    unset: tuple[Any, ...]
    value: Any
    why: str


DEFAULTS = (
    # With device cpu SGLang never asks the platform: it picks one of these two before
    # (arg_groups/platform_hook.py:158).
    Default(
        "attention_backend",
        (None, "intel_amx", "torch_native"),
        NAME,
        "the layers share caches that only it keeps",
    ),
    Default("page_size", (None,), 64, "even, and short enough that most of a shared prefix is a hit"),
    # SGLang's own default is 2048 (mem_cache/kv_cache_configurator.py:3121), and every slot owns a window
    # ring.
    Default("max_running_requests", (None,), 16, "more would only wait for the same cores"),
    Default("chunked_prefill_size", (None,), 2048, "running requests wait at most for one chunk"),
    # Two threads take turns on the same cores; measured 1.4 to 2.9 times slower at batch 1 to 8.
    Default("disable_overlap_schedule", (False,), True, "on a CPU there is nothing to overlap with"),
    Default("sleep_on_idle", (False,), True, "an idle server leaves the cores alone"),
    Default("dtype", ("auto",), "bfloat16", "activations are bfloat16"),
    Default("sampling_backend", (None,), "pytorch", "the sampler that runs on a CPU"),
    Default("reasoning_parser", (None,), "auto", "detected from the architecture: deepseek-v41"),
    Default("tool_call_parser", (None,), "auto", "detected from the architecture: deepseekv41"),
)


def apply(server_args: Any) -> None:
    """Check the launch and assign defaults to `server_args`, the recorder of arg_groups/overrides.py:134.

    Raises PluginError (plugin not applied, SGLang other than expected, too little memory), ConfigError or
    CheckpointError; each names its cause.
    """
    require_registered()
    problems = seams.check_seams()
    if problems:
        raise PluginError(seams.report(problems))
    options = options_of(server_args)
    config = claim.read_config(server_args.model_path, server_args.json_model_override_args)
    with Checkpoint.open(server_args.model_path, config) as checkpoint:
        reserved = place_tables(checkpoint, options, server_args)
    requests.install()
    for default in DEFAULTS:
        if default.name == "disable_overlap_schedule" and options.ced_overlap_schedule:
            continue
        if getattr(server_args, default.name) in default.unset:
            setattr(server_args, default.name, default.value)
    if server_args.max_total_tokens is None and server_args.mem_fraction_static is None:
        server_args.max_total_tokens = token_cap(config, server_args, reserved)
    mode = replay_of(server_args)  # before SGLang's own replay, which is CUDA's, is switched off below
    server_args.enable_encoder_swa_bounded_replay = False
    if server_args.enable_decoder_swa_bounded_replay:
        server_args.enable_decoder_swa_bounded_replay = None
    logger.info("sglang-ced: replay %s, window %d, %s", mode, config.sliding_window, options)


def place_tables(checkpoint: Checkpoint, options: Options, server_args: Any) -> int:
    """Choose the placement of n-gram tables once for all processes: bytes of memory that it will take.

    Raises PluginError where the flags ask for more than there is.
    """
    if not checkpoint.config.engram_layer_ids:
        return 0
    try:
        plan = placement.plan(checkpoint, options.engram)
    except TableError as error:
        raise PluginError(f"--ced-{error}") from error
    given = getattr(server_args, "_ced", None)
    if given is not None:
        given["ced_engram_placement"] = plan.chosen
    return plan.new_bytes


def token_cap(config: CedConfig, server_args: Any, reserved: int = 0) -> int:
    """Tokens whose cache fits into our share of free memory, less `reserved` bytes, in whole pages, but no more than
    the running requests can fill with text as long as the context. Raises PluginError where not even two pages fit.
    """
    layout = CacheLayout(config, options_of(server_args).ced_kv_format)
    page, slots = server_args.page_size, server_args.max_running_requests
    budget = int((host.free_bytes() - reserved) * KV_SHARE_OF_FREE_MEMORY) // server_args.dp_size
    fixed = memory.slot_bytes(layout) * (slots + 1)
    useful = slots * (server_args.context_length or config.max_position_embeddings)
    pages = min(int((budget - fixed) / memory.token_bytes(layout)), useful) // page
    if pages < 2:
        raise PluginError(
            f"too little free memory: {KV_SHARE_OF_FREE_MEMORY:.0%} of it is {budget / 2**20:.0f} MiB, and "
            f"window KV of {slots} running requests takes {fixed / 2**20:.0f} MiB; lower "
            "--max-running-requests, or set --max-total-tokens yourself"
        )
    logger.info(
        "sglang-ced: KV pool of %d tokens (at most %.0f %% of free memory; KV format %s, %.1f bytes a token, %d bytes "
        "a running request); --max-total-tokens sets another size",
        pages * page,
        KV_SHARE_OF_FREE_MEMORY * 100,
        layout.kv_format,
        layout.global_bytes_per_token,
        memory.slot_bytes(layout),
    )
    return pages * page
