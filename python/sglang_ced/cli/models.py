"""`ced models`: the checkpoints that come with the package."""

from __future__ import annotations

import argparse
from pathlib import Path

ASSETS = Path(__file__).resolve().parent.parent / "assets"
DEFAULT = "ced-toy"


def bundled() -> dict[str, Path]:
    """Name -> directory of every bundled checkpoint."""
    return {path.parent.name: path.parent for path in sorted(ASSETS.glob("*/config.json"))}


def bundled_path(name: str) -> Path:
    """Directory of one. Raises ValueError, naming what there is."""
    models = bundled()
    if name not in models:
        raise ValueError(f"no bundled checkpoint {name!r}; there is: {', '.join(models) or 'none'}")
    return models[name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", metavar="NAME", help="print the directory of one checkpoint and nothing else")


def run(args: argparse.Namespace) -> int:
    if args.path:
        print(bundled_path(args.path))
        return 0
    for name, path in bundled().items():
        size = sum(file.stat().st_size for file in path.iterdir())
        print(f"{name}  {size / 1e6:.1f} MB  {path}")
    return 0
