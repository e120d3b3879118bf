"""`ced logits`: a prompt's logits in a file, for comparing engines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from sglang_ced.cli.generate import add_engine_arguments, engram_options
from sglang_ced.cli.models import DEFAULT, bundled_path
from sglang_ced.engine.offline import OfflineEngine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--ids", required=True, metavar="FILE", help="prompt: a JSON list of token ids")
    parser.add_argument("--out", required=True, metavar="FILE", help="safetensors file to write: logits F32 [1, vocab]")
    parser.add_argument("--all", action="store_true", help="logits of every position: F32 [n, vocab]")
    parser.add_argument(
        "--chunks", metavar="SIZES", help="prefill in forwards of these sizes, e.g. 64,1,7; the last one repeats"
    )
    parser.add_argument(
        "--hit",
        type=int,
        default=0,
        metavar="N",
        help="let an earlier request leave the first N tokens in the prefix cache; rows below N are then its own",
    )


def run(args: argparse.Namespace) -> int:
    ids, chunks = read_ids(Path(args.ids)), read_chunks(args.chunks)
    if not 0 <= args.hit < len(ids):
        raise ValueError(f"--hit {args.hit}: must leave at least one of the {len(ids)} tokens to compute")
    model = args.model or bundled_path(DEFAULT)
    page_size = 2
    if args.hit % page_size:
        raise ValueError(f"--hit {args.hit}: must be even, since prefixes end between pairs of tokens")
    engine = OfflineEngine.from_pretrained(
        model,
        max_requests=2,
        max_tokens=2 * len(ids) + 2 * page_size,
        page_size=page_size,
        replay=args.replay,
        kernels=args.kernels,
        kv_format=args.kv_format,
        engram=engram_options(args),
    )
    earlier, before = None, torch.empty(0, engine.config.vocab_size)
    if args.hit:
        earlier = engine.start(ids[: args.hit])
        before = engine.prefill(earlier, all_rows=args.all)
    request = engine.start(ids, prefix_of=earlier, hit=args.hit)
    logits = engine.prefill(request, chunks, all_rows=args.all)
    if args.all:
        logits = torch.cat((before, logits))
    told = {"replay": args.replay, "hit": str(args.hit), "chunks": args.chunks or "", "model": str(model)}
    save_file({"logits": logits.contiguous()}, args.out, metadata=told)
    print(f"{args.out}: logits F32 {list(logits.shape)}, argmax of the last row {int(logits[-1].argmax())}")
    return 0


def read_ids(file: Path) -> list[int]:
    """Token ids from a JSON file. Raises ValueError naming the file and what is wrong in it."""
    try:
        ids = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    if not isinstance(ids, list) or not ids or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ValueError(f"{file}: expected a non-empty JSON list of token ids")
    return ids


def read_chunks(text: str | None) -> list[int]:
    """ "64,1,7" -> [64, 1, 7]. Raises ValueError for anything but positive integers."""
    if not text:
        return []
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--chunks {text}: expected positive sizes separated by commas, as in 64,1,7")
    return [int(part) for part in parts]
