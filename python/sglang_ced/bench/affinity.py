"""Two replicas behind sglang-router: what does it matter which of them a session meets again?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sglang_ced.bench import servers
from sglang_ced.bench.ablate import mode_of, say
from sglang_ced.bench.records import Run
from sglang_ced.bench.replay import Plan, replay
from sglang_ced.bench.servers import NAME, Server, free_port, process, started
from sglang_ced.bench.tools import HOME, ROUTER

POLICIES = ("cache_aware", "round_robin")


def compare_policies(
    plan: Plan, agents: int, replicas: int = 2, policies: Sequence[str] = POLICIES, arguments: Sequence[str] = ()
) -> Iterator[Run]:
    """A run of each policy, on servers with empty caches. `plan.prompts` must be text: the router routes by text, and
    takes no token ids."""
    missing = [policy for policy in policies if not plan.finished(policy, agents, 0, arguments)]
    with ExitStack() as stack:
        pool: list[Server] = []
        for policy in policies:
            if policy not in missing:
                yield Run.load(plan.directory(policy, agents, 0))
                continue
            for number in range(0 if pool else replicas):
                say(f"starting replica {number + 1} of {replicas}")
                cores = _share(number, replicas)
                log = plan.out / f"replica-{number}.log"
                pool.append(stack.enter_context(started(plan.model, arguments, log, len(cores), cores)))
            with router(pool, policy, plan.out / policy / "router.log", plan.tools) as front:
                yield replay(plan, front, policy, agents, 0, arguments, mode_of(arguments), flush=pool)


def _share(number: int, replicas: int) -> list[int]:
    """Cores of one replica: an equal part of those there are, one at least."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // replicas)
    first = number * each % len(cores)
    return cores[first : first + each]


@contextmanager
def router(pool: Sequence[Server], policy: str, log: Path, tools: Path = HOME) -> Iterator[Server]:
    """sglang-router before `pool`. Its first workers are known when it answers for a model."""
    python = ROUTER.executable(tools)
    command = [str(python), "-m", "sglang_router.launch_router", "--policy", policy]
    command += ["--worker-urls", *(server.url for server in pool), "--prometheus-port", str(free_port())]
    with process(command, log, NAME, ready="/v1/models", name_option="") as front:
        yield servers.Server(front.url, NAME, front.process, None)
