"""Configurations, the order in which they run, and what is not run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang_ced.bench import ablate
from sglang_ced.bench.ablate import FEATURES, STYLES, Ablation, configurations, mode_of
from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.records import Run
from sglang_ced.bench.replay import Plan
from sglang_ced.bench.servers import Server, parse_metrics
from sglang_ced.bench.shapes import generate
from sglang_ced.cli.models import bundled_path

MakeRun = Callable[..., Run]


@pytest.mark.parametrize("style", STYLES)
def test_each_style_goes_from_all_off_to_all_on_by_single_changes(style: str) -> None:
    listed = configurations(style)
    assert (listed[0].name, listed[-1].name) == ("all_off", "all_on")
    on = [{f.name for f in FEATURES if set(f.on) <= set(c.arguments)} for c in listed]
    assert (on[0], on[-1]) == (set(), {f.name for f in FEATURES})
    base = {"ladder": None, "add": on[0], "remove": on[-1]}[style]
    for k, between in enumerate(on[1:-1], 1):
        assert len(between ^ (on[k - 1] if base is None else base)) == 1
    assert len({c.arguments for c in listed}) == len(listed)
    assert [c.slow for c in listed] == ["fast_kernels" not in each for each in on]


def test_an_unknown_style_is_told() -> None:
    with pytest.raises(BenchError, match="there is ladder, add, remove"):
        configurations("all")


def test_every_flag_is_one_that_the_server_has() -> None:
    pytest.importorskip("sglang")
    import argparse

    from sglang_ced.plugin.flags import add_to

    parser = argparse.ArgumentParser()
    add_to(parser)
    for configuration in configurations():
        parser.parse_args(configuration.arguments)


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ([], "bounded"),
        (["--no-swa-bounded-replay"], "exact"),
        (["--no-enable-decoder-swa-bounded-replay"], "encoder"),
    ],
)
def test_the_arguments_say_how_windows_are_rebuilt(arguments: Sequence[str], mode: str) -> None:
    assert mode_of(arguments) == mode


@pytest.fixture
def ablation(tmp_path: Path) -> Ablation:
    plan = Plan(generate("agentx", 4, 0.01), bundled_path("ced-toy"), tmp_path)
    return Ablation(plan, tuple(configurations()), (1, 2), 3, (1,), 1, ("--base",), (4,))


def test_configurations_take_turns_and_slow_ones_run_once(ablation: Ablation) -> None:
    steps = [(repeat, c.name, agents) for repeat, c, agents in ablation.wanted()]
    names = [c.name for c in configurations()]
    assert [name for repeat, name, _ in steps if repeat == 0] == names
    assert [name for repeat, name, _ in steps if repeat == 1] == names[1:]
    assert steps[0] == (0, "all_off", (1,))
    assert steps[-1] == (2, "all_on", (1, 2, 4))


class Fake:
    """Servers and replays that cost nothing; notes what was started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, make_run: MakeRun) -> None:
        self.started: list[tuple[str, ...]] = []
        self.stop_after: int | None = None
        self.make_run, self.done = make_run, 0
        monkeypatch.setattr(ablate, "started", self._started)
        monkeypatch.setattr(ablate, "replay", self._replay)

    @contextmanager
    def _started(self, _model: Path, arguments: tuple[str, ...], *_: Any) -> Iterator[Server]:
        self.started.append(arguments)
        yield Server("http://127.0.0.1:1", "ced")

    def _replay(self, plan: Plan, _server: Server, name: str, n: int, repeat: int, arguments: Any, _mode: str) -> Run:
        if self.done == self.stop_after:
            raise KeyboardInterrupt
        self.done += 1
        run = self.make_run(name, n, repeat, arguments=list(arguments), key=plan.key(name, n, repeat, arguments))
        plan.directory(name, n, repeat).mkdir(parents=True)
        run.save(plan.directory(name, n, repeat))
        return run


def test_an_interrupted_ablation_goes_on_where_it_stopped(
    ablation: Ablation, monkeypatch: pytest.MonkeyPatch, make_run: MakeRun
) -> None:
    fake = Fake(monkeypatch, make_run)
    fake.stop_after = 4
    with pytest.raises(KeyboardInterrupt):
        list(ablation.runs())
    fake.stop_after = None
    seen = list(ablation.runs())
    total = sum(len(agents) for _, _, agents in ablation.wanted())
    assert fake.done == total == len(seen)
    assert len(fake.started) == len(list(ablation.wanted())) + 1  # one configuration was left half done
    assert all(arguments[0] == "--base" for arguments in fake.started)
    assert list(ablation.runs()) == seen
    assert fake.done == total


def test_a_run_of_something_else_is_not_taken_for_this_one(
    ablation: Ablation, monkeypatch: pytest.MonkeyPatch, make_run: MakeRun
) -> None:
    Fake(monkeypatch, make_run)
    list(ablation.runs())
    assert ablation.plan.finished("all_off", 1, 0, ("--base", *configurations()[0].arguments))
    with pytest.raises(BenchError, match="a run of another arguments"):
        ablation.plan.finished("all_off", 1, 0, ("--other",))


def test_metrics_of_several_labels_are_added_up() -> None:
    text = '# HELP x\nx_total{a="1"} 2.0\nx_total{a="2"} 3\ny 1e3\n'
    assert parse_metrics(text) == {"x_total": 5.0, "y": 1000.0}
