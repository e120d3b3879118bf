"""What is run and what is demanded of it: configurations of a server, and gates that compare two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

MARGIN = 0.02  # of accuracy, for bounded replay: an approximation
CONCURRENCY = 16
EXACT, PAGE = "--no-swa-bounded-replay", ("--page-size", "16")

COMPLETION_TASKS = ("ced_recall", "ced_pattern", "ced_fact", "ced_sum", "ced_edit", "ced_choice")
TOOL_TASK = "ced_tool"
LONGEST_CHOICE = 7  # tokens; see data/choice.jsonl


@dataclass(frozen=True)
class Configuration:
    """One server. concurrency: requests that lm-eval has in flight. passes: how often the same questions are sent; the
    cache is flushed before the first. fault: of test/server/faults.py, for negative controls.
    """

    name: str
    arguments: tuple[str, ...]
    concurrency: int = CONCURRENCY
    passes: int = 1
    fault: str | None = None

    def runs(self) -> list[str]:
        """Names of its passes: `bounded`, then `bounded, again`."""
        return [self.name, f"{self.name}, again"][: self.passes]


@dataclass(frozen=True)
class Gate:
    """baseline, candidate: names of runs. rule: `margin` bounds the loss of accuracy, `identical` allows no difference.
    hits: share of the candidate's requests that must begin with a cache hit.
    """

    baseline: str
    candidate: str
    rule: Literal["margin", "identical"]
    margin: float = MARGIN
    hits: float = 0.0


@dataclass(frozen=True)
class Suite:
    """configurations are run in this order. completion_tasks go to /v1/completions, tool_task to
    /v1/chat/completions with tools, chat_tasks to it without, after `examples` answered ones.

    floors: skill -> accuracy that the run `floors_of` must have, or the comparison shows nothing. filters: task -> the
    lm-eval filter that counts. controls: gates that must fail. server: arguments of every server.
    """

    configurations: tuple[Configuration, ...]
    gates: tuple[Gate, ...]
    completion_tasks: tuple[str, ...] = ()
    tool_task: str | None = None
    chat_tasks: tuple[str, ...] = ()
    examples: int = 0
    floors: dict[str, float] = field(default_factory=dict)
    floors_of: str = "exact"
    filters: dict[str, str] = field(default_factory=dict)
    controls: tuple[Gate, ...] = ()
    server: tuple[str, ...] = ()


# -- the bundled checkpoint -------------------------------------------------------------------------------------------
# What is promised to be equal is compared in exact mode: a bounded answer depends on what happened to be in the cache.

COLD = Configuration("exact", (EXACT, "--disable-radix-cache"))
CACHED = Configuration("exact, cached", (EXACT,), passes=2)
BOUNDED = Configuration("bounded", (), passes=2)
# What ced-tiny can do in exact mode; less, and a comparison of it would show little.
FLOORS = {"recall": 0.95, "choice": 0.95, "tool": 0.95, "pattern": 0.9, "fact": 0.9, "sum": 0.9, "edit": 0.9}
QUICK_TASKS = ("ced_recall", "ced_fact", "ced_edit")


def floors_of(tasks: Sequence[str]) -> dict[str, float]:
    """The floors of some tasks."""
    return {skill: floor for skill, floor in FLOORS.items() if f"ced_{skill}" in tasks}


TINY = Suite(
    configurations=(
        COLD,
        CACHED,
        BOUNDED,
        Configuration("bfloat16 KV", (EXACT, "--ced-kv-format", "bfloat16"), passes=2),
        Configuration("chunks of 64", (EXACT, "--chunked-prefill-size", "64")),
        Configuration("one at a time", (EXACT, "--max-running-requests", "1"), concurrency=1),
        Configuration("reference kernels", (EXACT, "--ced-kernels", "reference")),
    ),
    gates=(
        Gate("exact", "bounded", "margin"),
        Gate("exact", "bounded, again", "margin", hits=0.95),
        Gate("bounded", "bounded, again", "margin", hits=0.95),
        Gate("exact", "exact, cached", "identical"),
        Gate("exact", "exact, cached, again", "identical", hits=0.95),
        Gate("exact", "bfloat16 KV", "identical"),
        Gate("exact", "bfloat16 KV, again", "identical", hits=0.95),
        Gate("exact", "chunks of 64", "identical"),
        Gate("exact", "one at a time", "identical"),
        Gate("exact", "reference kernels", "identical"),
    ),
    completion_tasks=COMPLETION_TASKS,
    tool_task=TOOL_TASK,
    floors=FLOORS,
    server=PAGE,
)

QUICK = Suite(
    configurations=(CACHED, BOUNDED),
    gates=(
        Gate("exact, cached", "exact, cached, again", "identical", hits=0.95),
        Gate("exact, cached", "bounded", "margin"),
        Gate("exact, cached", "bounded, again", "margin", hits=0.95),
    ),
    completion_tasks=QUICK_TASKS,
    floors=floors_of(QUICK_TASKS),
    floors_of="exact, cached",
    server=PAGE,
)

# Faults that every gate above must see. `margin` alone sees those of replay, since bounded answers may differ.
SEEN_BY_MARGIN = ("no_replay",)
SEEN_BY_EQUALITY = ("window_short", "window_without_newest", "ties_reversed", "stale_row", "router_bias_weighs")

CONTROLS = Suite(
    configurations=(
        COLD,
        *(Configuration(fault, (), passes=2, fault=fault) for fault in SEEN_BY_MARGIN),
        *(Configuration(fault, (EXACT,), fault=fault) for fault in SEEN_BY_EQUALITY),
    ),
    gates=(),
    controls=(
        *(Gate("exact", f"{fault}, again", "margin", hits=0.95) for fault in SEEN_BY_MARGIN),
        *(Gate("exact", fault, "identical") for fault in SEEN_BY_EQUALITY),
    ),
    completion_tasks=COMPLETION_TASKS,
    floors=floors_of(COMPLETION_TASKS),
    server=PAGE,
)


# -- a published checkpoint -------------------------------------------------------------------------------------------


def published(server: tuple[str, ...], floors: dict[str, float], margin: float) -> Suite:
    """GSM8K (5 examples) and GPQA diamond (5 examples) over the chat endpoint, exact against bounded."""
    gsm8k, gpqa = "gsm8k", "gpqa_diamond_generative_n_shot"
    return Suite(
        configurations=(Configuration("exact", (EXACT,)), Configuration("bounded", (), passes=2)),
        gates=(
            Gate("exact", "bounded", "margin", margin),
            Gate("exact", "bounded, again", "margin", margin, hits=0.95),
        ),
        chat_tasks=(gsm8k, gpqa),
        examples=5,
        floors={gsm8k: floors["gsm8k"], gpqa: floors["gpqa"]},
        filters=dict.fromkeys((gsm8k, gpqa), "flexible-extract"),
        server=server,
    )
