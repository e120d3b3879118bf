"""The platform that SGLang runs on where this plugin serves: a CPU, seen as an out-of-tree device."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CedPlatform(CpuDeviceMixin, SRTPlatform):
    """Serves our checkpoints; gives SGLang its own defaults for any other model."""

    _enum = PlatformEnum.OOT
    device_name = "ced"
    device_type = "cpu"
    # No Triton on a CPU: SGLang then takes its torch-native allocator and index writers
    # (platforms/interface.py:49).
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:  # type: ignore[override]
        """SGLang splits the answer at ':' (arg_groups/serving_hook.py:658), so it must be a string."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """For other models; ours get `ced` in `defaults.py`."""
        return "torch_native"

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Defaults for our checkpoints (arg_groups/platform_hook.py:90). Runs in the launcher only.

        This is also where a plugin that did not apply stops the launch: exceptions pass through here.
        """
        from sglang_ced.plugin import claim, defaults

        if claim.is_ours(server_args.model_path):
            defaults.apply(server_args)

    def get_kv_pool_cls(self, *, kind: str) -> type | None:  # type: ignore[override]
        """Our pool in a process that has built our model class; SGLang's own otherwise."""
        from sglang_ced.plugin import worker

        if kind != "mha" or not worker.is_attached():
            return None
        from sglang_ced.plugin.pool import CedKVPool

        return CedKVPool
