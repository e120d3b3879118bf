"""`ced bench`: agent traces, their replay on servers through aiperf, and reports."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
from collections.abc import Iterable
from pathlib import Path

from sglang_ced.bench.ablate import STYLES, Ablation, configurations, mode_of
from sglang_ced.bench.affinity import POLICIES, compare_policies
from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.figures import require_matplotlib
from sglang_ced.bench.mooncake import write_mooncake
from sglang_ced.bench.payload import PROMPTS, Prompts
from sglang_ced.bench.peer import run_ftllm
from sglang_ced.bench.read import FORMS, read_trace
from sglang_ced.bench.records import Run, load_runs
from sglang_ced.bench.replay import Plan, about, replay
from sglang_ced.bench.report import write_report
from sglang_ced.bench.servers import Server, running, started
from sglang_ced.bench.shapes import SHAPES, generate
from sglang_ced.bench.tools import AIPERF, HOME
from sglang_ced.cli.models import bundled_path

COMMANDS = {
    "trace": "write a generated trace, or show one",
    "serve": "replay a trace on a server, with several numbers of agents",
    "ablate": "replay a trace on configurations that differ in single flags",
    "affinity": "replay a trace on replicas behind sglang-router, by routing policy",
    "peer": "replay a trace on ftllm",
    "report": "put finished runs into one report",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", metavar="COMMAND", required=True)
    parsers = {
        name: commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        for name, text in COMMANDS.items()
    }
    _add_trace(parsers["trace"])
    for name in ("serve", "ablate", "affinity", "peer"):
        _add_replay(parsers[name])
    _add_serve(parsers["serve"])
    _add_ablate(parsers["ablate"])
    affinity = parsers["affinity"]
    affinity.add_argument("--concurrency", type=_numbers, default=(4,), metavar="N", help="agents (default: 4)")
    affinity.add_argument("--replicas", type=int, default=2, metavar="N", help="servers (default: 2)")
    affinity.add_argument("--policies", default=",".join(POLICIES), metavar="A,B", help="of the router")
    peer = parsers["peer"]
    peer.add_argument("--concurrency", type=_numbers, default=(1,), metavar="1,2,..", help="agents (default: 1)")
    report = parsers["report"]
    report.add_argument("runs", type=Path, nargs="+", metavar="DIR", help="directories of runs, as --out named them")
    report.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the report goes")
    for name in ("serve", "ablate", "affinity", "peer", "report"):
        _add_targets(parsers[name])


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), help="generate a trace of this shape")
    parser.add_argument("--sessions", type=int, default=16, metavar="N", help="generated sessions (default: 16)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="factor of all lengths and delays")
    parser.add_argument("--max-turns", type=int, metavar="N", help="cut generated sessions after so many turns")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the generator (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="Mooncake JSONL to write")
    _add_reading(parser, "show this trace instead, and write it if --out is given")


def _add_reading(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--trace", type=Path, metavar="FILE", help=text)
    parser.add_argument("--form", choices=FORMS, help="of the file (default: told from its content)")
    parser.add_argument("--block", type=int, metavar="N", help="tokens of a block (generated: 64)")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint directory (default: the bundled ced-tiny)"
    )


def _add_replay(parser: argparse.ArgumentParser) -> None:
    _add_reading(parser, "trace to replay")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR", help="for runs and report")
    parser.add_argument("--tools", type=Path, default=HOME, metavar="DIR", help=f"environments (default: {HOME})")
    parser.add_argument("--token-seed", type=int, default=0, metavar="N", help="of the prompts' tokens (default: 0)")
    parser.add_argument("--threads", type=int, metavar="N", help="threads of a server (default: as torch chooses)")
    parser.add_argument("--server-args", default="", metavar="'...'", help="more arguments for servers started here")
    parser.add_argument("--quiet", action="store_true", help="no progress bars of aiperf")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a server that runs (default: start one on --model)")
    parser.add_argument("--name", default="serve", help="of this configuration in reports (default: serve)")
    parser.add_argument("--concurrency", type=_numbers, default=(1, 2, 4), metavar="1,2,..", help="agents")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of every number of agents (default: 1)")
    parser.add_argument("--prompts", choices=PROMPTS, default="ids", help="how prompts are sent (default: ids)")
    parser.add_argument(
        "--no-flush", action="store_true", help="the server has no /flush_cache: do not empty its cache"
    )


def _add_ablate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--style", choices=STYLES, default="ladder", help="what lies between all off and all on")
    parser.add_argument("--configs", metavar="A,B", help="only these configurations; --configs list shows them")
    parser.add_argument("--concurrency", type=_numbers, default=(1, 2, 4), metavar="1,2,..", help="agents")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of every point (default: 3)")
    parser.add_argument("--slow-concurrency", type=_numbers, metavar="1,..", help="agents, without fast kernels")
    parser.add_argument("--slow-repeats", type=int, metavar="N", help="repeats, without fast kernels")


def _add_targets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target-speed", type=float, metavar="X", help="tok/s that every agent must get")
    parser.add_argument("--target-ttft", type=float, metavar="S", help="seconds to the first token, median, at most")


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(word) for word in text.split(","))
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text}: numbers of agents, from 1")
    return numbers


# -- run --------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    if args.bench == "trace":
        return _trace(args)
    require_matplotlib()
    if args.bench == "report":
        print(write_report(load_runs(args.runs), args.out, args.target_speed, args.target_ttft))
        return 0
    if args.bench == "ablate" and args.configs == "list":
        for configuration in configurations(args.style):
            print(f"{configuration.name:<24} {' '.join(configuration.arguments)}")
        return 0
    # A terminated command stops what it started, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    needed: dict[str, Prompts] = {"affinity": "text", "peer": "chat", "ablate": "ids"}
    prompts: Prompts = args.prompts if args.bench == "serve" else needed[args.bench]
    plan = _plan(args, prompts)
    AIPERF.executable(plan.tools)
    runs = {"serve": _serve, "ablate": _ablate, "affinity": _affinity, "peer": _peer}[args.bench](args, plan)
    return _report(runs, args)


def _trace(args: argparse.Namespace) -> int:
    if (args.trace is None) == (args.shape is None):
        raise BenchError("give --shape to generate a trace, or --trace to show one")
    if args.shape is not None:
        trace = generate(args.shape, args.sessions, args.scale, args.seed, args.block or 64, args.max_turns)
        if args.out is None:
            raise BenchError("give --out FILE for the generated trace")
    else:
        trace = read_trace(args.trace, args.form, args.block, args.model)
    if args.out is not None:
        write_mooncake(trace, args.out)
    print(json.dumps(about(trace) | {"block": trace.block}))
    return 0


def _plan(args: argparse.Namespace, prompts: Prompts) -> Plan:
    model = args.model or bundled_path("ced-tiny")
    if args.trace is None:
        raise BenchError("give --trace FILE: `ced bench trace` writes one")
    trace = read_trace(args.trace, args.form, args.block, args.model)
    return Plan(trace, model, args.out, args.token_seed, prompts, args.tools, args.threads, args.quiet)


def _report(runs: Iterable[Run], args: argparse.Namespace) -> int:
    """Report what has run, also if Ctrl-C or an error ends the runs; those go on after it."""
    done: list[Run] = []
    try:
        for each in runs:
            done.append(each)
    finally:
        if done:
            print(write_report(done, args.out, args.target_speed, args.target_ttft), flush=True)
    return 0


def _serve(args: argparse.Namespace, plan: Plan) -> Iterable[Run]:
    if args.url:
        if args.server_args:
            raise BenchError("--server-args are for a server that is started here; --url names one that runs")
        yield from _serve_on(args, plan, running(args.url), ("--url", args.url))
        return
    arguments = tuple(shlex.split(args.server_args))
    wanted = [(n, repeat) for repeat in range(args.repeats) for n in args.concurrency]
    if all(plan.finished(args.name, n, repeat, arguments) for n, repeat in wanted):
        yield from (Run.load(plan.directory(args.name, n, repeat)) for n, repeat in wanted)
        return
    with started(plan.model, arguments, plan.out / args.name / "server.log", plan.threads) as server:
        yield from _serve_on(args, plan, server, arguments)


def _serve_on(args: argparse.Namespace, plan: Plan, server: Server, arguments: tuple[str, ...]) -> Iterable[Run]:
    mode = None if args.url else mode_of(arguments)
    for repeat in range(args.repeats):
        for n in args.concurrency:
            if plan.finished(args.name, n, repeat, arguments):
                yield Run.load(plan.directory(args.name, n, repeat))
            else:
                yield replay(plan, server, args.name, n, repeat, arguments, mode, () if args.no_flush else None)


def _ablate(args: argparse.Namespace, plan: Plan) -> Iterable[Run]:
    all_of = configurations(args.style)
    chosen = args.configs.split(",") if args.configs else [c.name for c in all_of]
    unknown = set(chosen) - {c.name for c in all_of}
    if unknown:
        raise BenchError(f"--configs {','.join(sorted(unknown))}: there is {', '.join(c.name for c in all_of)}")
    return Ablation(
        plan,
        tuple(c for c in all_of if c.name in chosen),
        args.concurrency,
        args.repeats,
        args.slow_concurrency or args.concurrency,
        args.slow_repeats or args.repeats,
        tuple(shlex.split(args.server_args)),
    ).runs()


def _affinity(args: argparse.Namespace, plan: Plan) -> Iterable[Run]:
    arguments = tuple(shlex.split(args.server_args))
    for n in args.concurrency:
        yield from compare_policies(plan, n, args.replicas, args.policies.split(","), arguments)


def _peer(args: argparse.Namespace, plan: Plan) -> Iterable[Run]:
    threads = args.threads or len(os.sched_getaffinity(0))
    return (run_ftllm(plan, threads, n) for n in args.concurrency)
