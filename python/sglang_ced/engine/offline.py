"""An engine without a server: prefill in any chunks, prefix reuse, decode, batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sglang_ced.cache.layout import KvFormat
from sglang_ced.cache.replay import Replay
from sglang_ced.cache.state import CacheState
from sglang_ced.cache.step import Span, ngram_history
from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engram_store.placement import StoreOptions
from sglang_ced.kernels import registry
from sglang_ced.model.transformer import Transformer


class CapacityError(RuntimeError):
    """More requests or tokens than the engine was made for."""


@dataclass
class Request:
    """One running request: its tokens, how many have global KV, and the pages it holds."""

    tokens: list[int]
    slot: int
    generation: int
    prompt_len: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    shared_pages: int = 0
    outputs_from: int | None = None

    @property
    def prompt_done(self) -> bool:
        return self.computed >= self.prompt_len


class OfflineEngine:
    """Model and caches of one checkpoint, driven step by step.

    max_requests, max_tokens: how many requests and how many tokens (over all of them) fit. replay: "exact" or
    "bounded". kv_format: how global KV is stored. device: where model and caches are, "cpu" or a CUDA device. engram:
    where n-gram tables are kept and how their rows are fetched. Not thread-safe. Raises TableError where rows of a
    table cannot be had, CapacityError where a request does not fit, ValueError for tokens outside the vocabulary or
    beyond max_position_embeddings.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        max_requests: int = 16,
        max_tokens: int = 65536,
        page_size: int = 64,
        replay: Replay = "exact",
        kernels: str | None = None,
        kv_format: KvFormat = "published",
        device: str | torch.device = "cpu",
        engram: StoreOptions | None = None,
    ) -> None:
        registry.activate(kernels, device)
        self.config, self.page_size = checkpoint.config, page_size
        self.model = Transformer.load(checkpoint, device, engram)
        pages = -(-max_tokens // page_size)
        self.state = CacheState(
            self.config, pages * page_size, max_requests, device, replay, page_size=page_size, kv_format=kv_format
        )
        self.context = min(self.config.max_position_embeddings, pages * page_size)
        self.slot_table = torch.zeros(max_requests, self.context, dtype=torch.int32, device=device)
        self.free_slots, self.generations = list(range(max_requests))[::-1], [0] * max_requests
        self.page_users = [0] * pages
        self.free_pages = list(range(pages))[::-1]

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], **options: object) -> OfflineEngine:
        """Open a checkpoint directory; options as for the constructor."""
        return cls(Checkpoint.open(path), **options)  # type: ignore[arg-type]

    # -- requests -----------------------------------------------------------------------------------------------

    def start(
        self, prompt: Sequence[int], prefix_of: Request | None = None, hit: int = 0, outputs_from: int | None = None
    ) -> Request:
        """Admit a request. With `prefix_of`, its first `hit` tokens' global KV is shared with that request, as a prefix
        cache would; `hit` must be a multiple of the page size and leave a token to compute."""
        self._check_prompt(prompt)
        if hit and (hit % self.page_size or prefix_of is None or hit > prefix_of.computed or hit >= len(prompt)):
            raise ValueError(
                f"hit {hit}: must be whole pages of {self.page_size} computed tokens, fewer than the prompt"
            )
        if not self.free_slots:
            raise CapacityError(f"all {len(self.generations)} request slots are taken")
        slot = self.free_slots.pop()
        self.generations[slot] += 1
        sequence = Request(list(prompt), slot, self.generations[slot], len(prompt), computed=hit)
        sequence.outputs_from = outputs_from
        if prefix_of is not None and hit:
            if list(prompt[:hit]) != prefix_of.tokens[:hit]:
                raise ValueError(f"hit {hit}: the two prompts differ before that")
            sequence.pages = prefix_of.pages[: hit // self.page_size]
            sequence.shared_pages = len(sequence.pages)
            for page in sequence.pages:
                self.page_users[page] += 1
            self.slot_table[slot, :hit] = self.slot_table[prefix_of.slot, :hit]
        return sequence

    def finish(self, sequence: Request) -> None:
        """Give back slot and pages; shared pages stay with their other users."""
        for page in sequence.pages:
            self.page_users[page] -= 1
            if self.page_users[page] == 0:
                self.free_pages.append(page)
        sequence.pages = []
        self.free_slots.append(sequence.slot)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ValueError("the prompt is empty")
        if len(prompt) > self.context:
            raise ValueError(f"the prompt has {len(prompt)} tokens, the context ends at {self.context}")
        bad = [t for t in prompt if not 0 <= t < self.config.vocab_size]
        if bad:
            raise ValueError(f"token id {bad[0]} is outside the vocabulary of {self.config.vocab_size}")
        if self.config.image_token_id in prompt:
            raise ValueError(f"token id {self.config.image_token_id} is the image placeholder; vision is not built")

    def _reserve(self, sequence: Request, end: int) -> None:
        if end > self.context:
            raise CapacityError(f"{end} tokens: the context ends at {self.context}")
        while len(sequence.pages) * self.page_size < end:
            if not self.free_pages:
                raise CapacityError(f"the pool of {len(self.page_users) * self.page_size} tokens is full")
            page, first = self.free_pages.pop(), len(sequence.pages) * self.page_size
            sequence.pages.append(page)
            self.page_users[page] = 1
            count = min(self.page_size, self.context - first)
            self.slot_table[sequence.slot, first : first + count] = torch.arange(count) + page * self.page_size

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, work: Sequence[tuple[Request, int]], outputs: Sequence[int | None] | None = None) -> list[Tensor]:
        """One forward: the next `count` uncomputed tokens of each request -> logits float32 [rows, vocab] per request.

        outputs: per request the first position whose logits are wanted; None = the last row of the span.
        """
        spans = []
        for index, (sequence, count) in enumerate(work):
            end = sequence.computed + count
            if not 0 < count <= len(sequence.tokens) - sequence.computed:
                raise ValueError(f"{count} rows asked for, {len(sequence.tokens) - sequence.computed} to compute")
            self._reserve(sequence, end)
            wanted = None if outputs is None else outputs[index]
            if wanted is None:
                wanted = end - 1 if end >= sequence.prompt_len else end
            spans.append(
                Span(
                    slot=sequence.slot,
                    generation=sequence.generation,
                    token_ids=sequence.tokens,
                    prefix=sequence.computed,
                    end=end,
                    prompt_len=sequence.prompt_len,
                    output_from=wanted,
                    decode=sequence.prompt_done,
                    request_output_from=sequence.outputs_from,
                )
            )
        step = self.state.plan(spans, self.slot_table)
        next_chunks = self._history(
            [(s, s.computed + n, min(s.prompt_len, len(s.tokens), s.computed + 2 * n)) for s, n in work]
        )
        logits = self.model.logits(self.model.forward(step, self.state, next_chunks))
        for sequence, count in work:
            sequence.computed += count
        return list(logits.split([max(0, span.end - max(span.output_from, span.prefix)) for span in spans]))

    def _history(self, ranges: Sequence[tuple[Request, int, int]]) -> Tensor | None:
        """n-gram history of positions [start, end) of requests, if the model wants to know what comes next."""
        ranges = [(request, start, end) for request, start, end in ranges if start < end]
        if not ranges or not self.model.engram_rows.wants_ahead:
            return None
        depth = self.config.engram_max_ngram_size
        rows = [ngram_history(request.tokens, start, end, depth) for request, start, end in ranges]
        return torch.from_numpy(np.concatenate(rows)).to(self.slot_table.device)

    def append(self, *sampled: tuple[Request, int]) -> None:
        """Note a token of each request, which the next step will run."""
        for request, token in sampled:
            request.tokens.append(token)
        self._expect([request for request, _ in sampled])

    def _expect(self, requests: Sequence[Request]) -> None:
        """The next step will run the last token of each."""
        history = self._history([(request, len(request.tokens) - 1, len(request.tokens)) for request in requests])
        if history is not None:
            self.model.engram_rows.ahead(history)

    def prefill(self, sequence: Request, chunks: Sequence[int] = (), all_rows: bool = False) -> Tensor:
        """Compute a whole prompt: float32 [1, vocab], or [new rows, vocab] with all_rows.

        chunks: sizes of the forwards; the last one repeats until the prompt is done; empty = one forward.
        """
        sizes, rows = list(chunks) or [sequence.prompt_len], []
        first = sequence.computed
        if all_rows and sequence.outputs_from is None:
            sequence.outputs_from = first
        while not sequence.prompt_done:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            count = min(size, sequence.prompt_len - sequence.computed)
            rows += self.step([(sequence, count)], [first if all_rows else None])
        return torch.cat(rows)

    def stream(self, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[int] | None = None) -> Iterator[int]:
        """Greedy tokens of one prompt, as they come; ends after a stop id (default: the config's EOS ids)."""
        ends = set(self.config.eos_token_ids if stop is None else stop)
        sequence = self.start(prompt)
        try:
            logits = self.prefill(sequence)
            for _ in range(max_new_tokens):
                token = int(logits[-1].argmax())
                self.append((sequence, token))
                yield token
                if token in ends or len(sequence.tokens) > self.context:
                    return
                logits = self.step([(sequence, 1)])[0]
        finally:
            self.finish(sequence)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        chunk: int = 2048,
        stop: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Greedy continuation of many prompts, decoded together as slots allow; chunks are mixed with decode rows."""
        ends = set(self.config.eos_token_ids if stop is None else stop)
        waiting = list(enumerate(prompts))[::-1]
        running: dict[int, Request] = {}
        out: list[list[int]] = [[] for _ in prompts]
        while waiting or running:
            while waiting and self.free_slots:
                index, prompt = waiting.pop()
                running[index] = self.start(prompt)
            work = [(s, min(chunk, len(s.tokens) - s.computed)) for s in running.values()]
            for (index, sequence), logits in zip(list(running.items()), self.step(work), strict=True):
                if not sequence.prompt_done:
                    continue
                if len(out[index]) < max_new_tokens:
                    out[index].append(int(logits[-1].argmax()))
                    sequence.tokens.append(out[index][-1])
                full = len(sequence.tokens) > self.context
                if len(out[index]) >= max_new_tokens or full or out[index][-1] in ends:
                    self.finish(running.pop(index))
            if not waiting:
                self._expect([s for s in running.values() if s.prompt_done])
        return out
