"""Makes the bundled miniature `assets/ced-toy`: every mechanism of the architecture, random weights.

    python -m sglang_ced.checkpoint.make_toy OUT

It answers noise. The same seed gives the same bytes on any machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from torch import Tensor

from sglang_ced.checkpoint.token_map import REPLACEMENT, token_classes
from sglang_ced.checkpoint.tokenizer import EOS, IMAGE, write_byte_tokenizer
from sglang_ced.checkpoint.writer import random_tensors, write_checkpoint
from sglang_ced.config import CedConfig

SHARD_BYTES = 800_000  # two shards, so that the index is in use


def toy_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The config.json of the miniature, for a tokenizer with the published special tokens."""
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "attention_bias": False,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "max_position_embeddings": 8192,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1],
        "kv_source_layer_ids": [2, 4],
        "index_source_layer_ids": [2, 4, 6],
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "candidate_source_layer_id": 4,
        "candidate_topk_blocks": 32,
        "candidate_block_size": 8,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 3],
        "engram_num_embeddings": [660, 864],
        "engram_max_ngram_size": 4,
        "engram_vocab_size": 101,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": len(set(token_classes(tokenizer))),
        "num_nextn_predict_layers": 0,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": tokenizer.token_to_id(IMAGE),
        "tie_word_embeddings": False,
        "text_config": text,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
    }


def make_toy(path: str | os.PathLike[str], seed: int = 0) -> None:
    """Write the miniature, with its tokenizer, as the new directory `path`. Raises FileExistsError."""
    with tempfile.TemporaryDirectory() as scratch:
        write_byte_tokenizer(scratch)
        tokenizer = Tokenizer.from_file(str(Path(scratch) / "tokenizer.json"))
        raw = toy_config(tokenizer)
        tensors = _readable(random_tensors(CedConfig.from_dict(raw), seed), tokenizer)
        write_checkpoint(path, raw, tensors, shard_bytes=SHARD_BYTES, tokenizer_from=scratch)


def _readable(tensors: Iterator[tuple[str, Tensor]], tokenizer: Tokenizer) -> Iterator[tuple[str, Tensor]]:
    """Silence the head's rows of ids that make no readable text: a logit of 0 is never the largest of 512."""
    for name, value in tensors:
        if name == "head.weight":
            value[unreadable_ids(tokenizer)] = 0.0
        yield name, value


def unreadable_ids(tokenizer: Tokenizer) -> list[int]:
    """Special tokens but the end of text, parts of characters, and control characters but the line feed."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.content != EOS}
    ids = range(tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    odd = {i for i, t in zip(ids, texts, strict=True) if REPLACEMENT in t or not (t.isprintable() or t == "\n")}
    return sorted(special | odd)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bundled miniature checkpoint (random weights).")
    parser.add_argument("out", help="directory to make")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    make_toy(options.out, options.seed)


if __name__ == "__main__":
    main()
