"""`ced generate`: continue a prompt without a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer

from sglang_ced.cache.layout import KV_FORMATS
from sglang_ced.cache.replay import MODES
from sglang_ced.cli.models import DEFAULT, bundled_path
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.engram_store.placement import CACHE_MIB, PLACEMENTS, StoreOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue, used as it is")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sentence token")


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of every command that runs the offline engine."""
    parser.add_argument("--model", metavar="DIR", help=f"checkpoint directory (default: the bundled {DEFAULT})")
    parser.add_argument("--kernels", choices=("auto", "reference"), help="default: $CED_KERNELS, else auto")
    parser.add_argument(
        "--replay", choices=MODES, default="exact", help="how windows are rebuilt after a hit (default: exact)"
    )
    parser.add_argument(
        "--kv-format", choices=KV_FORMATS, default="published", help="how global KV is stored (default: published)"
    )
    parser.add_argument(
        "--engram-placement",
        choices=PLACEMENTS,
        default="auto",
        help="n-gram tables: mmap, in the checkpoint's files; ram, a copy in memory; auto: what fits (default: auto)",
    )
    parser.add_argument(
        "--no-engram-prefetch", action="store_true", help="fetch table rows when a layer needs them, not before"
    )
    parser.add_argument(
        "--engram-cache-mib",
        type=int,
        default=CACHE_MIB,
        metavar="N",
        help=f"mmap: memory for table rows that come again, 0 for none (default: {CACHE_MIB})",
    )


def engram_options(args: argparse.Namespace) -> StoreOptions:
    """What the Engram options ask for. Raises ValueError for a negative size."""
    if args.engram_cache_mib < 0:
        raise ValueError(f"--engram-cache-mib {args.engram_cache_mib}: must not be negative")
    return StoreOptions(args.engram_placement, not args.no_engram_prefetch, args.engram_cache_mib)


def run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: must be at least 1")
    model = Path(args.model or bundled_path(DEFAULT))
    tokenizer = load_tokenizer(model)
    prompt = tokenizer.encode(args.prompt, add_special_tokens=False).ids
    engine = OfflineEngine.from_pretrained(
        model,
        max_requests=1,
        max_tokens=len(prompt) + args.max_new_tokens + 64,
        replay=args.replay,
        kernels=args.kernels,
        kv_format=args.kv_format,
        engram=engram_options(args),
    )
    stop = [] if args.ignore_eos else None
    for piece in stream_text(tokenizer, engine.stream(prompt, args.max_new_tokens, stop)):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print()
    return 0


def load_tokenizer(model: Path) -> Tokenizer:
    """The checkpoint's tokenizer.json. Raises FileNotFoundError, naming the file."""
    file = model / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; text needs a tokenizer (ids do not: see ced logits)")
    return Tokenizer.from_file(str(file))


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Text as tokens come; a character whose bytes are not all there yet waits for the rest."""
    ids: list[int] = []
    told = ""
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if not text.endswith("�") and len(text) > len(told):
            yield text[len(told) :]
            told = text
    text = tokenizer.decode(ids, skip_special_tokens=True)
    if len(text) > len(told):
        yield text[len(told) :]
