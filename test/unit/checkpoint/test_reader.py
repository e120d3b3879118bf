"""checkpoint/reader.py, files.py: golden checkpoints open without a copy, every fault is refused by name."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ced.checkpoint.files import INDEX_FILE, SINGLE_FILE, StoredTensor, check, listed
from sglang_ced.checkpoint.names import CheckpointError, expected_tensors
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.config import CedConfig
from sglang_ced.formats import E2m1Weight, E4m3Weight, dequantize_e4m3

GOLDEN = ("toy8", "toy8_bf16", "toy40")
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def toy8(golden_dir: Path, tmp_path: Path) -> Path:
    """A copy to spoil: one file, no index."""
    return Path(shutil.copytree(golden_dir / "toy8" / "model", tmp_path / "toy8", copy_function=shutil.copyfile))


@pytest.fixture
def toy40(golden_dir: Path, tmp_path: Path) -> Path:
    """A copy to spoil: three shards and an index."""
    return Path(shutil.copytree(golden_dir / "toy40" / "model", tmp_path / "toy40", copy_function=shutil.copyfile))


def _edit(model: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(model / SINGLE_FILE)
    change(tensors)
    save_file({name: t.clone() for name, t in tensors.items()}, model / SINGLE_FILE)


def _refusal(model: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(model)
    return str(caught.value)


# -- what is read --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_checkpoint_opens_and_every_tensor_is_as_stored(golden_dir: Path, name: str) -> None:
    model = golden_dir / name / "model"
    with Checkpoint.open(model) as checkpoint:
        for file in model.glob("*.safetensors"):
            for tensor, value in load_file(file).items():
                found = checkpoint.tensor(tensor)
                assert found.dtype == value.dtype
                assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)), tensor


def test_weights_come_in_their_stored_form(golden_dir: Path) -> None:
    fp8, bf16 = (Checkpoint.open(golden_dir / name / "model") for name in ("toy8", "toy8_bf16"))
    linear, expert = fp8.weight("layers.0.attn.wq_b"), fp8.weight("layers.0.ffn.experts.3.w2")
    assert isinstance(linear, E4m3Weight)
    assert isinstance(expert, E2m1Weight)
    assert (linear.shape, linear.codes.dtype, linear.scales.dtype) == ((256, 64), torch.uint8, torch.uint8)
    assert (expert.shape, expert.packed.dtype, expert.scales.dtype) == ((64, 32), torch.uint8, torch.uint8)
    for base in ("layers.0.attn.wq_b", "layers.0.ffn.experts.3.w2", "layers.0.ffn.gate"):
        weight = bf16.weight(base)
        assert isinstance(weight, Tensor)
        assert weight.dtype is torch.bfloat16


def test_table_rows_equal_the_publishers(golden_dir: Path, golden_ops: dict[str, Tensor]) -> None:
    codes, scales = Checkpoint.open(golden_dir / "toy8" / "model").table("layers.1.engram.embed")
    rows = golden_ops["engram/hash_rows"][:, 0]
    expected = golden_ops["engram/rows_dequant"]
    assert torch.equal(dequantize_e4m3(codes[rows], scales[rows]).to(expected.dtype), expected)


def test_single_file_without_an_index_and_any_set_of_shards_open(toy8: Path, toy40: Path) -> None:
    assert not (toy8 / INDEX_FILE).exists()
    Checkpoint.open(toy8)
    (toy40 / INDEX_FILE).unlink()
    Checkpoint.open(toy40)


def test_parts_add_up_to_the_files(golden_dir: Path) -> None:
    checkpoint = Checkpoint.open(golden_dir / "toy40" / "model")
    total = json.loads((golden_dir / "toy40" / "model" / INDEX_FILE).read_text())["metadata"]["total_size"]
    assert sum(checkpoint.nbytes_by_part().values()) == total


def test_parameters_count_values_and_not_bytes(golden_dir: Path) -> None:
    counts = [Checkpoint.open(golden_dir / name / "model").parameters_by_part() for name in ("toy8", "toy8_bf16")]
    assert counts[0] == counts[1]
    assert counts[0]["routed experts"] == 8 * 8 * 3 * 64 * 32


def test_draft_is_recognised_and_named_in_the_log(golden_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    checkpoint = Checkpoint.open(golden_dir / "toy8" / "model")
    names = checkpoint.draft_names()
    assert names[0] == "mtp.0.attn.attn_sink"
    size = checkpoint.nbytes_by_part()["draft"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{checkpoint.path}: not loading the draft part: {len(names)} tensors, {size} bytes"
    ]


def test_vision_tensors_are_recognised(toy8: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _edit(toy8, lambda t: t.update({"image_start": torch.zeros(64), "vision.norm.weight": torch.zeros(8)}))
    assert Checkpoint.open(toy8).nbytes_by_part()["vision"] == 4 * 72
    assert "not loading the vision part: 2 tensors, 288 bytes" in caplog.text


def test_image_bias_may_be_absent(toy8: Path) -> None:
    _edit(toy8, lambda t: [t.pop(name) for name in list(t) if name.endswith("bias_vl")])
    checkpoint = Checkpoint.open(toy8)
    assert "layers.0.ffn.gate.bias" in checkpoint
    assert "layers.0.ffn.gate.bias_vl" not in checkpoint
    assert not any(name.endswith("bias_vl") for name, _ in checkpoint.dequantized())


def test_norms_may_be_float32(toy8: Path) -> None:
    _edit(toy8, lambda t: t.update({n: v.float() for n, v in t.items() if n.endswith("norm.weight")}))
    assert Checkpoint.open(toy8).tensor("norm.weight").dtype is torch.float32


# -- memory --------------------------------------------------------------------------------------------------


def _mappings() -> Iterator[tuple[int, int, str]]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, file = line.split(maxsplit=5)
        low, high = (int(end, 16) for end in span.split("-"))
        yield low, high, file


def _mapped_file(tensor: Tensor) -> str | None:
    at = tensor.data_ptr()
    return next((file for low, high, file in _mappings() if low <= at < high), None)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_tensors_are_views_of_the_mapped_file(toy8: Path) -> None:
    file = str(toy8 / SINGLE_FILE)
    with Checkpoint.open(toy8) as checkpoint:
        tensors = [checkpoint.tensor(name) for name in ("embed.weight", "layers.0.hc_attn_fn", "norm.weight")]
        linear, expert = (
            checkpoint.weight("layers.0.attn.wq_a"),
            checkpoint.weight("layers.0.ffn.experts.0.w1"),
        )
        assert isinstance(linear, E4m3Weight)
        assert isinstance(expert, E2m1Weight)
        tensors += [linear.codes, linear.scales, expert.packed, expert.scales]
        tensors += checkpoint.table("layers.1.engram.embed")
    assert [_mapped_file(tensor) for tensor in tensors] == [file] * len(tensors)
    assert _mapped_file(tensors[0].clone()) != file  # what a copy would look like
    assert tensors[0].isfinite().all()  # still readable after close


# -- refusals ------------------------------------------------------------------------------------------------


def test_directory_without_weights_is_refused(toy8: Path) -> None:
    (toy8 / SINGLE_FILE).unlink()
    assert str(toy8) in _refusal(toy8)
    assert SINGLE_FILE not in _refusal(toy8) or INDEX_FILE in _refusal(toy8)


def test_missing_config_is_named(toy8: Path) -> None:
    (toy8 / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        Checkpoint.open(toy8)


def test_missing_shard_is_named(toy40: Path) -> None:
    (toy40 / SHARD).unlink()
    assert f"shards named by {INDEX_FILE} are missing: {SHARD}" in _refusal(toy40)


@pytest.mark.parametrize("kept", [0, 4, 100, 100_000, -1])
def test_truncated_shard_is_named(toy40: Path, kept: int) -> None:
    whole = (toy40 / SHARD).read_bytes()
    (toy40 / SHARD).write_bytes(whole[:kept])
    message = _refusal(toy40)
    assert f"{SHARD}: truncated" in message
    assert str(len(whole[:kept])) in message


@pytest.mark.parametrize("junk", [b"\x00" * 64, b"not a shard, but some text that is long enough", b"\xff" * 200])
def test_corrupt_shard_is_named(toy40: Path, junk: bytes) -> None:
    (toy40 / SHARD).write_bytes(junk)
    assert f"{SHARD}: corrupt shard" in _refusal(toy40)


def test_shard_with_bytes_too_many_is_named(toy40: Path) -> None:
    with (toy40 / SHARD).open("ab") as stream:
        stream.write(b"more")
    assert f"{SHARD}: corrupt shard" in _refusal(toy40)


def test_git_lfs_pointer_is_called_one(toy40: Path) -> None:
    (toy40 / SHARD).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert f"{SHARD}: this is a Git LFS pointer" in _refusal(toy40)


def _edit_index(model: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((model / INDEX_FILE).read_text())
    change(index["weight_map"])
    (model / INDEX_FILE).write_text(json.dumps(index))


def test_index_naming_a_tensor_that_is_not_there_is_refused(toy40: Path) -> None:
    _edit_index(toy40, lambda weight_map: weight_map.update({"layers.3.ghost.weight": SHARD}))
    assert f"not in that shard: layers.3.ghost.weight ({SHARD})" in _refusal(toy40)


def test_tensor_without_an_index_entry_is_refused(toy40: Path) -> None:
    _edit_index(toy40, lambda weight_map: weight_map.pop("head.weight"))
    assert f"not named by {INDEX_FILE}: head.weight" in _refusal(toy40)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
def test_malformed_index_is_named(toy40: Path, content: str) -> None:
    (toy40 / INDEX_FILE).write_text(content)
    assert f"{INDEX_FILE}: not a safetensors index" in _refusal(toy40)


def test_same_tensor_in_two_shards_without_an_index_is_refused(toy8: Path) -> None:
    shutil.move(toy8 / SINGLE_FILE, toy8 / "a.safetensors")
    save_file({"norm.weight": torch.ones(64, dtype=torch.bfloat16)}, toy8 / "b.safetensors")
    assert "in more than one shard: norm.weight" in _refusal(toy8)


def test_missing_tensor_is_named_with_what_was_expected(toy8: Path) -> None:
    _edit(toy8, lambda t: t.pop("layers.5.attn.wkv.scale"))
    assert "1 tensors missing: layers.5.attn.wkv.scale (F8_E8M0 [2, 2])" in _refusal(toy8)


def test_unknown_tensor_is_named(toy8: Path) -> None:
    _edit(toy8, lambda t: t.update({"layers.8.attn_norm.weight": torch.ones(64, dtype=torch.bfloat16)}))
    assert "1 tensors unknown: layers.8.attn_norm.weight" in _refusal(toy8)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("head.weight", torch.float16, "BF16"),
        ("norm.weight", torch.float16, "BF16 or F32"),
        ("layers.0.attn.wq_a.weight", torch.bfloat16, "F8_E4M3"),
        ("layers.0.ffn.gate.bias", torch.bfloat16, "F32"),
    ],
)
def test_wrong_dtype_is_named_with_what_was_expected(toy8: Path, name: str, dtype: torch.dtype, expected: str) -> None:
    _edit(toy8, lambda t: t.update({name: t[name].to(dtype)}))
    message = _refusal(toy8)
    assert f"1 tensors wrong dtype or shape: {name}: found " in message
    assert f"expected {expected} [" in message


def test_wrong_shape_is_named_with_what_was_expected(toy8: Path) -> None:
    _edit(toy8, lambda t: t.update({"embed.weight": t["embed.weight"][:319]}))
    assert "embed.weight: found BF16 [319, 64], expected BF16 [320, 64]" in _refusal(toy8)


def test_long_lists_are_cut_and_counted(toy8: Path) -> None:
    _edit(
        toy8,
        lambda t: [t.pop(name) for name in list(t) if ".experts." in name and name.startswith("layers.6")],
    )
    message = _refusal(toy8)
    assert "48 tensors missing: " in message
    assert "... (48 in total)" in message
    assert message.count("layers.6.ffn.experts") == 20
    assert listed(["a", "b"]) == "a, b"


def test_asking_for_what_is_not_there_is_refused_by_name(golden_dir: Path) -> None:
    checkpoint = Checkpoint.open(golden_dir / "toy8" / "model")
    for ask in (checkpoint.tensor, checkpoint.weight, checkpoint.table):
        with pytest.raises(CheckpointError, match=r"layers\.0\.nothing"):
            ask("layers.0.nothing")
    with pytest.raises(CheckpointError, match="is not a table"):
        checkpoint.table("layers.0.attn.wq_a")
    with pytest.raises(CheckpointError, match="is a table"):
        checkpoint.weight("layers.1.engram.embed")


def test_dequantized_gives_every_expected_tensor_in_its_logical_shape(golden_dir: Path) -> None:
    checkpoint = Checkpoint.open(golden_dir / "toy8" / "model")
    shapes = {name: tuple(value.shape) for name, value in checkpoint.dequantized()}
    assert shapes == {name: spec.shape for name, spec in expected_tensors(checkpoint.config).items()}


def test_check_of_the_released_layout_takes_no_time(released_config: dict[str, Any]) -> None:
    expected = expected_tensors(CedConfig.from_dict(released_config))
    stored = [pair for name, spec in expected.items() for pair in spec.stored(name).items()]
    tensors = {name: StoredTensor(Path("shard"), spec.dtypes[0], spec.shape) for name, spec in stored}
    assert len(tensors) == 93418
    start = time.perf_counter()
    check(Path("model"), tensors, expected)
    assert time.perf_counter() - start < 5
