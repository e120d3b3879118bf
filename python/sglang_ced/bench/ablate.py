"""What each change is worth: one trace on configurations that differ in single flags, in turns."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.records import Run
from sglang_ced.bench.replay import Plan, replay
from sglang_ced.bench.servers import started
from sglang_ced.cache.replay import Replay


@dataclass(frozen=True)
class Feature:
    """One change, as the flags that leave it out and those that have it."""

    name: str
    off: tuple[str, ...]
    on: tuple[str, ...]
    slow: bool = False  # without it, a run takes many times as long


# The only list of what is compared. A ladder adds the changes in this order.
FEATURES = (
    Feature("fast_kernels", ("--ced-kernels", "reference"), ("--ced-kernels", "auto"), slow=True),
    Feature("bounded_replay", ("--no-swa-bounded-replay",), ("--swa-bounded-replay",)),
    Feature("packed_kv", ("--ced-kv-format", "bfloat16"), ("--ced-kv-format", "published")),
    Feature("engram_prefetch", ("--no-ced-engram-prefetch",), ("--ced-engram-prefetch",)),
)
STYLES = ("ladder", "add", "remove")


@dataclass(frozen=True)
class Configuration:
    """Flags under a name. slow: it runs without a change that makes runs many times as fast."""

    name: str
    arguments: tuple[str, ...]
    slow: bool


def configurations(style: str = "ladder", features: Sequence[Feature] = FEATURES) -> list[Configuration]:
    """all_off, what lies between, and all_on.

    ladder: each has the changes of the one before and one more. add: all off but one. remove: all on but one.
    """
    names = [feature.name for feature in features]
    if style == "ladder":
        between = {f"+{name}": set(names[: k + 1]) for k, name in enumerate(names[:-1])}
    elif style == "add":
        between = {f"only_{name}": {name} for name in names}
    elif style == "remove":
        between = {f"without_{name}": set(names) - {name} for name in names}
    else:
        raise BenchError(f"style {style!r}: there is {', '.join(STYLES)}")
    sets = {"all_off": set[str]()} | between | {"all_on": set(names)}
    return [
        Configuration(
            name,
            tuple(word for f in features for word in (f.on if f.name in chosen else f.off)),
            any(f.slow and f.name not in chosen for f in features),
        )
        for name, chosen in sets.items()
    ]


@dataclass(frozen=True)
class Ablation:
    """agents, repeats: of every configuration; slow_agents, slow_repeats: of the slow ones; last_agents: further
    numbers for the last. base: flags of all."""

    plan: Plan
    configurations: tuple[Configuration, ...]
    agents: tuple[int, ...]
    repeats: int
    slow_agents: tuple[int, ...]
    slow_repeats: int
    base: tuple[str, ...] = ()
    last_agents: tuple[int, ...] = ()

    def wanted(self) -> Iterator[tuple[int, Configuration, tuple[int, ...]]]:
        """Repeat, configuration and numbers of agents, in the order in which they run: configurations take turns."""
        for repeat in range(max(self.repeats, self.slow_repeats)):
            for configuration in self.configurations:
                if repeat < (self.slow_repeats if configuration.slow else self.repeats):
                    agents = self.slow_agents if configuration.slow else self.agents
                    last = configuration is self.configurations[-1]
                    yield repeat, configuration, agents + (self.last_agents if last else ())

    def runs(self) -> Iterator[Run]:
        """Every run as it ends, those that were finished before too. A server runs alone, for one configuration."""
        steps = list(self.wanted())
        total, done = sum(len(agents) for _, _, agents in steps), 0
        for repeat, configuration, agents in steps:
            arguments = (*self.base, *configuration.arguments)
            missing = [n for n in agents if not self.plan.finished(configuration.name, n, repeat, arguments)]
            for n in agents:
                if n not in missing:
                    done += 1
                    yield Run.load(self.plan.directory(configuration.name, n, repeat))
            if not missing:
                continue
            log = self.plan.out / configuration.name / f"server-{repeat}.log"
            say(f"[{done}/{total}] {configuration.name}: starting a server with {' '.join(arguments)}")
            with started(self.plan.model, arguments, log, self.plan.threads) as server:
                for n in missing:
                    run = replay(self.plan, server, configuration.name, n, repeat, arguments, mode_of(arguments))
                    done += 1
                    say(f"[{done}/{total}] {configuration.name}, {n} agents, repeat {repeat}: {run.seconds:.1f} s")
                    yield run


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def mode_of(arguments: Sequence[str]) -> Replay:
    """How a server started with these arguments rebuilds windows."""
    exact = os.environ.get("CED_SWA_BOUNDED_REPLAY") == "0" and "--swa-bounded-replay" not in arguments
    if exact or "--no-swa-bounded-replay" in arguments:
        return "exact"
    return "encoder" if "--no-enable-decoder-swa-bounded-replay" in arguments else "bounded"
