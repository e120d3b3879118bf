"""Train `ced-tiny`: `python -m training.train --out build/ced-tiny`. Resumes from what `--out` holds.

Writes there: state.pt (everything that a later run needs), curve.jsonl (loss and accuracy by step), tokenizer.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.multiprocessing
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from sglang_ced.checkpoint.token_map import token_classes
from sglang_ced.checkpoint.writer import random_tensors
from sglang_ced.config import CedConfig
from sglang_ced.reference import MoE, published_name
from training import conversation, fast, guidance, recipe, shape, tokenizer
from training.muon import Muon

EVAL_TEXTS, EVAL_LENGTH, EVAL_EVERY, LOG_EVERY, SAVE_SECONDS = 32, 256, 100, 20, 180


class Data:
    """Batches of conversations; batch n is a function of the seed and n."""

    def __init__(self, tokens: Tokenizer, seed: int | str) -> None:
        self.writer, self.seed = conversation.Writer(tokens, conversation.system_text()), seed

    def batch(
        self, name: str, count: int, length: int, stage: recipe.Stage = recipe.PLAIN, skip: Collection[str] = ()
    ) -> tuple[Tensor, Tensor, list[conversation.Example]]:
        """ids [B, length + 1]; is_answer bool [B, length]: whether the next token is part of an answer.

        stage: its share of drills, and its mix of turns. skip: skills whose answers do not count.
        """
        random = Random(f"{self.seed} {name}")
        examples = []
        for _ in range(count):
            kind = random.random()
            if kind < stage.drills:
                examples.append(conversation.drill(self.writer, random, length + 1, stage.most_facts))
            elif kind < stage.drills + stage.by_heart:
                examples.append(conversation.drill_by_heart(self.writer, random, length + 1))
            elif kind < stage.drills + stage.by_heart + stage.tools:
                examples.append(conversation.drill_tools(self.writer, random, length + 1, stage.schemas, stage.owners))
            else:
                mix = conversation.MIXES[stage.mix]
                examples.append(conversation.conversation(self.writer, random, length + 1, mix))
        ids = torch.tensor([example.ids[: length + 1] for example in examples])
        answer = torch.zeros(count, length + 1, dtype=torch.bool)
        for row, example in enumerate(examples):
            for skill, first, end in example.answers:
                answer[row, first:end] = skill not in skip
        return ids, answer[:, 1:], examples


def initial_model(config: CedConfig, token_map: Tensor) -> fast.FastReference:
    model = fast.FastReference(config, token_map)
    values = dict(random_tensors(config, recipe.SEED))
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values[published_name(name)])
        if name.endswith(("wo_b.weight", "w2.weight")):
            parameter.data.mul_(0.3)
        if name.endswith("embed.weight"):
            parameter.data.mul_(0.5)
        if name.endswith("gate.bias"):
            parameter.requires_grad_(False).zero_()
    alike(model)
    return model


def alike(model: fast.FastReference) -> None:
    """Make rows attend to rows that are like them, to begin with: queries start near the keys of the same input.

    Without it a deep network takes long to leave uniform attention. Source: Trockman & Kolter, "Mimetic initialization
    of self-attention layers", 2023.
    """
    heads, dim = model.config.num_attention_heads, model.config.head_dim
    for block in model.layers:
        attention = block.attn
        source = attention.plan.kv_source
        keys = attention.wkv if source is None else model.layers[source].attn.compressor.wkv
        attention.wkv.weight.data.copy_(keys.weight.data)
        attention.wq_a.weight.data.copy_(keys.weight.data)
        queries = attention.wq_b.weight.data.view(heads, dim, dim)
        queries.mul_(0.3).add_(recipe.SIMILARITY * torch.eye(dim))
        if attention.plan.owns_selection:
            index_keys = model.layers[source].attn.indexer.wk.weight.data
            index_queries = attention.indexer.wq_b.weight.data.view(-1, *index_keys.shape)
            index_queries.mul_(0.3).add_(index_keys)


def _missing(random: Random) -> str | None:
    """The mechanism that a step does without, if any."""
    names, shares = list(recipe.WITHOUT), [share for share, _ in recipe.WITHOUT.values()]
    return random.choices([None, *names], [1 - sum(shares), *shares])[0]


class Group:
    """Processes that train together. On a CPU, two of one thread each are quicker than one of two."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def average(self, parameters: list[torch.nn.Parameter]) -> None:
        """Make the gradients those of all texts. A parameter that no text of a process reached counts as 0 there."""
        if self.count == 1:
            return
        flat = torch.cat([torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in parameters])
        torch.distributed.all_reduce(flat)
        pieces = (flat / self.count).split([p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    def total(self, value: Tensor) -> Tensor:
        if self.count > 1:
            torch.distributed.all_reduce(value)
        return value


class Trainer:
    """One of `group.count` processes that share the texts of each step. The first one writes files."""

    def __init__(self, out: Path, group: Group) -> None:
        self.out, self.group, self.step, self.tokens = out, group, 0, 0
        tokens = Tokenizer.from_file(str(out / "tokenizer.json"))
        self.config = CedConfig.from_dict(shape.config(tokens))
        self.data = Data(tokens, recipe.SEED)
        self.guide = guidance.Guide(self.data.writer.encode, self.config.vocab_size)
        self.model = initial_model(self.config, torch.tensor(token_classes(tokens)))
        self.optimisers = self._optimisers()
        if (out / "state.pt").exists():
            self._load()
        self.held_out = self.data.batch("held out", EVAL_TEXTS, EVAL_LENGTH)

    def _optimisers(self) -> list[torch.optim.Optimizer]:
        matrices, tables, others = [], [], []
        for name, parameter in self.model.named_parameters():
            if not parameter.requires_grad:
                continue
            if name.endswith("engram.embed.weight"):
                tables.append(parameter)
            elif parameter.dim() == 2 and not any(
                part in name for part in ("embed", "head", "gate.", "hc_", "_weight")
            ):
                matrices.append(parameter)
            else:
                others.append(parameter)
        rest = [{"params": others, "full": recipe.OTHER_RATE}, {"params": tables, "full": recipe.TABLE_RATE}]
        adam = torch.optim.Adam(rest, lr=recipe.OTHER_RATE, betas=(0.9, 0.98), eps=1e-10)
        muon = Muon(matrices, recipe.MATRIX_RATE)
        muon.param_groups[0]["full"] = recipe.MATRIX_RATE
        return [muon, adam]

    # -- one step -----------------------------------------------------------------------------------------------

    def train_step(self) -> dict[str, float]:
        stage, random = recipe.stage_of(self.step), Random(f"{recipe.SEED} step {self.step}")
        self._set_numerics(stage.fake_quant)
        length = random.choice(stage.lengths)
        missing = _missing(random) if stage.drills < 1 else None
        skip = recipe.WITHOUT[missing][1] if missing else ()
        ids, answer, examples = self.data.batch(
            f"step {self.step}", recipe.TOKENS_PER_STEP // length, length, stage, skip
        )
        floors = self._floors(stage, random, len(ids), length)
        self.tokens += ids.shape[0] * length
        mine = slice(self.group.rank, None, self.group.count)
        ids, answer, floors = ids[mine], answer[mine], [None if f is None else f[mine] for f in floors]
        lesson = fast.Lesson(
            stage.sparse, stage.teach_indexer and not missing, encoder_floor=floors[0], decoder_floor=floors[1]
        )
        lesson.teach_readers, lesson.teach_at = stage.teach_more, answer if stage.teach_more else None
        lesson.engram, lesson.global_kv = missing != "engram", missing != "global_kv"
        if stage.guide and not missing:
            lesson.guidance = self.guide.look(ids, answer, examples[mine] if stage.cues else [])
        states = self.model.hidden(ids[:, :-1], lesson)
        losses = F.cross_entropy(self.model.head(states).flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        losses, chosen = losses.view_as(answer), answer.float()
        answers = (
            self.group.total(chosen.sum()) / self.group.count
        )  # a process's share of them, so that texts weigh equally
        answer_loss = (losses * chosen).sum() / answers
        prompt_loss = (losses * (1 - chosen)).mean()
        index_loss = torch.stack(lesson.index_losses).sum() if lesson.index_losses else torch.zeros(())
        guide_loss = lesson.guidance.loss() if lesson.guidance else torch.zeros(())
        whole = answer_loss + recipe.PROMPT_WEIGHT * prompt_loss
        (whole + recipe.INDEX_WEIGHT * index_loss + stage.guide * guide_loss).backward()
        self._update()
        self.step += 1
        parts = torch.stack((answer_loss, prompt_loss, index_loss, guide_loss)).detach()
        means = self.group.total(parts) / self.group.count
        return dict(zip(("answer", "prompt", "index", "guide"), means.tolist(), strict=True))

    def _floors(self, stage: recipe.Stage, random: Random, count: int, length: int) -> list[Tensor | None]:
        """A boundary of bounded replay in some texts: the same row for both halves, or a later one for the decoder."""
        if not stage.floors:
            return [None, None]
        pairs = []
        for _ in range(count):
            first = random.randrange(length) if random.random() < stage.floors else 0
            pairs.append((first, random.randrange(first, length) if random.random() < 0.5 else first))
        return list(torch.tensor(pairs).unbind(1))

    def _update(self) -> None:
        share = recipe.rate_of(self.step)
        self.group.average([p for p in self.model.parameters() if p.requires_grad])
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["full"] * share
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        for block in self.model.layers:
            balance(block.ffn, self.group.total(block.ffn.last_load), share)

    def _set_numerics(self, fake_quant: bool) -> None:
        for module in self.model.modules():
            if hasattr(module, "numerics") and module.numerics.fake_quant != fake_quant:
                module.numerics = replace(module.numerics, fake_quant=fake_quant)

    # -- measuring, keeping -------------------------------------------------------------------------------------

    @torch.no_grad()
    def accuracy(self) -> dict[str, float]:
        """Share of right answers by skill on held-out texts."""
        ids, _, examples = self.held_out
        right = answered(self.model, ids, examples, fast.Lesson(recipe.stage_of(self.step).sparse))
        return {skill: sum(r) / len(r) for skill, r in sorted(right.items())}

    def save(self) -> None:
        state = {
            "step": self.step,
            "tokens": self.tokens,
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        torch.save(state, self.out / "state.partial")
        os.replace(self.out / "state.partial", self.out / "state.pt")

    def _load(self) -> None:
        state: dict[str, Any] = torch.load(self.out / "state.pt")
        self.step, self.tokens = state["step"], state["tokens"]
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        if self.group.rank == 0:  # what was logged after the state was kept will be logged again
            curve = self.out / "curve.jsonl"
            rows = curve.read_text().splitlines(keepends=True)
            curve.write_text("".join(row for row in rows if json.loads(row)["step"] <= self.step))

    def run(self, until: int) -> None:
        started = saved = time.monotonic()
        begun, sums = self.tokens, defaultdict[str, float](float)
        while self.step < until:
            for name, value in self.train_step().items():
                sums[name] += value
            if self.group.rank:
                continue
            if self.step % LOG_EVERY == 0:
                row: dict[str, Any] = {"step": self.step, "stage": recipe.stage_of(self.step - 1).name}
                row |= {name: round(total / LOG_EVERY, 4) for name, total in sums.items()}
                if self.step % EVAL_EVERY == 0 or self.step == until:
                    row |= {"accuracy": {k: round(v, 3) for k, v in self.accuracy().items()}}
                speed = (self.tokens - begun) / (time.monotonic() - started)
                with (self.out / "curve.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps(row), f"{speed:.0f} tok/s", flush=True)
                sums.clear()
                if time.monotonic() - saved > SAVE_SECONDS or self.step == until:
                    self.save()
                    saved = time.monotonic()


@torch.no_grad()
def answered(
    model: fast.FastReference, ids: Tensor, examples: list[conversation.Example], lesson: fast.Lesson
) -> dict[str, list[bool]]:
    """By skill, for each answer within ids [B, T + 1]: whether greedy decoding would write it, that is, whether all of
    its tokens are the most likely ones."""
    best = model.head(model.hidden(ids[:, :-1], lesson)).argmax(-1)
    hit, right = best == ids[:, 1:], defaultdict[str, list[bool]](list)
    for row, example in enumerate(examples):
        for skill, first, end in example.answers:
            if end <= ids.shape[1]:
                right[skill].append(bool(hit[row, first - 1 : end - 1].all()))
    return right


@torch.no_grad()
def balance(moe: MoE, load: Tensor, share: float) -> None:
    """Raise the bias of experts that got few tokens (load [E]) in the last forward, lower that of the others."""
    moe.gate.bias += recipe.BALANCE_RATE * share * torch.sign(load.mean() - load)


def work(rank: int, options: argparse.Namespace) -> None:
    """One process of the training run."""
    torch.set_num_threads(1)
    if options.processes > 1:
        store = torch.distributed.FileStore(str(options.out / "rendezvous"), options.processes)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=options.processes)
    if not options.no_compile:
        fast.compile_small_functions()
    Trainer(options.out, Group(rank, options.processes)).run(options.until)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train ced-tiny; resumes from --out.")
    parser.add_argument("--out", type=Path, default=Path("build/ced-tiny"))
    parser.add_argument(
        "--until", type=int, default=recipe.STAGES[-1].steps, help=f"step to stop at, a multiple of {LOG_EVERY}"
    )
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="of one thread each")
    parser.add_argument("--no-compile", action="store_true", help="no C++ compiler at hand: slower")
    options = parser.parse_args()
    if options.until % LOG_EVERY:
        parser.error(f"--until {options.until}: not a multiple of {LOG_EVERY}, the steps at which it can be resumed")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rendezvous").unlink(missing_ok=True)
    tokenizer.write(options.out)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes end with this one
    torch.multiprocessing.spawn(work, (options,), nprocs=options.processes, daemon=True)


if __name__ == "__main__":
    main()
