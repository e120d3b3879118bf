"""Agent traffic: what our changes are worth, how many agents, session affinity, a peer: `make bench-agents`.

    QUICK=1            8 layers, few and short requests; its figures are not comparable with the full run's
    --scale, --sessions, --turns, --seed   of the AgentX-like trace
    --repeats N        of every fast configuration
    --no-peer          leave ftllm out

Goes on where it was stopped: finished runs lie in build/bench-agents, and a report of them in report/. The last line
printed is one JSON object. The full run replaces benchmark/results/agents.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

from benchmark.measure import ROOT, commit, machine, print_change, require_current_kernels, save
from benchmark.shape.ced_bench import checkpoint_dir

from sglang_ced.bench.ablate import Ablation, configurations
from sglang_ced.bench.affinity import compare_policies
from sglang_ced.bench.figures import require_matplotlib
from sglang_ced.bench.mooncake import write_mooncake
from sglang_ced.bench.peer import run_ftllm
from sglang_ced.bench.records import Run
from sglang_ced.bench.replay import Plan, about
from sglang_ced.bench.report import write_report
from sglang_ced.bench.shapes import generate
from sglang_ced.bench.summary import Curve, curves
from sglang_ced.bench.tools import AIPERF, FTLLM, ROUTER

HEADLINES = ["decode_c1_x", "throughput_at_equal_speed_x", "hit_rate_affinity", "hit_rate_round_robin"]
# Blocks are shared in pages, so that is what a small trace has blocks of.
PAGE = 16
BASE = ("--page-size", str(PAGE))


def plan_of(args: argparse.Namespace) -> Plan:
    trace = generate("agentx", args.sessions, args.scale, args.seed, PAGE, args.turns)
    home = ROOT / "build" / ("bench-agents-quick" if args.quick else "bench-agents") / trace.digest
    home.mkdir(parents=True, exist_ok=True)
    write_mooncake(trace, home / "trace.jsonl")
    return Plan(trace, checkpoint_dir(args.quick), home, tools=ROOT / "build" / "tools")


def ablation(plan: Plan, args: argparse.Namespace) -> list[Run]:
    """Every configuration with one agent, then all_on with more."""
    chosen = configurations("ladder")
    if args.quick:
        chosen = [configuration for configuration in chosen if configuration.name in ("all_off", "all_on")]
    more = tuple(n for n in args.agents if n > 1)
    return list(Ablation(plan, tuple(chosen), (1,), args.repeats, (1,), 1, BASE, more).runs())


def affinity(plan: Plan, args: argparse.Namespace) -> list[Run]:
    """Two replicas behind the router, by policy. Prompts are text here, so these runs compare with each other only."""
    behind = replace(plan, out=plan.out / "affinity", prompts="text")
    return list(compare_policies(behind, min(3, len(plan.trace.sessions)), arguments=BASE))


def headline(ablated: list[Curve], routed: list[Curve]) -> dict[str, Any]:
    """The four figures; ratios of medians."""
    by_name = {curve.name: curve for curve in [*ablated, *routed]}
    off, on = by_name["all_off"].at(1), by_name["all_on"]
    if not off.speed or not on.at(1).speed:
        raise SystemExit("no answer of the trace has two tokens, so that none has a speed: give a larger --scale")
    equal = on.operating_point(speed=off.speed)
    return {
        "decode_c1_x": on.at(1).speed / off.speed,
        # No number of agents of all_on is as fast as one of all_off: there is no such throughput, and 0 says so.
        "throughput_at_equal_speed_x": equal.throughput / off.throughput if equal else 0.0,
        "hit_rate_affinity": by_name["cache_aware"].points[-1].hit_rate,
        "hit_rate_round_robin": by_name["round_robin"].points[-1].hit_rate,
        "agents_at_equal_speed": equal.agents if equal else 0,
    }


def peer(plan: Plan) -> Curve:
    """ftllm with one agent. It has no /v1/completions, so the words of the trace go to it as a chat message."""
    threads = len(os.sched_getaffinity(0))
    return curves([run_ftllm(replace(plan, out=plan.out / "peer", prompts="chat"), threads, 1)])[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", default=os.environ.get("QUICK") == "1")
    parser.add_argument("--scale", type=float, help="of the trace (default: 1/96, quick: 1/256)")
    parser.add_argument("--sessions", type=int, help="of the trace, sub-agents not counted (default: 3, quick: 2)")
    parser.add_argument("--turns", type=int, help="of a session at most (default: 3, quick: 2)")
    parser.add_argument("--seed", type=int, help="of the trace (default: 9, quick: 6)")
    parser.add_argument("--agents", type=lambda text: [int(n) for n in text.split(",")], help="default: 1,2,4")
    parser.add_argument("--repeats", type=int, help="of fast configurations (default: 2, quick: 1)")
    parser.add_argument("--no-peer", action="store_true", default=None, help="leave ftllm out (quick: always)")
    args = parser.parse_args()
    # The seeds give short traces whose answers are long enough to have a speed.
    quick = {"scale": 1 / 256, "sessions": 2, "turns": 2, "seed": 6, "agents": [1, 2], "repeats": 1, "no_peer": True}
    full = {"scale": 1 / 96, "sessions": 3, "turns": 3, "seed": 9, "agents": [1, 2, 4], "repeats": 2, "no_peer": False}
    for name, value in (quick if args.quick else full).items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    require_current_kernels()
    require_matplotlib()
    plan = plan_of(args)
    for tool in (AIPERF, ROUTER, *(() if args.no_peer else (FTLLM,))):
        tool.executable(plan.tools)
    print(f"{'QUICK: 8 layers; ' if args.quick else ''}ced-bench; trace {plan.out / 'trace.jsonl'}", flush=True)
    print(json.dumps(about(plan.trace)), flush=True)
    # Terminated, it stops its servers and reports, as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = measure(plan, args)
    except KeyboardInterrupt:
        print(report(plan))
        raise SystemExit("stopped; the same command goes on from here") from None
    if not args.quick:
        print_change("agents.json", result, HEADLINES)
        save("agents.json", result)
    line = {name: round(result[name], 3) for name in HEADLINES}
    print(json.dumps(line | {name: result[name] for name in ("machine", "commit", "quick")}))


def measure(plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    ablated, routed = curves(ablation(plan, args)), curves(affinity(plan, args))
    others = [] if args.no_peer else [peer(plan)]
    print(report(plan))
    result = headline(ablated, routed)
    result["curves"] = {c.name: [asdict(point) for point in c.points] for c in [*ablated, *routed, *others]}
    result["flags"] = {c.name: c.run.arguments for c in [*ablated, *routed, *others]}
    result |= {"trace": about(plan.trace) | {"scale": args.scale, "seed": args.seed}, "quick": args.quick}
    return result | {"machine": machine(), "commit": commit(), "sglang_version": version("sglang")}


def report(plan: Plan) -> str:
    """One page of all runs that have ended, the replicas' apart."""
    order = [configuration.name for configuration in configurations("ladder")]
    ended = [Run.load(file.parent) for file in sorted(plan.out.rglob("run.json"))]
    ended.sort(key=lambda run: order.index(run.name) if run.name in order else len(order))
    replicas = [run for run in ended if run.key["prompts"] == "text"]
    texts = [
        write_report(runs, plan.out / name)
        for name, runs in (("report", [run for run in ended if run not in replicas]), ("report-affinity", replicas))
        if runs
    ]
    return "\n\n".join(texts)


if __name__ == "__main__":
    main()
