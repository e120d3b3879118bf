"""The scheduler process: what the model class attaches to SGLang once it is built, and what the rooms here
share.

Nothing of this runs for another architecture.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sglang_ced.cache.layout import CacheLayout
from sglang_ced.cache.replay import Replay
from sglang_ced.config import CedConfig
from sglang_ced.plugin import seams
from sglang_ced.plugin.errors import PluginError
from sglang_ced.plugin.flags import Options
from sglang_ced.plugin.register import NAME

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worker:
    """What this process serves."""

    config: CedConfig
    layout: CacheLayout
    options: Options
    replay: Replay


_worker: Worker | None = None


def is_attached() -> bool:
    """Whether this process serves one of our checkpoints."""
    return _worker is not None


def current() -> Worker:
    """The worker of this process. Raises PluginError before `attach`."""
    if _worker is None:
        raise PluginError("sglang-ced: no model of ours has been built in this process")
    return _worker


def attach(config: CedConfig, options: Options, replay: Replay) -> Worker:
    """Register the attention backend and hook pool sizing, batch construction and metrics. Once per process."""
    global _worker
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    from sglang_ced.plugin import engram, metrics, pool, tokens

    _worker = Worker(config=config, layout=CacheLayout(config, options.ced_kv_format), options=options, replay=replay)
    register_attention_backend(NAME)(_create_backend)
    seams.apply_hooks(
        {
            "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator": (
                pool.around_create_configurator,
                "AROUND",
            ),
            "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": (
                tokens.around_init_new,
                "AROUND",
            ),
            "sglang.srt.model_executor.model_runner.ModelRunner.sample": (engram.after_sample, "AFTER"),
            "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.__post_init__": (
                metrics.after_reporter_init,
                "AFTER",
            ),
        },
        seams.WORKER,
    )
    return _worker


def _create_backend(runner: object) -> object:
    from sglang_ced.plugin.backend import CedAttentionBackend

    return CedAttentionBackend(runner)
