"""Which checkpoints are ours, and how SGLang gets to know.

Stock SGLang rewrites the architecture of a DeepSeek-V4.1 config to `DeepseekV4ForCausalLM`
(configs/deepseek_v41.py:44), which pulls in the CUDA-only V4 pool and argument hooks. The claim renames it
once more, at the one place every process reads the config through (utils/hf_transformers/config.py:330
`get_config`), and keeps `model_type`, by which SGLang picks the chat encoding and the parsers
(entrypoints/openai/chat_encoding.py:13).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sglang_ced.config import MODEL_TYPES, CedConfig, ConfigError
from sglang_ced.plugin.errors import PluginError

ARCHITECTURE = "DeepseekV41CedForCausalLM"
MODEL_PACKAGE = "sglang_ced.plugin.models"
STOCK_MODEL_TYPE = "deepseek_v41"


def is_ours(model_path: str | os.PathLike[str]) -> bool:
    """Whether `model_path` is a local directory holding a checkpoint that this plugin serves.

    Reads `config.json` itself, so that the answer does not depend on the claim below.
    """
    try:
        raw = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(raw, dict) and raw.get("model_type") in MODEL_TYPES


def read_config(model_path: str, overrides: str | None) -> CedConfig:
    """The config of a launch; `overrides` is the JSON text of --json-model-override-args.

    Raises ConfigError naming the field.
    """
    fields = json.loads(overrides or "{}")
    config = CedConfig.from_dir(model_path, fields)
    strange = sorted(set(fields) & set(config.unknown_fields))
    if strange:
        raise ConfigError(f"--json-model-override-args: this model has no field {', '.join(strange)}")
    return config


def install() -> None:
    """Hook SGLang's `hf` config parser, and name our model package.

    The package is named in the environment, so that every process inherits it and none imports SGLang's 200
    model modules first (models/registry.py:154); those still load when another architecture asks for them.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", MODEL_PACKAGE)
    HookRegistry.register(
        "sglang.srt.utils.hf_transformers.config.HfModelConfigParser.parse", _after_parse, HookType.AFTER
    )


def _after_parse(config: Any, _parser: Any, model: Any, *_: Any, **__: Any) -> Any:
    return claim(config, model) if getattr(config, "model_type", None) == STOCK_MODEL_TYPE else None


def claim(config: Any, model_path: Any) -> Any:
    """Give a V4.1 config to our model class where our platform serves; leave it to stock elsewhere."""
    from sglang_ced.plugin.register import has_accelerator, is_active

    if is_active():
        if not Path(model_path).is_dir():
            raise PluginError(
                f"--model-path {model_path}: sglang-ced maps weights from a local directory; "
                f"download it first (hf download {model_path}) and give its path"
            )
        config.architectures = [ARCHITECTURE]
        config.vision_n_layers = 0  # the tower is not built; with it SGLang asks for an image processor
    elif not has_accelerator():
        raise PluginError(
            "SGLANG_USE_CPU_ENGINE=1 selects SGLang's own CPU engine, which cannot serve "
            f"{STOCK_MODEL_TYPE}; unset it to serve with sglang-ced"
        )
    return config
