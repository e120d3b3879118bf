"""The `ced` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from sglang_ced import __version__

# Subcommand -> its line in the help. Each is the file of that name: add_arguments(parser), run(args) -> exit code.
COMMANDS = {
    "doctor": "check versions, CPU features, kernels and the SGLang seams, and run a short self-test",
    "models": "list the checkpoints that come with the package",
    "generate": "continue a prompt without a server",
    "logits": "write a prompt's logits to a file, to compare engines",
    "bench": "replay agent traffic on servers: traces, throughput and speed per agent, ablation, affinity",
    "inspect": "show a checkpoint's layers, parameters and cache sizes",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ced",
        description="Serve and examine causal encoder-decoder checkpoints. To serve one: "
        "python -m sglang.launch_server --model-path DIR",
    )
    parser.add_argument("--version", action="version", version=f"sglang-ced {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        import_module(f"sglang_ced.cli.{name}").add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; 0 on success, 1 on an error that is told on stderr, 2 on wrong usage."""
    # Before torch starts OpenMP: threads that spin while they wait bring any second process on the machine to a crawl.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    args = build_parser().parse_args(argv)
    try:
        return int(import_module(f"sglang_ced.cli.{args.command}").run(args))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"ced {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
