"""What a server should have answered, from the offline engine.

A bounded answer depends on how many tokens its prompt found in the cache and on how those were computed. For a single
request `after_hit` takes that number from the answer. For a busy server `Mirror` takes from a trace what the scheduler
decided (which request has which pages, where prefills end) and computes everything else anew: one request at a time,
in chunks of its own, by an engine that knows nothing of the server's rings, batches and slots.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_ced.engine.offline import OfflineEngine, Request

# Two tokens whose logits are closer than this may change places: they are sums of bfloat16 products taken in another
# order. Logits of the bundled checkpoint are of order 10, of which this is less than a unit in bfloat16's last place.
TIE = 0.02


def after_hit(
    engine: OfflineEngine, prompt: Sequence[int], new: int, hit: int, outputs_from: int | None = None
) -> tuple[list[int], Tensor]:
    """Greedy continuation of a prompt whose first `hit` tokens a cold request has left in the cache.

    -> (`new` tokens, logits [positions, vocab] from `outputs_from` on (default: the last of the prompt)).
    """
    donor = engine.start(prompt[: hit + 1]) if hit else None
    if donor is not None:
        engine.prefill(donor)
    request = engine.start(prompt, donor, hit, outputs_from)
    try:
        return _continue(engine, request, new)
    finally:
        engine.finish(request)
        if donor is not None:
            engine.finish(donor)


def _continue(engine: OfflineEngine, request: Request, new: int) -> tuple[list[int], Tensor]:
    first = request.prompt_len - 1 if request.outputs_from is None else request.outputs_from
    rows = engine.step([(request, request.prompt_len - request.computed)], [first])
    out = []
    for _ in range(new):
        out.append(int(rows[-1][-1].argmax()))
        request.tokens.append(out[-1])
        if len(out) < new:
            rows += engine.step([(request, 1)])
    return out, torch.cat(rows)


@dataclass(eq=False)
class Life:
    """A request from the slot it was given to the loss of it: finished, aborted or retracted."""

    slot: int
    generation: int
    request: Request
    pages: list[int] = field(default_factory=list)
    tail: Tensor | None = None


@dataclass
class Report:
    """checked: sampled tokens compared; ties: those that differ where the two best logits are within TIE."""

    forwards: int = 0
    lives: int = 0
    hits: int = 0
    checked: int = 0
    ties: int = 0
    wrong: list[str] = field(default_factory=list)


class Mirror:
    """Follows a trace of launcher.py. `engine` needs the server's page size, replay mode, and more pages than it."""

    def __init__(self, engine: OfflineEngine) -> None:
        self.engine, self.report = engine, Report()
        self.window = engine.config.sliding_window
        self.lives: dict[int, Life] = {}
        self.pages: dict[int, int] = {}  # page of the server -> page of the engine that holds what it holds
        self.writers: dict[int, Life] = {}  # page of the server -> who last began to write it
        # All tokens of an ended life -> logits of the next, of each such life: the same text can be hit differently.
        self.sequences: dict[tuple[int, ...], list[Tensor]] = {}

    def follow(self, lines: Iterable[str]) -> None:
        """Take in forwards of the trace."""
        for line in lines:
            self.report.forwards += 1
            for span in json.loads(line):
                self._take(span)

    def close(self) -> Report:
        """Compute what is still to compute."""
        for life in list(self.lives.values()):
            self._end(life)
        return self.report

    def check_answer(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """The answer that a client got is one that the trace has, with the right last token."""
        found = self.sequences.get((*prompt, *output[:-1]), [])
        if not found:
            self.report.wrong.append(f"no request of the trace answers {len(prompt)} + {len(output)} tokens")
            return
        logits = min(found, key=lambda logits: float(logits.max() - logits[output[-1]]))
        self._compare(logits, output[-1], f"last token of {len(prompt)} + {len(output)} tokens")

    def _take(self, span: dict[str, Any]) -> None:
        life = self.lives.get(span["slot"])
        if life is not None and life.generation != span["generation"]:
            self._end(life)
            life = None
        if life is not None and not span["decode"] and span["prompt_len"] != life.request.prompt_len:
            self._next_turn(life, span)
        before = span["prefix"] // self.engine.page_size
        if life is None:
            life = self._begin(span, before)
        elif life.pages[:before] != span["pages"][:before]:
            # After a prefill SGLang lets a request read pages of others with the same tokens, and frees its own.
            self._flush(life)
            self._share(life.request, span["pages"][:before])
        for page in span["pages"][before:]:
            if self.writers.get(page) is not life:
                self._flush_writer(page)
                self.writers[page] = life
        life.request.tokens += span["ids"][span["prefix"] - span["low"] :]
        life.pages = span["pages"]

    def _next_turn(self, life: Life, span: dict[str, Any]) -> None:
        """A streaming session keeps its slot from one prompt to the next."""
        self._flush(life)
        self._keep_tail(life)
        life.tail = None
        self._set_prompt(life.request, span)

    def _set_prompt(self, request: Request, span: dict[str, Any]) -> None:
        request.prompt_len = max(span["prompt_len"], span["end"])
        wanted = request.prompt_len - 1 if span["outputs_from"] is None else span["outputs_from"]
        # The engine runs prompt and output in one forward; this puts its decoder floor where that of the prompt is.
        request.outputs_from = max(0, min(wanted, request.prompt_len - self.window))

    def _begin(self, span: dict[str, Any], shared: int) -> Life:
        prefix = span["prefix"]
        request = self.engine.start(span["ids"][: prefix + 1])
        request.tokens, request.computed = span["ids"][:prefix], prefix
        self._set_prompt(request, span)
        life = self.lives[span["slot"]] = Life(span["slot"], span["generation"], request)
        self._share(request, span["pages"][:shared])
        self.report.lives += 1
        self.report.hits += prefix > 0
        return life

    def _share(self, request: Request, server_pages: Sequence[int]) -> None:
        """The first pages of the request become those that the server reads there."""
        engine, size = self.engine, self.engine.page_size
        for index, server_page in enumerate(server_pages):
            self._flush_writer(server_page)
            page = self.pages[server_page]
            engine.page_users[page] += 1
            if index < len(request.pages):
                self._release(request.pages[index])
                request.pages[index] = page
            else:
                request.pages.append(page)
            engine.slot_table[request.slot, index * size : (index + 1) * size] = torch.arange(size) + page * size

    def _release(self, page: int) -> None:
        self.engine.page_users[page] -= 1
        if self.engine.page_users[page] == 0:
            self.engine.free_pages.append(page)

    def _flush_writer(self, server_page: int) -> None:
        """Compute what the page holds, before it is read or handed on."""
        writer = self.writers.get(server_page)
        if writer is not None and self.lives.get(writer.slot) is writer:
            self._flush(writer)

    def _flush(self, life: Life) -> None:
        """Run what has come since the last flush, in one forward, and compare what was sampled."""
        request, first = life.request, life.request.computed
        count = len(request.tokens) - first
        if count == 0:
            return
        wanted = max(first, request.prompt_len - 1)
        (logits,) = self.engine.step([(request, count)], [min(wanted, first + count)])
        if life.tail is not None and first < len(request.tokens):
            self._compare(life.tail, request.tokens[first], f"slot {life.slot}.{life.generation} at {first}")
        for row, position in zip(logits[:-1], range(wanted + 1, len(request.tokens)), strict=True):
            self._compare(row, request.tokens[position], f"slot {life.slot}.{life.generation} at {position}")
        life.tail = logits[-1] if len(logits) else None
        for index in range(first // self.engine.page_size, len(request.pages)):
            old, page = self.pages.get(life.pages[index]), request.pages[index]
            if old != page:
                self.engine.page_users[page] += 1
                self.pages[life.pages[index]] = page
                if old is not None:
                    self._release(old)

    def _end(self, life: Life) -> None:
        self._flush(life)
        self._keep_tail(life)
        self.engine.finish(life.request)
        del self.lives[life.slot]

    def _keep_tail(self, life: Life) -> None:
        if life.tail is not None:
            self.sequences.setdefault(tuple(life.request.tokens), []).append(life.tail.clone())

    def _compare(self, logits: Tensor, token: int, where: str) -> None:
        self.report.checked += 1
        best = logits.max()
        if int(logits.argmax()) == token:
            return
        gap = float(best - logits[token])
        if gap < TIE:
            self.report.ties += 1
        else:
            self.report.wrong.append(f"{where}: {token} instead of {int(logits.argmax())}, {gap:.3f} below it")


def mirror_of(engine: OfflineEngine, trace: Path, answers: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Report:
    """Follow a whole trace, then check (prompt, output) pairs that clients got."""
    mirror = Mirror(engine)
    with trace.open() as lines:
        mirror.follow(lines)
    mirror.close()
    for prompt, output in answers:
        mirror.check_answer(prompt, output)
    return mirror.report
