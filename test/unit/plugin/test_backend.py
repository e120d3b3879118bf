"""From SGLang's batch to spans, and from output rows back to what its logits processor expects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_ced.cache.step import Span
from sglang_ced.plugin.backend import CedAttentionBackend, OutputRows
from sglang_ced.plugin.tokens import STATE_KEY, RequestInfo


class Recorder:
    """Stands for the cache state: keeps the spans it is asked to plan."""

    def plan(self, spans: list[Span], _slots: torch.Tensor) -> list[Span]:
        return spans


def backend() -> CedAttentionBackend:
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 64), req_generation=torch.tensor([0, 7, 8, 9]))
    runner = SimpleNamespace(token_to_kv_pool=SimpleNamespace(state=Recorder()), req_to_token_pool=pool)
    return CedAttentionBackend(runner)


def batch(mode: ForwardMode, requests: list[RequestInfo], **fields: Any) -> Any:
    base = {
        "forward_mode": mode,
        "req_pool_indices": torch.arange(1, len(requests) + 1),
        "model_specific_states": {STATE_KEY: requests},
        "capture_hidden_mode": CaptureHiddenMode.NULL,
        "return_logprob": False,
        "extend_logprob_start_lens_cpu": None,
        "token_indices_to_pool": None,
    }
    return SimpleNamespace(**base | fields)


def request(prompt: int, output: int = 0, decode: bool = False, outputs_from: int | None = None) -> RequestInfo:
    return RequestInfo(list(range(prompt)), [100 + i for i in range(output)], prompt + output, outputs_from, decode)


def spans(forward_batch: Any) -> list[Span]:
    planner = backend()
    planner.init_forward_metadata(forward_batch)
    assert planner.forward_metadata is not None
    return planner.forward_metadata.step


def extend(requests: list[RequestInfo], prefixes: list[int], lengths: list[int], **fields: Any) -> Any:
    ids = [t for r, p, n in zip(requests, prefixes, lengths, strict=True) for t in (*r.prompt, *r.output)[p : p + n]]
    return batch(
        ForwardMode.EXTEND,
        requests,
        input_ids=torch.tensor(ids),
        extend_prefix_lens_cpu=prefixes,
        extend_seq_lens_cpu=lengths,
        **fields,
    )


def test_decode_rows_are_one_position_each() -> None:
    requests = [request(5, 2, decode=True), request(3, 1, decode=True)]
    found = spans(
        batch(ForwardMode.DECODE, requests, seq_lens_cpu=torch.tensor([7, 4]), input_ids=torch.tensor([101, 100]))
    )
    assert [(s.slot, s.generation, s.prefix, s.end, s.output_from, s.decode) for s in found] == [
        (1, 7, 6, 7, 6, True),
        (2, 8, 3, 4, 3, True),
    ]
    assert list(found[0].token_ids) == [0, 1, 2, 3, 4, 100, 101]


def test_only_the_last_chunk_of_a_prompt_gives_a_row() -> None:
    found = spans(extend([request(10), request(6)], [0, 2], [4, 4]))
    assert [(s.prefix, s.end, s.prompt_len, s.output_from) for s in found] == [(0, 4, 10, 4), (2, 6, 6, 5)]


def test_a_retracted_request_prefills_its_output_too() -> None:
    (found,) = spans(extend([request(4, 3)], [2], [5]))
    assert (found.prefix, found.end, found.prompt_len, found.output_from, found.decode) == (2, 7, 7, 6, False)
    assert list(found.token_ids) == [0, 1, 2, 3, 100, 101, 102]


def test_decode_rows_of_a_mixed_batch_are_marked() -> None:
    found = spans(extend([request(9), request(3, 2, decode=True)], [0, 4], [4, 1]))
    assert [(s.end, s.output_from, s.decode) for s in found] == [(4, 4, False), (5, 4, True)]


@pytest.mark.parametrize(
    ("start", "expected"), [(0, 2), (1, 3), (4, 5)], ids=["all rows", "from the second", "the last row alone"]
)
def test_prompt_logprobs_ask_for_their_rows(start: int, expected: int) -> None:
    fields = {"return_logprob": True, "extend_logprob_start_lens_cpu": [start]}
    (found,) = spans(extend([request(6, outputs_from=2 + start)], [2], [4], **fields))
    assert (found.output_from, found.request_output_from) == (expected, 2 + start)


@pytest.mark.parametrize(
    ("mode", "prompt", "expected"),
    [
        (CaptureHiddenMode.FULL, 10, (0, 0)),
        (CaptureHiddenMode.LAST, 10, (4, None)),
        (CaptureHiddenMode.LAST, 4, (3, None)),
    ],
    ids=["full: every row", "last: none of a chunk", "last: the last row of a prompt"],
)
def test_hidden_states_ask_for_their_rows(mode: CaptureHiddenMode, prompt: int, expected: tuple) -> None:
    (found,) = spans(extend([request(prompt)], [0], [4], capture_hidden_mode=mode))
    assert (found.output_from, found.request_output_from) == expected


def test_an_idle_batch_has_no_step() -> None:
    planner = backend()
    planner.init_forward_metadata(batch(ForwardMode.IDLE, []))
    assert planner.forward_metadata is not None
    assert planner.forward_metadata.step is None


def test_an_unknown_kind_of_batch_is_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match="TARGET_VERIFY"):
        spans(batch(ForwardMode.TARGET_VERIFY, [request(3)]))


def test_a_row_of_zeros_stands_in_for_a_prompt_that_goes_on() -> None:
    rows = OutputRows(new=[4, 4, 1], wanted=[2, 0, 1])
    filled = rows.fill(torch.arange(1, 4).float().unsqueeze(1))
    assert filled.flatten().tolist() == [1, 2, 0, 3]
    assert rows.tails == [2, 1, 1]


def test_the_logits_processor_is_told_of_tails() -> None:
    requests = [request(10), request(6)]
    fields = {"return_logprob": True, "extend_logprob_start_lens_cpu": [4, 1]}
    forward_batch = extend(requests, [0, 2], [4, 4], **fields)
    for name in (
        "next_token_logits_buffer token_ids_logprobs extend_input_logprob_token_ids_gpu global_num_tokens_gpu "
        "dp_local_start_pos dp_local_num_tokens global_dp_buffer_len global_num_tokens_for_logprob_cpu "
        "global_num_tokens_for_logprob_gpu mm_input_embeds extend_seq_lens _original_forward_mode"
    ).split():
        setattr(forward_batch, name, None)
    forward_batch.top_logprobs_nums, forward_batch.token_ids_logprobs = [0, 0], [None, None]
    forward_batch.is_prefill_only = forward_batch.attn_tp_sequence_sharded = False
    metadata = OutputRows(new=[4, 4], wanted=[0, 3]).metadata(forward_batch)
    assert metadata.extend_seq_lens_cpu == metadata.extend_seq_lens.tolist() == [1, 3]
    # Request 0 wants no logprob in this chunk (start = its one row), request 1 those of all its rows.
    assert metadata.extend_logprob_start_lens_cpu == [1, 0]
