"""The attention backend `ced`: SGLang's batch in, our `Step` out. The only translation there is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor

from sglang_ced.cache.step import Span, Step, ngram_history
from sglang_ced.plugin import metrics
from sglang_ced.plugin.engram import EngramMetrics
from sglang_ced.plugin.metrics import ReplayMetrics
from sglang_ced.plugin.tokens import RequestInfo, RequestTokens, requests_of


@dataclass(frozen=True)
class OutputRows:
    """Which of a batch's new rows give hidden states: the last `wanted[i]` of the `new[i]` rows of request i.

    SGLang samples from one row of every request, also from a prompt that goes on in the next chunk, and drops
    that token. Our model need not compute it: `wanted` is 0 there, and a row of zeros stands in.
    """

    new: list[int]
    wanted: list[int]

    def fill(self, hidden: Tensor) -> Tensor:
        """[sum(wanted), hidden size] -> [sum(tails), hidden size], with the stand-in rows."""
        if all(self.wanted):
            return hidden
        out = hidden.new_zeros(sum(self.tails), hidden.shape[-1])
        real = [w > 0 for w, t in zip(self.wanted, self.tails, strict=True) for _ in range(t)]
        out[torch.tensor(real, device=hidden.device)] = hidden
        return out

    @property
    def tails(self) -> list[int]:
        """Rows of each request that the logits processor gets to see."""
        return [max(1, wanted) for wanted in self.wanted]

    def metadata(self, forward_batch: ForwardBatch) -> LogitsMetadata | ForwardBatch:
        """What tells SGLang's logits processor that it sees tails only (layers/logits_processor.py:539,
        667-850).
        """
        if self.tails == self.new or forward_batch.forward_mode.is_decode():
            return forward_batch
        metadata = LogitsMetadata.from_forward_batch(forward_batch)
        metadata.extend_seq_lens = torch.tensor(self.tails, dtype=torch.int32, device=forward_batch.input_ids.device)
        metadata.extend_seq_lens_cpu = self.tails
        if metadata.extend_return_logprob:
            starts = forward_batch.extend_logprob_start_lens_cpu
            metadata.extend_logprob_start_lens_cpu = [
                max(0, start - (new - tail)) for start, new, tail in zip(starts, self.new, self.tails, strict=True)
            ]
        return metadata


@dataclass(frozen=True)
class ForwardPlan:
    """One forward: the step to run and the rows to return. `step` is None for an idle batch.

    next_history: n-gram history of the chunks that prompts go on with, if the model wants to know.
    """

    step: Step | None
    rows: OutputRows
    next_history: Tensor | None = None


class CedAttentionBackend(AttentionBackend):
    """Plans a step for every batch. It has no per-layer attention of its own: our model does that.

    SGLang reads both pools off the backend (model_executor/forward_context.py:77-88).
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.state = runner.token_to_kv_pool.state
        self.forward_metadata: ForwardPlan | None = None
        self._model = getattr(runner, "model", None)

    @property
    def _wants_ahead(self) -> bool:
        return self._model is not None and self._model.transformer.engram_rows.wants_ahead

    @cached_property
    def engram_metrics(self) -> EngramMetrics:
        """Made at the first forward, as `metrics` is."""
        return EngramMetrics(self._model.transformer.engram_rows.store, metrics.labels())

    @cached_property
    def metrics(self) -> ReplayMetrics:
        """Made at the first forward, when SGLang's own metrics are there."""
        return ReplayMetrics(self.state, metrics.labels())

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan the batch that the model runs next."""
        spans = self._spans(forward_batch)
        rows = OutputRows(
            new=[span.end - span.prefix for span in spans],
            wanted=[span.end - span.output_from for span in spans],
        )
        step = self.state.plan(spans, self.req_to_token_pool.req_to_token) if spans else None
        self.forward_metadata = ForwardPlan(step, rows, self._next_history(spans, requests_of(forward_batch)))

    def _next_history(self, spans: list[Span], infos: list[RequestInfo]) -> Tensor | None:
        """Of prompts that go on after this forward, a chunk as long as this one."""
        if not self._wants_ahead:
            return None
        depth, parts = self.state.config.engram_max_ngram_size, []
        for span, info in zip(spans, infos, strict=True):
            end = min(span.prompt_len, 2 * span.end - span.prefix)
            if not span.decode and span.end < end:
                ids = RequestTokens(info.prompt, info.output, end, ())
                parts.append(ngram_history(ids, span.end, end, depth))
        return torch.from_numpy(np.concatenate(parts)) if parts else None

    def _spans(self, batch: ForwardBatch) -> list[Span]:
        mode = batch.forward_mode
        if mode.is_idle():
            return []
        if mode.is_decode():
            ends = batch.seq_lens_cpu.tolist()
            prefixes = [end - 1 for end in ends]
        elif mode.is_extend_without_speculative():
            prefixes = batch.extend_prefix_lens_cpu
            ends = [prefix + new for prefix, new in zip(prefixes, batch.extend_seq_lens_cpu, strict=True)]
        else:
            raise NotImplementedError(f"sglang-ced cannot run a batch of mode {mode.name}")
        slots = batch.req_pool_indices.tolist()
        generations = self.req_to_token_pool.req_generation[slots].tolist()
        new_ids, offset, spans = batch.input_ids.tolist(), 0, []
        for i, request in enumerate(requests_of(batch)):
            prefix, end = prefixes[i], ends[i]
            ids = new_ids[offset : offset + end - prefix]
            offset += end - prefix
            spans.append(
                Span(
                    slot=slots[i],
                    generation=generations[i],
                    token_ids=RequestTokens(request.prompt, request.output, prefix, ids),
                    prefix=prefix,
                    end=end,
                    prompt_len=end if request.decode else request.prefill_len,
                    output_from=_output_from(batch, i, prefix, end, request.decode or end >= request.prefill_len),
                    decode=request.decode,
                    request_output_from=0 if batch.capture_hidden_mode.is_full() else request.outputs_from,
                )
            )
        return spans

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Asked for by padding (layers/attention/base_attn_backend.py:288)."""
        return 1

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """The same, asked for on a CPU."""
        return 1


def _output_from(batch: ForwardBatch, i: int, prefix: int, end: int, last: bool) -> int:
    """First position whose hidden state request i wants; `end` for none."""
    if batch.forward_mode.is_decode():
        return prefix
    if batch.capture_hidden_mode.is_full() or batch.token_indices_to_pool is not None:
        return prefix
    first = end - 1 if last else end  # SGLang keeps the last hidden state of the last chunk only
    if batch.return_logprob:
        first = min(first, prefix + batch.extend_logprob_start_lens_cpu[i])
    return first
