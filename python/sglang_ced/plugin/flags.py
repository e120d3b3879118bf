"""Our own command-line flags, in one table.

They are added to SGLang's parser (server_args.py:351 `ServerArgs.add_cli_args`) and ride on the server
arguments as `server_args._ced`, an attribute that pickles with them into every process (server_args.py:498).
The Engine API has no command line; there the environment variable of a flag, or its default, holds.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from sglang_ced.cache.layout import KV_FORMATS, KvFormat
from sglang_ced.cache.replay import Replay
from sglang_ced.engram_store.placement import CACHE_MIB, PLACEMENTS, Placement, StoreOptions
from sglang_ced.plugin.errors import PluginError


@dataclass(frozen=True)
class Options:
    """Values of our flags."""

    swa_bounded_replay: bool = field(
        default=True,
        metadata={
            "env": "CED_SWA_BOUNDED_REPLAY",
            "help": "After a cache hit, rebuild window KV from the last window of cached tokens; run decoder layers "
            "for the last window of a prompt only. --no-swa-bounded-replay computes all that an exact answer needs "
            "(default: bounded).",
        },
    )
    ced_kernels: str = field(
        default="auto",
        metadata={
            "env": "CED_KERNELS",
            "choices": ("auto", "reference"),
            "help": "Kernels: the fastest for this machine, or the PyTorch references alone (default: auto).",
        },
    )
    ced_kv_format: KvFormat = field(
        default="published",
        metadata={
            "env": "CED_KV_FORMAT",
            "choices": KV_FORMATS,
            "help": "Storage of global KV and index keys: packed e2m1 as published, or the same values as bfloat16, "
            "which takes about 3.6 times the bytes and changes no answer, for comparison (default: published).",
        },
    )
    ced_strict: bool = field(
        default=False,
        metadata={
            "env": "CED_STRICT",
            "help": "Stop the server at a window row that is not its request's own, for tests; else such rows are "
            "counted and the window is rebuilt (default: off).",
        },
    )
    ced_overlap_schedule: bool = field(
        default=False,
        metadata={
            "env": "CED_OVERLAP_SCHEDULE",
            "help": "Let SGLang schedule the next batch while one runs (default: off, as both want the same cores).",
        },
    )

    ced_engram_placement: Placement = field(
        default="auto",
        metadata={
            "env": "CED_ENGRAM_PLACEMENT",
            "choices": PLACEMENTS,
            "help": "n-gram tables: mmap, rows stay in the checkpoint's files; ram, one copy in huge pages for all "
            "processes of this host; auto, ram if that takes at most half of the free memory (default: auto).",
        },
    )
    ced_engram_prefetch: bool = field(
        default=True,
        metadata={
            "env": "CED_ENGRAM_PREFETCH",
            "help": "Fetch table rows of a step while its first layers run, and from files those of the next chunk and "
            "of sampled tokens before; --no-ced-engram-prefetch fetches when a layer needs them (default: on).",
        },
    )
    ced_engram_cache_mib: int = field(
        default=CACHE_MIB,
        metadata={
            "env": "CED_ENGRAM_CACHE_MIB",
            "help": "Memory, in MiB, for table rows that come again, with placement mmap; 0 for none "
            f"(default: {CACHE_MIB}).",
        },
    )

    @property
    def engram(self) -> StoreOptions:
        """What the Engram flags ask for."""
        return StoreOptions(self.ced_engram_placement, self.ced_engram_prefetch, self.ced_engram_cache_mib)

    @classmethod
    def from_environment(cls, **given: Any) -> Options:
        """`given` values that are not None; else the environment; else the default.

        Raises PluginError naming the variable whose value is not one of its choices.
        """
        return cls(
            **{f.name: _from_environment(f) if given.get(f.name) is None else given[f.name] for f in fields(cls)}
        )


def _from_environment(option: Any) -> Any:
    name = option.metadata["env"]
    text = os.environ.get(name)
    if text is None:
        return option.default
    if isinstance(option.default, int) and not isinstance(option.default, bool):
        if not text.isdigit():
            raise PluginError(f"{name}={text}: expected a whole number, 0 or more")
        return int(text)
    words = {"0": False, "1": True} if isinstance(option.default, bool) else {w: w for w in option.metadata["choices"]}
    if text not in words:
        raise PluginError(f"{name}={text}: expected {' or '.join(words)}")
    return words[text]


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the flags to `parser`; a flag not given parses to None."""
    group = parser.add_argument_group("sglang-ced")
    for option in fields(Options):
        flag = "--" + option.name.replace("_", "-")
        if isinstance(option.default, bool):
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=option.metadata["help"])
        elif isinstance(option.default, int):
            group.add_argument(flag, type=_count, default=None, metavar="N", help=option.metadata["help"])
        else:
            group.add_argument(flag, choices=option.metadata["choices"], default=None, help=option.metadata["help"])


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def install() -> None:
    """Hook SGLang's argument parser and the name list of attention backends (arg_groups/choices.py:225)."""
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ced.plugin import refusals
    from sglang_ced.plugin.register import NAME

    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", _after_add_cli_args, HookType.AFTER)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.from_cli_args", _around_from_cli_args, HookType.AROUND)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    # The first step of the pipeline: options are refused as the user wrote them, before SGLang rewrites them.
    register_resolution_hook("handle_deprecated_dp_attention")(refusals.before_resolution)


def _after_add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    add_to(parser)


def _around_from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    server_args = original(cls, args)
    server_args._ced = {f.name: getattr(args, f.name, None) for f in fields(Options)}
    return server_args


def options_of(server_args: Any) -> Options:
    """The options of a launch, in any process."""
    return Options.from_environment(**(getattr(server_args, "_ced", None) or {}))


def replay_of(server_args: Any) -> Replay:
    """How windows are rebuilt in this launch, in any process.

    SGLang's `--no-enable-decoder-swa-bounded-replay` leaves the decoder untrimmed.
    """
    if not options_of(server_args).swa_bounded_replay:
        return "exact"
    return "encoder" if server_args.enable_decoder_swa_bounded_replay is False else "bounded"
