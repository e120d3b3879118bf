"""Where SGLang enters: `activate` (platform entry point) and `register` (general plugin entry point).

Both run in every SGLang process, before any argument is known, so they stay light. What needs SGLang's heavy
modules is attached later: in the launcher by `platform.py`, in the scheduler process when the model class is
built (`worker.py`).

SGLang logs an exception of `register` and goes on (plugins/__init__.py:103-141). So a failure is kept here,
and `require_registered`, called where nothing is swallowed, stops the launch with it.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise

from sglang_ced.plugin import seams
from sglang_ced.plugin.errors import PluginError

NAME = "ced"
PLATFORM = "sglang_ced.plugin.platform.CedPlatform"

_registered = False
_failure: str | None = None


def activate() -> str | None:
    """Qualified name of our platform where it should serve, else None (platforms/__init__.py:87
    `_resolve_platform`).

    It activates by itself on a machine without an accelerator. Where there is one, SGLang serves this model
    itself: then only on request (`--attention-backend ced`, or SGLANG_PLATFORM=ced for the Engine API). With
    SGLANG_USE_CPU_ENGINE=1 SGLang's own CPU platform has been chosen.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return PLATFORM if is_requested() or not has_accelerator() else None


def is_requested() -> bool:
    """Whether the user asked for this plugin by name."""
    words = sys.argv[1:]
    flag = "--attention-backend"
    return f"{flag}={NAME}" in words or (flag, NAME) in pairwise(words) or os.environ.get("SGLANG_PLATFORM") == NAME


def has_accelerator() -> bool:
    """Whether torch sees a device that SGLang has a platform for."""
    import torch

    names = ("cuda", "xpu", "npu", "musa", "mps")
    return any(hasattr(torch, name) and getattr(torch, name).is_available() for name in names)


def register() -> None:
    """Claim the checkpoints and add flags. Does nothing where `activate` left the machine to stock SGLang.

    Raises PluginError where this SGLang is not the one expected.
    """
    global _registered, _failure
    if not is_active() and has_accelerator():
        return
    try:
        from sglang_ced.plugin import claim, flags

        problems = seams.check_seams(seams.EARLY)
        if problems:
            raise PluginError(seams.report(problems))
        claim.install()  # without our platform too: it then says why the launch cannot work
        if is_active():
            flags.install()
        _registered = True
    except Exception as error:
        _failure = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        raise


def is_active() -> bool:
    """Whether this process runs on our platform."""
    from sglang.srt.platforms import current_platform

    return type(current_platform).__name__ == "CedPlatform"


def require_registered() -> None:
    """Raise PluginError unless `register` ran in this process and its hooks are in place."""
    if _failure is not None:
        raise PluginError(f"sglang-ced could not attach to SGLang: {_failure}")
    if not _registered:
        raise PluginError(
            "sglang-ced: the platform is active but the plugin of the same name did not run in this process. "
            f"If SGLANG_PLUGINS is set ({os.environ.get('SGLANG_PLUGINS')!r}), add '{NAME}' to it."
        )
    seams.require_patched(seams.EARLY)
