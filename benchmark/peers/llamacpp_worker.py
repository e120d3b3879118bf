"""Runs in llama.cpp's own environment: writes a mixture of experts as GGUF, or times its decode steps.

    python llamacpp_worker.py write MODEL.gguf SHAPE.json
    python llamacpp_worker.py time MODEL.gguf THREADS CONTEXT STEPS      last line: JSON

Routed experts are Q4_0, other matrices Q8_0, router and norms float32; the values are random.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 32


def write(path: Path, shape: dict[str, int]) -> None:
    """shape: hidden, layers, heads, kv_heads, head_dim, experts, used, inner, vocab."""
    import gguf

    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    writer.add_context_length(65536)
    writer.add_embedding_length(shape["hidden"])
    writer.add_block_count(shape["layers"])
    writer.add_feed_forward_length(shape["inner"])
    writer.add_expert_feed_forward_length(shape["inner"])
    writer.add_expert_count(shape["experts"])
    writer.add_expert_used_count(shape["used"])
    writer.add_head_count(shape["heads"])
    writer.add_head_count_kv(shape["kv_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("llama")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [f"piece{i}" for i in range(shape["vocab"] - len(pieces))]
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * len(pieces))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * (shape["vocab"] - 259))
    generator = np.random.default_rng(0)
    for name, size, kind in _tensors(shape):
        if kind == "F32":
            noise = generator.standard_normal(size, np.float32) * size[-1] ** -0.5
            writer.add_tensor(name, np.ones(size, np.float32) if len(size) == 1 else noise)
        else:
            writer.add_tensor(name, _blocks(generator, size, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _tensors(s: dict[str, int]) -> list[tuple[str, tuple[int, ...], str]]:
    hidden, inner, experts, dim = s["hidden"], s["inner"], s["experts"], s["head_dim"]
    q, kv = s["heads"] * dim, s["kv_heads"] * dim
    out: list[tuple[str, tuple[int, ...], str]] = [
        ("token_embd.weight", (s["vocab"], hidden), "Q8_0"),
        ("output_norm.weight", (hidden,), "F32"),
        ("output.weight", (s["vocab"], hidden), "Q8_0"),
    ]
    for layer in range(s["layers"]):
        for name, size, kind in (
            ("attn_norm", (hidden,), "F32"),
            ("attn_q", (q, hidden), "Q8_0"),
            ("attn_k", (kv, hidden), "Q8_0"),
            ("attn_v", (kv, hidden), "Q8_0"),
            ("attn_output", (hidden, q), "Q8_0"),
            ("attn_q_norm", (dim,), "F32"),
            ("attn_k_norm", (dim,), "F32"),
            ("ffn_norm", (hidden,), "F32"),
            ("ffn_gate_inp", (experts, hidden), "F32"),
            ("ffn_gate_exps", (experts, inner, hidden), "Q4_0"),
            ("ffn_up_exps", (experts, inner, hidden), "Q4_0"),
            ("ffn_down_exps", (experts, hidden, inner), "Q4_0"),
        ):
            out.append((f"blk.{layer}.{name}.weight", size, kind))
    return out


def _blocks(generator: np.random.Generator, size: tuple[int, ...], kind: str) -> np.ndarray[Any, Any]:
    """Random codes under a constant float16 scale, values of about 1 / sqrt(columns): uint8 [..., bytes of a row]."""
    codes, spread = (BLOCK // 2, 4.6) if kind == "Q4_0" else (BLOCK, 74.0)
    rows, blocks = int(np.prod(size[:-1])), size[-1] // BLOCK
    out = np.empty((rows, blocks, 2 + codes), np.uint8)
    out[..., :2] = np.array([size[-1] ** -0.5 / spread], np.float16).view(np.uint8)
    out[..., 2:] = np.frombuffer(generator.bytes(rows * blocks * codes), np.uint8).reshape(rows, blocks, codes)
    return out.reshape(*size[:-1], -1)


def active_bytes(path: Path, context: int) -> int:
    """Stored bytes that a decode step reads: every matrix once, of the experts those in use, and float16 KV."""
    import gguf

    reader = gguf.GGUFReader(path)
    value = {name: field.contents() for name, field in reader.fields.items() if field.data}
    arch = "qwen3moe"
    used = value[f"{arch}.expert_used_count"] / value[f"{arch}.expert_count"]
    total = 0.0
    for tensor in reader.tensors:
        if tensor.name != "token_embd.weight":
            total += tensor.n_bytes * (used if "_exps." in tensor.name else 1)
    width = value[f"{arch}.attention.head_count_kv"] * value[f"{arch}.attention.key_length"]
    return round(total + 2 * 2 * width * context * value[f"{arch}.block_count"])


def time_decode(path: Path, threads: int, context: int, steps: int) -> dict[str, Any]:
    """Median seconds of a decode step after `context` tokens; tokens are random, so that experts differ."""
    import llama_cpp

    model = llama_cpp.Llama(
        str(path), n_ctx=context + steps + 8, n_threads=threads, n_threads_batch=threads, n_batch=512, verbose=False
    )
    draw = random.Random(0)
    model.eval(draw.choices(range(3, 250), k=context))
    times = []
    for _ in range(steps):
        token = draw.randrange(3, 250)
        start = time.perf_counter()
        model.eval([token])
        times.append(time.perf_counter() - start)
    return {
        "seconds": sorted(times)[steps // 2],
        "bytes": active_bytes(path, context + steps // 2),
        "version": llama_cpp.__version__,
    }


def main() -> None:
    command, path, *rest = sys.argv[1:]
    if command == "write":
        write(Path(path), json.loads(Path(rest[0]).read_text()))
    else:
        print(json.dumps(time_decode(Path(path), *map(int, rest))))


if __name__ == "__main__":
    main()
