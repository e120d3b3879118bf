"""Write what `train.py` left as a checkpoint: `python -m training.export --from build/ced-tiny --out DIR`."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch
from tokenizers import Tokenizer

from sglang_ced.checkpoint.writer import write_checkpoint
from sglang_ced.reference import published_name
from training import shape


def export(state: Path, out: Path) -> str:
    """Write the checkpoint directory `out` from the training directory `state`; return the SHA-256 of its weights."""
    tokens = Tokenizer.from_file(str(state / "tokenizer.json"))
    model = torch.load(state / "state.pt")["model"]
    tensors = {published_name(name): value for name, value in model.items()}
    write_checkpoint(out, shape.config(tokens), tensors, tokenizer_from=state)
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the trained state as a checkpoint in the published layout.")
    parser.add_argument("--from", dest="state", type=Path, default=Path("build/ced-tiny"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    print(export(options.state, options.out), options.out)


if __name__ == "__main__":
    main()
