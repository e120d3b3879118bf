"""Another engine on the same trace: ftllm, which serves this model family on a CPU from the same directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_ced.bench.records import Run
from sglang_ced.bench.replay import Plan, replay
from sglang_ced.bench.servers import NAME, Server, process
from sglang_ced.bench.tools import FTLLM


@contextmanager
def ftllm(plan: Plan, threads: int, agents: int) -> Iterator[Server]:
    """Its server on the checkpoint of `plan`."""
    executable = FTLLM.executable(plan.tools)
    command = [str(executable), "serve", "-p", str(plan.model), "--device", "cpu", "-t", str(threads)]
    command += ["--fast_prefill", "--max_batch", str(max(1, agents))]
    environment = {"PATH": f"{executable.parent}:{os.environ['PATH']}"}
    log = plan.out / "ftllm" / "server.log"
    with process(
        command, log, NAME, threads, ready="/v1/models", environment=environment, name_option="--model_name"
    ) as server:
        yield server


def run_ftllm(plan: Plan, threads: int, agents: int) -> Run:
    """One replay on a fresh server: it has no way to empty its cache. `plan.prompts` must be chat: it has no
    /v1/completions."""
    arguments = [FTLLM.requirement, "-t", str(threads)]
    if plan.finished("ftllm", agents, 0, arguments):
        return Run.load(plan.directory("ftllm", agents, 0))
    with ftllm(plan, threads, agents) as server:
        return replay(plan, server, "ftllm", agents, 0, arguments, flush=())
