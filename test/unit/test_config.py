"""config.py: published configs are read, the layer plan is the report's, every refusal names its field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sglang_ced.config import CedConfig, ConfigError, EngramHash

# Model spec 2.2: layers, ratio, mode, KV source, index source, candidate source.
RELEASED_PLAN = (
    (range(2), 0, "window", None, None, None),
    (range(2, 3), 2, "full", 2, 2, None),
    (range(3, 8), 2, "reuse", 2, 2, None),
    (range(8, 9), 2, "full", 8, 8, None),
    (range(9, 14), 2, "reuse", 8, 8, None),
    (range(14, 15), 2, "full", 14, 14, None),
    (range(15, 20), 2, "reuse", 14, 14, None),
    (range(20, 21), 1, "full", 20, 20, None),
    (range(21, 24), 1, "reuse", 20, 20, None),
    (range(24, 25), 1, "reindex", 20, 24, 20),
    (range(25, 28), 1, "reuse", 20, 24, None),
    (range(28, 29), 1, "reindex", 20, 28, 20),
    (range(29, 32), 1, "reuse", 20, 28, None),
    (range(32, 33), 1, "reindex", 20, 32, 20),
    (range(33, 36), 1, "reuse", 20, 32, None),
    (range(36, 37), 1, "reindex", 20, 36, 20),
    (range(37, 40), 1, "reuse", 20, 36, None),
)


# -- published configs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratios", [40, 43])
def test_released_layer_plan_is_that_of_the_report(released_config: dict[str, Any], ratios: int) -> None:
    text = released_config["text_config"]
    text["compress_ratios"] = text["compress_ratios"][:ratios]
    config = CedConfig.from_dict(released_config)
    assert len(config.layers) == 40
    for layers, *expected in RELEASED_PLAN:
        for plan in (config.layers[i] for i in layers):
            found = [plan.ratio, plan.mode, plan.kv_source, plan.index_source, plan.candidate_source]
            assert found == expected, plan
    assert [p.index for p in config.layers if p.has_engram] == [1, 14]
    assert [p.index for p in config.layers if p.is_decoder] == list(range(20, 40))
    assert (config.num_encoder_layers, config.num_decoder_layers, config.max_ratio) == (20, 20, 2)


def test_released_config_is_read_without_a_remainder(released_config: dict[str, Any]) -> None:
    config = CedConfig.from_dict(released_config)
    assert (config.linear_format, config.expert_format) == ("fp8", "fp4")
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (0, (1,), 2)
    assert config.gate_temp == 1.0
    assert config.has_vision
    assert config.unknown_fields == ()


@pytest.mark.parametrize(
    ("name", "layers", "formats", "sources"),
    [
        ("toy8", 8, ("fp8", "fp4"), (2, 4)),
        ("toy8_bf16", 8, ("bf16", "bf16"), (2, 4)),
        ("toy40", 40, ("fp8", "fp4"), (2, 8, 14, 20)),
    ],
)
def test_golden_configs_are_read(
    golden_dir: Path, name: str, layers: int, formats: tuple[str, str], sources: tuple[int, ...]
) -> None:
    config = CedConfig.from_dir(golden_dir / name / "model")
    assert len(config.layers) == layers
    assert (config.linear_format, config.expert_format) == formats
    assert tuple(p.index for p in config.layers if p.owns_kv) == sources
    assert config.unknown_fields == ()


def test_flat_config_means_the_same_as_nested(released_config: dict[str, Any]) -> None:
    flat = {k: v for k, v in released_config.items() if k != "text_config"}
    flat |= {k: v for k, v in released_config["text_config"].items() if k != "model_type"}
    assert CedConfig.from_dict(flat) == CedConfig.from_dict(released_config)


def test_unknown_field_is_listed_and_not_refused(released_config: dict[str, Any]) -> None:
    released_config["text_config"]["made_up"] = 1
    assert CedConfig.from_dict(released_config).unknown_fields == ("made_up",)


def test_override_replaces_a_nested_field(golden_dir: Path) -> None:
    overrides = {"max_position_embeddings": 4096, "eos_token_id": [1, 5]}
    config = CedConfig.from_dir(golden_dir / "toy8" / "model", overrides)
    assert config.max_position_embeddings == 4096
    assert config.eos_token_ids == (1, 5)


# -- n-gram hash constants -----------------------------------------------------------------------------------


def _assert_constants(hashes: dict[int, EngramHash], group: str, ops: dict[str, Tensor]) -> None:
    for row, constants in enumerate(hashes.values()):
        assert list(constants.multipliers) == ops[f"{group}/multipliers"][row].tolist()
        assert [list(p) for p in constants.primes] == ops[f"{group}/primes"][row].tolist()
        assert list(constants.offsets) == ops[f"{group}/offsets"][row].tolist()


def test_released_hash_constants_equal_the_publishers(
    released_config: dict[str, Any], golden_ops: dict[str, Tensor]
) -> None:
    hashes = CedConfig.from_dict(released_config).engram_hashes
    assert list(hashes) == [1, 14]
    _assert_constants(hashes, "engram_full", golden_ops)
    assert [h.num_rows for h in hashes.values()] == [384006168, 384016682]


def test_miniature_hash_constants_equal_the_publishers(golden_dir: Path, golden_ops: dict[str, Tensor]) -> None:
    _assert_constants(CedConfig.from_dir(golden_dir / "toy8" / "model").engram_hashes, "engram", golden_ops)


# -- refusals ------------------------------------------------------------------------------------------------

MISSING = object()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", MISSING),
        ("hidden_size", 100),
        ("hidden_size", "5120"),
        ("hidden_size", 0),
        ("vocab_size", True),
        ("swiglu_limit", None),
        ("hidden_act", "gelu"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("attention_bias", True),
        ("num_key_value_heads", 8),
        ("q_head_norm", True),
        ("hc_pre_from_prev_sublayer", False),
        ("num_hash_layers", 3),
        ("n_shared_experts", 2),
        ("num_experts_per_tok", 385),
        ("o_groups", 7),
        ("qk_rope_head_dim", 63),
        ("qk_rope_head_dim", 256),
        ("index_head_dim", 120),
        ("compress_ratios", [0, 0, 2]),
        ("compress_ratios", [0] * 2 + [4] * 18 + [1] * 20),
        ("compress_ratios", [0] * 3 + [2] * 17 + [1] * 20),
        ("compress_ratios", [0] * 2 + [2] * 19 + [1] * 19),
        ("kv_source_layer_ids", []),
        ("kv_source_layer_ids", [8, 2, 14, 20]),
        ("kv_source_layer_ids", [2, 8, 14, 40]),
        ("kv_source_layer_ids", [8, 14, 20]),
        ("index_source_layer_ids", [2, 8, 20, 24]),
        ("candidate_source_layer_id", 24),
        ("candidate_topk_blocks", 0),
        ("candidate_topk_blocks", MISSING),
        ("engram_layer_ids", [1, 40]),
        ("engram_num_embeddings", [384006168]),
        ("engram_num_embeddings", [384006168, 384016683]),
        ("engram_head_dim", 250),
        ("engram_max_ngram_size", 1),
        ("engram_pad_token_id", 129280),
        ("engram_vocab_size", MISSING),
        ("hc_sinkhorn_iters", 0),
        ("rope_scaling", {"type": "linear", "factor": 2}),
        ("eos_token_id", "</s>"),
    ],
)
def test_fault_in_a_text_field_is_refused_by_name(released_config: dict[str, Any], field: str, value: object) -> None:
    text = released_config["text_config"]
    if value is MISSING:
        del text[field]
    else:
        text[field] = value
    with pytest.raises(ConfigError, match=rf"^{field}: "):
        CedConfig.from_dict(released_config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "awq"),
        ("activation_scheme", "static"),
        ("weight_block_size", [128, 128]),
        ("scale_fmt", None),
        ("expert_dtype", "int4"),
    ],
)
def test_other_quantisation_is_refused_by_name(released_config: dict[str, Any], field: str, value: object) -> None:
    released_config["quantization_config"][field] = value
    with pytest.raises(ConfigError, match=rf"^quantization_config\.{field}: "):
        CedConfig.from_dict(released_config)


@pytest.mark.parametrize("name", ["factor", "beta_fast", "beta_slow", "original_max_position_embeddings"])
def test_incomplete_rope_scaling_is_refused_by_name(released_config: dict[str, Any], name: str) -> None:
    del released_config["text_config"]["rope_scaling"][name]
    with pytest.raises(ConfigError, match=rf"^rope_scaling\.{name}: "):
        CedConfig.from_dict(released_config)


def test_rope_parameters_do_not_silently_drop_yarn(released_config: dict[str, Any]) -> None:
    text = released_config["text_config"]
    text["rope_parameters"] = text.pop("rope_scaling")
    with pytest.raises(ConfigError, match=r"^rope_parameters: "):
        CedConfig.from_dict(released_config)


@pytest.mark.parametrize("kind", ["deepseek_v4", "llama", None])
def test_another_model_type_is_refused(released_config: dict[str, Any], kind: str | None) -> None:
    released_config["model_type"] = kind
    with pytest.raises(ConfigError, match=r"^model_type: .*deepseek_v41"):
        CedConfig.from_dict(released_config)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        CedConfig.from_dir(tmp_path)


@pytest.mark.parametrize("content", [b'{"model_type": ', b"\xff\xfe", b"[1]"])
def test_unreadable_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        CedConfig.from_dir(tmp_path)


def test_fault_found_in_a_file_names_file_and_field(tmp_path: Path, released_config: dict[str, Any]) -> None:
    released_config["text_config"]["o_groups"] = 7
    (tmp_path / "config.json").write_text(json.dumps(released_config))
    with pytest.raises(ConfigError, match=r"config\.json: o_groups: "):
        CedConfig.from_dir(tmp_path)
