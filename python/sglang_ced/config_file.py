"""The published `config.json` as a file: read, flattened, and every field fetched by name and type.

`config.py` gives the values their meaning. Errors name the field.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODEL_TYPES = ("deepseek_v41", "deepseek_v4.1")
QUANT_BLOCK = 32


class ConfigError(ValueError):
    """A field of `config.json` is missing, contradicts another, or asks for what this code cannot serve."""


@dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters of the compressed rope table (frequencies only; there is no mscale)."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int


_MISSING = object()

# Fields that select an architecture: the one value that this code computes, and what an absent field means.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "hc_pre_from_prev_sublayer": True,
    "q_head_norm": False,
    "num_hash_layers": 0,
    "first_k_dense_replace": 0,
}

INTS = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_lora_rank "
    "o_groups max_position_embeddings moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok "
    "sliding_window index_n_heads index_head_dim index_topk hc_mult hc_sinkhorn_iters"
).split()
_FLOATS = "swiglu_limit rms_norm_eps rope_theta compress_rope_theta routed_scaling_factor hc_eps".split()
_ENGRAM_INTS = (
    "engram_max_ngram_size engram_vocab_size engram_n_heads engram_head_dim engram_pad_token_id "
    "engram_compressed_vocab_size"
).split()

# Known to other readers of the file and without effect on what is computed here.
_NEUTRAL = set(
    "architectures model_type dtype torch_dtype transformers_version use_cache initializer_range attention_dropout "
    "text_config vision_config quantization_config image_token_id bos_token_id eos_token_id pad_token_id "
    "dspark_block_size dspark_noise_token_id dspark_target_layer_ids dspark_markov_rank dspark_n_routed_experts "
    "dspark_num_experts_per_tok auto_map expert_dtype rope_parameters _name_or_path id2label label2id "
    "return_dict output_hidden_states pretraining_tp name_or_path chunk_size_feed_forward problem_type "
    "is_encoder_decoder output_attentions".split()
)


class ConfigReader:
    """One pass over a parsed config.json: typed access to fields, and the names that nobody asked for.

    Every method raises ConfigError naming the field where it is missing or of another type.
    """

    def __init__(self, raw: dict[str, Any]) -> None:
        text = raw.get("text_config", {})
        if not isinstance(text, dict):
            raise ConfigError(f"text_config: expected an object, found {type(text).__name__}")
        self.raw, self.fields = raw, {**{k: v for k, v in raw.items() if k != "text_config"}, **text}
        self.seen: set[str] = set(_NEUTRAL)
        kind = raw.get("model_type")
        if kind not in MODEL_TYPES:
            raise ConfigError(f"model_type: {kind!r} is not served here, only {' or '.join(MODEL_TYPES)}")
        for name, served in FIXED.items():
            found = self.get(name, served)
            if found != served:
                raise ConfigError(f"{name}: {found!r} is not supported, only {served!r}")

    def get(self, name: str, default: Any = _MISSING) -> Any:
        self.seen.add(name)
        value = self.fields.get(name, default)
        if value is _MISSING:
            raise ConfigError(f"{name}: missing")
        return value

    def integer(self, name: str, default: Any = _MISSING) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name}: expected a non-negative integer, found {value!r}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name}: expected a number, found {value!r}")
        return float(value)

    def ints(self, name: str, default: Any = _MISSING) -> tuple[int, ...]:
        value = self.get(name, default)
        if not isinstance(value, (list, tuple)) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise ConfigError(f"{name}: expected a list of integers, found {value!r}")
        return tuple(value)

    def token(self, name: str) -> int | None:
        value = self.get(name, None)
        if isinstance(value, (list, tuple)):
            value = value[0] if value else None
        if value is not None and not isinstance(value, int):
            raise ConfigError(f"{name}: expected a token id, found {value!r}")
        return value

    def tokens(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them."""
        value = self.get(name, None)
        if value is None:
            return ()
        return self.ints(name) if isinstance(value, (list, tuple)) else (self.integer(name),)

    def values(self) -> dict[str, Any]:
        """All fields of `CedConfig` by name, but `unknown_fields`."""
        linear, expert = self.quantization()
        out: dict[str, Any] = {name: self.integer(name) for name in INTS}
        out |= {name: self.number(name) for name in _FLOATS}
        engram = self.ints("engram_layer_ids", ())
        out |= {name: self.integer(name, _MISSING if engram else 0) for name in _ENGRAM_INTS}
        source = self.get("candidate_source_layer_id", None)
        vision = self.get("vision_config", None)
        vision_layers = (
            vision.get("num_hidden_layers", 0) if isinstance(vision, dict) else self.get("vision_n_layers", 0)
        )
        return out | {
            "rope_scaling": self.rope_scaling(),
            "gate_temp": self.number("gate_temp", 1.0),
            "compress_ratios": self.ints("compress_ratios"),
            "kv_source_layer_ids": self.ints("kv_source_layer_ids"),
            "index_source_layer_ids": self.ints("index_source_layer_ids"),
            "candidate_source_layer_id": None if source is None else self.integer("candidate_source_layer_id"),
            "candidate_topk_blocks": self.integer("candidate_topk_blocks", 0 if source is None else _MISSING),
            "candidate_block_size": self.integer("candidate_block_size", 1 if source is None else _MISSING),
            "engram_layer_ids": engram,
            "engram_num_embeddings": self.ints("engram_num_embeddings", _MISSING if engram else ()),
            "num_nextn_predict_layers": self.integer("num_nextn_predict_layers", 0),
            "linear_format": linear,
            "expert_format": expert,
            "bos_token_id": self.token("bos_token_id"),
            "eos_token_ids": self.tokens("eos_token_id"),
            "pad_token_id": self.token("pad_token_id"),
            "image_token_id": self.token("image_token_id"),
            "has_vision": bool(vision_layers),
        }

    def rope_scaling(self) -> RopeScaling | None:
        raw = self.get("rope_scaling", None)
        if raw is None:
            # A newer spelling that this reader does not know; passing over it would drop YaRN without a word.
            if self.fields.get("rope_parameters"):
                raise ConfigError(
                    "rope_parameters: not supported, use rope_scaling, rope_theta and compress_rope_theta"
                )
            return None
        if not isinstance(raw, dict) or raw.get("type", raw.get("rope_type")) != "yarn":
            raise ConfigError(f"rope_scaling: only type yarn is supported, found {raw!r}")
        names = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
        for name in names:
            if isinstance(raw.get(name), bool) or not isinstance(raw.get(name), (int, float)):
                raise ConfigError(f"rope_scaling.{name}: expected a number, found {raw.get(name)!r}")
        factor, fast, slow, original = (raw[name] for name in names)
        return RopeScaling(float(factor), float(fast), float(slow), int(original))

    def quantization(self) -> tuple[str, str]:
        """Formats of (linears, routed experts)."""
        raw = self.get("quantization_config", None)
        if raw is None:
            return "bf16", "bf16"
        if not isinstance(raw, dict):
            raise ConfigError(f"quantization_config: expected an object, found {raw!r}")
        fixed = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [QUANT_BLOCK, QUANT_BLOCK]}
        for name, served in (fixed | {"scale_fmt": "ue8m0"}).items():
            if raw.get(name) != served:
                raise ConfigError(f"quantization_config.{name}: {raw.get(name)!r} is not supported, only {served!r}")
        expert = raw.get("expert_dtype") or self.fields.get("expert_dtype") or "fp8"
        if expert not in ("fp4", "fp8"):
            raise ConfigError(f"quantization_config.expert_dtype: {expert!r} is not supported, only 'fp4' or 'fp8'")
        return "fp8", expert

    def unknown(self) -> tuple[str, ...]:
        """Fields of the file that no one has asked for."""
        return tuple(sorted(set(self.fields) - self.seen))


def read_config_file(file: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The parsed object, with top-level or text fields replaced by name.

    Raises ConfigError naming the file if it is no JSON object.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(raw).__name__}")
    return _override(raw, overrides)


def _override(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return {**raw, **overrides}
    inner = {k: v for k, v in overrides.items() if k in text}
    outer = {k: v for k, v in overrides.items() if k not in text}
    return {**raw, "text_config": {**text, **inner}, **outer}
