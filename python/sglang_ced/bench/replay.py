"""Replays of one trace on one server through aiperf, for several numbers of agents; finished ones are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_ced.bench import conditions
from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.payload import Prompts, write_payloads
from sglang_ced.bench.records import RUN, Record, Run, read_aiperf
from sglang_ced.bench.servers import Server
from sglang_ced.bench.tools import AIPERF, HOME
from sglang_ced.bench.trace import Trace, ideal_hit_rate
from sglang_ced.cache.replay import Replay, plan_replay
from sglang_ced.config import CedConfig

TEMPLATE = 32  # tokens that a chat template may add to one message


@dataclass(frozen=True)
class Plan:
    """What is replayed, and where it is kept.

    model: directory of the checkpoint that is served, for its tokenizer. seed: of the tokens. out: one directory for
    everything; runs lie in `out/<configuration>/agents-<n>/repeat-<n>`. threads: of each server, None: its default.
    """

    trace: Trace
    model: Path
    out: Path
    seed: int = 0
    prompts: Prompts = "ids"
    tools: Path = HOME
    threads: int | None = None
    quiet: bool = False

    def directory(self, name: str, agents: int, repeat: int) -> Path:
        return self.out / name / f"agents-{agents}" / f"repeat-{repeat}"

    def key(self, name: str, agents: int, repeat: int, arguments: Sequence[str]) -> dict[str, Any]:
        """All that decides what a run measures."""
        return {
            "name": name,
            "agents": agents,
            "repeat": repeat,
            "arguments": list(arguments),
            "trace": self.trace.digest,
            "model": str(self.model),
            "seed": self.seed,
            "prompts": self.prompts,
            "threads": self.threads,
            "aiperf": AIPERF.requirement,
            "commit": conditions.commit(),
        }

    def finished(self, name: str, agents: int, repeat: int, arguments: Sequence[str]) -> bool:
        """Whether it is there already. Raises BenchError if another run is in its place."""
        directory = self.directory(name, agents, repeat)
        if not (directory / RUN).is_file():
            return False
        there, key = Run.load(directory).key, self.key(name, agents, repeat, arguments)
        if there == key:
            return True
        other = [field for field in key if there.get(field) != key[field]]
        raise BenchError(f"{directory} is a run of another {', '.join(other)}: remove it, or give another --out")


def replay(
    plan: Plan,
    server: Server,
    name: str,
    agents: int,
    repeat: int = 0,
    arguments: Sequence[str] = (),
    mode: Replay | None = None,
    flush: Sequence[Server] | None = None,
) -> Run:
    """Replay the trace with `agents` sessions at once, from an empty cache, and save the run.

    arguments: those the server was started with. mode: how it rebuilds windows, where that is known; says how many
    rows each request replayed. flush: the servers whose caches are emptied first, default `server`; () for none.
    Raises BenchError if aiperf fails or its requests are not those of the trace.
    """
    if agents > len(plan.trace.sessions):
        raise BenchError(f"{agents} agents: the trace has {len(plan.trace.sessions)} sessions, one for each at least")
    directory = plan.directory(name, agents, repeat)
    workers = (server,) if flush is None else tuple(flush)
    for each in workers:
        each.flush()
    payloads = plan.out / "payloads" / f"{plan.trace.digest}-{plan.seed}-{plan.prompts}-{server.model}.jsonl"
    if not payloads.is_file():
        write_payloads(plan.trace, payloads, plan.model, server.model, plan.prompts, plan.seed)
    before = server.metrics()
    command = aiperf_command(plan, server, payloads, directory / "aiperf", agents)
    _run(command, directory, plan.quiet)
    after = server.metrics()
    records = read_aiperf(directory / "aiperf", plan.trace, TEMPLATE if plan.prompts == "chat" else 0)
    if mode is not None:
        records = with_replay(records, mode, CedConfig.from_dir(plan.model))
    run = Run(
        name=name,
        agents=agents,
        repeat=repeat,
        arguments=list(arguments),
        trace=about(plan.trace),
        conditions={
            "machine": conditions.machine(),
            "threads": f"{plan.threads or 'default'} threads",
            "commit": conditions.commit(),
            "model": plan.model.name,
        },
        seconds=max(record.start + record.e2e for record in records),
        counters=grown(before, after),
        memory=memory(workers or (server,)),
        key=plan.key(name, agents, repeat, arguments),
        records=records,
    )
    run.save(directory)
    return run


def aiperf_command(plan: Plan, server: Server, payloads: Path, artifacts: Path, agents: int) -> list[str]:
    """The command that replays `payloads` and writes into `artifacts`."""
    return [
        str(AIPERF.executable(plan.tools)), "profile",
        "--model", server.model, "--url", server.url,
        "--endpoint-type", "chat" if plan.prompts == "chat" else "completions", "--streaming",
        "--use-server-token-count",
        "--tokenizer", str(plan.model.absolute()),
        "--input-file", str(payloads.absolute()), "--custom-dataset-type", "mooncake_trace", "--no-fixed-schedule",
        "--concurrency", str(agents), "--num-sessions", str(len(plan.trace.sessions)),
        "--random-seed", "0", "--artifact-dir", str(artifacts.absolute()),
        "--no-gpu-telemetry", "--no-server-metrics", "--workers-max", "1", "--record-processors", "1",
        "--ui", "none" if plan.quiet or not sys.stderr.isatty() else "simple",
    ]  # fmt: skip


def _run(command: list[str], directory: Path, quiet: bool) -> None:
    """Run aiperf. After Ctrl-C it is given the time to stop by itself; then KeyboardInterrupt goes on."""
    directory.mkdir(parents=True, exist_ok=True)
    # It loads the tokenizer from a directory, which it refuses to do with HF_HUB_OFFLINE.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    log = directory / "aiperf.log"
    with log.open("w") as output:
        show = None if not quiet and sys.stderr.isatty() else output
        child = subprocess.Popen(command, env=environment, stdout=output, stderr=show, start_new_session=True)
        try:
            code = child.wait()
        except KeyboardInterrupt:
            os.killpg(child.pid, signal.SIGINT)
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            raise
        finally:
            with suppress(ProcessLookupError):  # services of aiperf that outlived it
                os.killpg(child.pid, signal.SIGKILL)
    if code:
        last = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise BenchError(f"aiperf ended with {code}: {' '.join(last)[-500:]} (see {log})")


def with_replay(records: Sequence[Record], mode: Replay, config: CedConfig) -> list[Record]:
    """The records with the rows that each request's plan replays after its hit, as the server plans it."""

    def replayed(record: Record) -> int | None:
        if record.cached is None:
            return None
        encoder, decoder = config.num_encoder_layers, config.num_decoder_layers
        plan = plan_replay(mode, record.cached, record.input, record.input, config.sliding_window, encoder, decoder)
        return record.cached - plan.start

    return [replace(record, replayed=replayed(record)) for record in records]


def memory(workers: Sequence[Server]) -> dict[str, float]:
    """Of all servers together: peak memory added up, bytes per token of the first."""
    each = [server.memory() for server in workers]
    peaks = [one["peak_rss"] for one in each if "peak_rss" in one]
    return each[0] | ({"peak_rss": sum(peaks)} if peaks else {})


def about(trace: Trace) -> dict[str, Any]:
    """What a report says of a trace."""
    inputs = [request.input for request in trace.requests]
    outputs = [request.output for request in trace.requests]
    return {
        "digest": trace.digest,
        "sessions": len(trace.sessions),
        "requests": len(trace.requests),
        "input_mean": sum(inputs) / len(inputs),
        "input_max": max(inputs),
        "output_mean": sum(outputs) / len(outputs),
        "ideal_hit_rate": ideal_hit_rate(trace),
    }


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What counters (…_total) grew by; those of hits, replay and tokens."""
    keep = ("sglang_ced:", "sglang:prompt_tokens", "sglang:cached_tokens", "sglang:generation_tokens")
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if name.endswith("_total") and name.startswith(keep)
    }
