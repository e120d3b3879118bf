"""`ced doctor`: is this installation fit to serve?"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sglang_ced import __version__
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.cli.models import DEFAULT, bundled_path
from sglang_ced.engine.offline import OfflineEngine
from sglang_ced.engram_store import host
from sglang_ced.engram_store.shared_memory import HUGE_PAGE, share
from sglang_ced.kernels import cpu, registry

SELF_TEST_SECONDS = 2.0
SEAMS = "import json; from sglang_ced.plugin.seams import check_seams; print(json.dumps(check_seams()))"


@dataclass(frozen=True)
class Finding:
    """One line of the report; `ok` None means information only."""

    topic: str
    text: str
    ok: bool | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-sglang", action="store_true", help="skip the SGLang checks: offline commands only")


def run(args: argparse.Namespace) -> int:
    """Print the findings as they come; 1 if any is bad."""
    bad = 0
    checks: list[Callable[[], Iterator[Finding]]] = [_versions, _machine, _memory, _kernels, _self_test]
    if not args.no_sglang:
        checks.insert(1, _seams)
    for check in checks:
        for finding in check():
            mark = {True: "ok", False: "BAD", None: "-"}[finding.ok]
            print(f"{mark:>4}  {finding.topic:<10}  {finding.text}", flush=True)
            bad += finding.ok is False
    print(f"{bad} problem{'s' * (bad != 1)} found" if bad else "No problem found")
    return 1 if bad else 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[Finding]:
    yield Finding(
        "versions", f"sglang-ced {__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    )
    others = {name: _version(name) for name in ("sglang", "sgl-kernel-ext", "safetensors", "tokenizers", "numpy")}
    yield Finding("versions", ", ".join(f"{name} {version or 'not installed'}" for name, version in others.items()))


def _seams() -> Iterator[Finding]:
    if _version("sglang") is None:
        yield Finding("sglang", "not installed: pip install 'sglang-ced[serve]' (offline commands work)", ok=False)
        return
    # In a process of its own: importing SGLang prints a page of warnings about GPUs.
    run = subprocess.run([sys.executable, "-c", SEAMS], capture_output=True, text=True, check=False)
    if run.returncode:
        yield Finding("seams", f"the check itself failed: {run.stderr.strip().splitlines()[-1]}", ok=False)
        return
    problems = json.loads(run.stdout.splitlines()[-1])
    yield Finding("seams", f"{len(problems)} of SGLang's names differ from what the plugin expects", ok=not problems)
    for problem in problems:
        yield Finding("seams", problem, ok=False)


def _machine() -> Iterator[Finding]:
    yield Finding(
        "machine", f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    yield Finding("machine", f"GPU: {gpu}")


def _memory() -> Iterator[Finding]:
    """What n-gram tables may count on: see docs/how-to/place-engram-tables.md."""
    free, limit, locked = host.free_bytes(), host.memory_limit(), host.memlock_limit()
    may_lock = "any" if locked is None else _gib(locked)
    yield Finding("memory", f"{_gib(free)} free, control group limit {_gib(limit)}, may lock {may_lock}")
    probe = share("doctor", 2 * HUGE_PAGE, lambda to: None)
    yield Finding(
        "memory",
        f"huge pages: anonymous {host.huge_page_mode(shared=False)}, shared {host.huge_page_mode(shared=True)}; "
        f"of a copy like that of tables {probe.huge_page_share:.0%} is in huge pages",
    )


def _gib(nbytes: int | None) -> str:
    return "none" if nbytes is None else f"{nbytes / 2**30:.3g} GiB"


def _kernels() -> Iterator[Finding]:
    try:
        active = registry.activate()
    except ValueError as error:
        yield Finding("kernels", str(error), ok=False)
        return
    fast = [name for name, version in active.items() if version != "reference"]
    why = "asked for" if cpu.available() else "sgl-kernel-ext is not installed"
    yield Finding("kernels", f"fast: {', '.join(fast) or f'none ({why})'}")
    slow = [name for name in active if name not in fast]
    yield Finding("kernels", f"reference: {', '.join(slow) or 'none'}")


def _self_test() -> Iterator[Finding]:
    """The bundled checkpoint, one-shot against chunks of changing size, for about two seconds."""
    started = time.monotonic()
    checkpoint = Checkpoint.open(bundled_path(DEFAULT))
    engine = OfflineEngine(checkpoint, max_requests=1, max_tokens=512)
    generator, rounds = torch.Generator().manual_seed(0), 0
    while rounds == 0 or time.monotonic() - started < SELF_TEST_SECONDS:
        ids = torch.randint(3, 200, (150,), generator=generator).tolist()
        results = []
        for chunks in ([], [37, 1, 64]):
            request = engine.start(ids)
            results.append(engine.prefill(request, chunks))
            engine.finish(request)
        if not torch.equal(*results):
            yield Finding("self-test", f"round {rounds}: logits of a chunked prefill differ from one-shot", ok=False)
            return
        if not bool(torch.isfinite(results[0]).all()):
            yield Finding("self-test", f"round {rounds}: logits are not finite", ok=False)
            return
        rounds += 1
    yield Finding("self-test", f"{rounds} prompts of {DEFAULT}, one-shot = chunked", ok=True)
