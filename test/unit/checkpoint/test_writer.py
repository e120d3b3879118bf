"""checkpoint/writer.py: what is written reads back bit for bit, is whole or not there, and is streamed."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ced import formats
from sglang_ced.checkpoint.files import INDEX_FILE, SINGLE_FILE
from sglang_ced.checkpoint.names import Kind, TensorSpec, expected_tensors
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.checkpoint.writer import (
    encode,
    random_tensors,
    random_tensors_fp4,
    write_checkpoint,
    write_random_checkpoint,
)
from sglang_ced.config import CedConfig, ConfigError


def _raw_config(expert_format: str = "fp4", **text: Any) -> dict[str, Any]:
    """Three layers with every mechanism: window only, ratio 2, ratio 1; Engram before the second."""
    base: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 32,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 256,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "moe_intermediate_size": 32,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "sliding_window": 16,
        "compress_ratios": [0, 2, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 8,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1],
        "engram_num_embeddings": [11 + 13],
        "engram_max_ngram_size": 2,
        "engram_vocab_size": 11,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 60,
    }
    raw = {"model_type": "deepseek_v41", "bos_token_id": 0, "eos_token_id": 1, "text_config": base | text}
    if expert_format != "bf16":
        quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
        raw["quantization_config"] = quantization | {"scale_fmt": "ue8m0", "expert_dtype": expert_format}
    return raw


def _rounded(value: Tensor, spec: TensorSpec, norm_dtype: torch.dtype) -> Tensor:
    """What a stored value is worth, by the number formats alone."""
    if spec.kind is Kind.FP8:
        return formats.dequantize_weight_e4m3(*formats.quantize_weight_e4m3(value))
    if spec.kind is Kind.FP4:
        return formats.fake_quant_e2m1_ue8m0(value)
    if spec.kind is Kind.TABLE:
        return formats.fake_quant_e4m3(value)
    dtype = {Kind.F32: torch.float32, Kind.BF16: torch.bfloat16, Kind.PLAIN: norm_dtype}[spec.kind]
    return value.to(dtype).float()


def _assert_reads_back(path: Path, tensors: dict[str, Tensor], norm_dtype: torch.dtype = torch.bfloat16) -> None:
    with Checkpoint.open(path) as checkpoint:
        specs = expected_tensors(checkpoint.config)
        read = dict(checkpoint.dequantized())
        assert read.keys() == tensors.keys()
        for name, value in read.items():
            assert torch.equal(value, _rounded(tensors[name], specs[name], norm_dtype)), name


# -- round trip ----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    expert_format=st.sampled_from(["fp4", "fp8", "bf16"]),
    shape=st.fixed_dictionaries(
        {
            "hidden_size": st.sampled_from([32, 64, 96]),
            "vocab_size": st.sampled_from([32, 320, 321]),
            "n_routed_experts": st.sampled_from([2, 6]),
            "moe_intermediate_size": st.sampled_from([32, 96]),
            "num_attention_heads": st.sampled_from([2, 6]),
            "q_lora_rank": st.sampled_from([32, 64]),
            "o_lora_rank": st.sampled_from([16, 48]),
            "index_n_heads": st.sampled_from([1, 3]),
            "hc_mult": st.sampled_from([1, 2, 4]),
        }
    ),
    norm_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    shard_bytes=st.sampled_from([1, 20_000, 1 << 30]),
    seed=st.integers(0, 2**32),
)
def test_any_shape_reads_back_bit_for_bit(
    expert_format: str, shape: dict[str, int], norm_dtype: torch.dtype, shard_bytes: int, seed: int
) -> None:
    raw = _raw_config(expert_format, **shape)
    tensors = dict(random_tensors(CedConfig.from_dict(raw), seed))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model"
        write_checkpoint(path, raw, tensors, shard_bytes=shard_bytes, norm_dtype=norm_dtype)
        _assert_reads_back(path, tensors, norm_dtype)


@pytest.mark.parametrize("shape", [(6, 96), (33, 32), (321, 64), (1, 40)])
def test_rows_that_fill_no_tile_have_a_scale_of_their_own(shape: tuple[int, int]) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    value[-1] *= 1000.0
    spec = TensorSpec(shape, Kind.FP8)
    stored = encode("a.weight", value, spec)
    assert {name: tuple(t.shape) for name, t in stored.items()} == {
        name: form.shape for name, form in spec.stored("a.weight").items()
    }
    found = formats.dequantize_weight_e4m3(stored["a.weight"], stored["a.scale"])
    assert torch.equal(found, _rounded(value, spec, torch.bfloat16))
    assert float((found - value).abs().max() / value.abs().max()) < 0.04


@pytest.mark.parametrize("name", ["toy8", "toy8_bf16", "toy40"])
def test_rewritten_golden_checkpoint_has_the_same_values(golden_dir: Path, tmp_path: Path, name: str) -> None:
    model = golden_dir / name / "model"
    source = Checkpoint.open(model)
    raw = json.loads((model / "config.json").read_text())
    write_checkpoint(tmp_path / "model", raw, source.dequantized(), shard_bytes=500_000, tokenizer_from=model)
    copy = Checkpoint.open(tmp_path / "model")
    for (tensor, value), (other, again) in zip(source.dequantized(), copy.dequantized(), strict=True):
        assert tensor == other
        assert torch.equal(value, again), tensor
    assert (tmp_path / "model" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


# -- files ---------------------------------------------------------------------------------------------------


def test_one_shard_needs_no_index_and_more_have_one(tmp_path: Path) -> None:
    raw = _raw_config()
    write_random_checkpoint(tmp_path / "one", raw)
    names = {"config.json", "generation_config.json"}
    assert {f.name for f in (tmp_path / "one").iterdir()} == names | {SINGLE_FILE}
    write_random_checkpoint(tmp_path / "many", raw, shard_bytes=20_000)
    files = {f.name for f in (tmp_path / "many").iterdir()} - names
    shards = files - {INDEX_FILE}
    assert len(shards) > 2
    assert shards == {f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)}
    index = json.loads((tmp_path / "many" / INDEX_FILE).read_text())
    assert set(index["weight_map"].values()) == shards
    assert index["metadata"]["total_size"] == sum(Checkpoint.open(tmp_path / "one").nbytes_by_part().values())


def test_config_is_written_as_it_was_given(tmp_path: Path) -> None:
    raw = _raw_config()
    write_random_checkpoint(tmp_path / "model", raw)
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == raw
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False}


def test_files_are_as_readable_as_any_other(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path / "model", _raw_config())
    (tmp_path / "other").touch()
    modes = {f.stat().st_mode for f in (tmp_path / "model").iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}


def test_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_random_checkpoint(tmp_path / name, _raw_config(), seed)
    a, b, c = ((tmp_path / name / SINGLE_FILE).read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_tied_tensors_are_written_twice(tmp_path: Path) -> None:
    raw = _raw_config()
    tensors = dict(random_tensors(CedConfig.from_dict(raw)))
    tensors["head.weight"] = tensors["embed.weight"] = tensors["embed.weight"].bfloat16()
    write_checkpoint(tmp_path / "model", raw, tensors)
    assert torch.equal(*(Checkpoint.open(tmp_path / "model").tensor(f"{n}.weight") for n in ("head", "embed")))


def test_shards_are_on_disk_before_later_tensors_are_asked_for(tmp_path: Path) -> None:
    raw = _raw_config()
    written: list[int] = []

    def watched() -> Iterator[tuple[str, Tensor]]:
        for pair in random_tensors(CedConfig.from_dict(raw)):
            written.append(sum(f.stat().st_size for f in tmp_path.rglob("*.partial") if f.is_file()))
            yield pair

    write_checkpoint(tmp_path / "model", raw, watched(), shard_bytes=20_000)
    total = sum(Checkpoint.open(tmp_path / "model").nbytes_by_part().values())
    assert written[0] == 0
    assert written[-1] > total - 2 * 20_000


# -- refusals ------------------------------------------------------------------------------------------------


def _spoiled(change: str) -> Iterator[tuple[str, Tensor]]:
    for name, value in random_tensors(CedConfig.from_dict(_raw_config())):
        if name == "layers.2.ffn.gate.weight":
            if change == "missing":
                continue
            if change == "misshapen":
                value = value[:1]
            if change == "not finite":
                value[0, 0] = float("nan")
            if change == "unknown":
                yield "layers.2.ffn.gate.made_up", value
            if change == "given twice":
                yield name, value
        yield name, value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", r"missing tensors: layers\.2\.ffn\.gate\.weight"),
        ("misshapen", r"layers\.2\.ffn\.gate\.weight: shape \[1, 32\], expected \[2, 32\]"),
        ("not finite", r"layers\.2\.ffn\.gate\.weight: not finite"),
        ("unknown", r"layers\.2\.ffn\.gate\.made_up: no such tensor"),
        ("given twice", r"layers\.2\.ffn\.gate\.weight: given twice"),
    ],
)
def test_fault_is_refused_by_name_and_leaves_nothing_behind(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "model", _raw_config(), _spoiled(change), shard_bytes=10_000)
    assert list(tmp_path.iterdir()) == []


def test_existing_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, _raw_config())  # an empty directory is taken
    before = (tmp_path / SINGLE_FILE).read_bytes()
    with pytest.raises(FileExistsError, match=str(tmp_path)):
        write_random_checkpoint(tmp_path, _raw_config(), seed=1)
    assert (tmp_path / SINGLE_FILE).read_bytes() == before


def test_bad_config_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        write_random_checkpoint(tmp_path / "model", _raw_config(hidden_size=33))
    assert list(tmp_path.iterdir()) == []


# -- random values -------------------------------------------------------------------------------------------


def test_random_tensors_are_of_sane_size(released_config: dict[str, Any]) -> None:
    text = released_config["text_config"]
    small = {"num_hidden_layers": 3, "compress_ratios": [0, 2, 1], "hidden_size": 256, "vocab_size": 512}
    small |= {"kv_source_layer_ids": [1, 2], "index_source_layer_ids": [1, 2], "candidate_source_layer_id": 2}
    small |= {"n_routed_experts": 8, "moe_intermediate_size": 64, "engram_layer_ids": [], "q_lora_rank": 128}
    config = CedConfig.from_dict(released_config | {"text_config": text | small})
    for name, value in random_tensors(config):
        if name.endswith("norm.weight"):
            assert abs(float(value.mean()) - 1) < 0.05, name
        elif value.dim() == 2 and "embed" not in name:
            assert abs(float(value.std()) * value.shape[1] ** 0.5 - 1) < 0.1, name
        assert float(value.abs().max()) < 8, name


def test_random_values_of_a_tensor_do_not_depend_on_the_others() -> None:
    config = CedConfig.from_dict(_raw_config())
    wider = dataclasses.replace(config, vocab_size=128)
    a, b = (dict(random_tensors(c, 5))["layers.1.attn.wkv.weight"] for c in (config, wider))
    assert torch.equal(a, b)


def test_fp4_weights_may_be_drawn_as_codes(tmp_path: Path) -> None:
    raw = _raw_config("fp4", hidden_size=128)
    write_random_checkpoint(tmp_path / "drawn", raw, seed=3)
    write_random_checkpoint(tmp_path / "codes", raw, seed=3, fp4_codes=True)
    drawn, codes = (Checkpoint.open(tmp_path / name) for name in ("drawn", "codes"))
    for name, spec in expected_tensors(codes.config).items():
        base = name.removesuffix(".weight")
        if spec.kind is Kind.FP4:
            spread = codes.weight(base).dequantize().std() * spec.shape[1] ** 0.5
            assert 0.5 < spread < 2.0, name
        elif spec.kind is not Kind.FP8 and not (spec.optional and name not in codes):
            assert torch.equal(codes.tensor(name).float(), drawn.tensor(name).float()), name


def test_stored_fp4_weight_is_refused_where_the_config_wants_another_form(tmp_path: Path) -> None:
    fp4 = dict(random_tensors_fp4(CedConfig.from_dict(_raw_config("fp4"))))
    with pytest.raises(ValueError, match=r"experts\.0\.w1\.weight: given as fp4, but the config stores it as bf16"):
        write_checkpoint(tmp_path / "out", _raw_config("bf16"), fp4.items())
    assert not (tmp_path / "out").exists()
