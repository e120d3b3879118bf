"""The token ids of each request of a batch.

The model needs more of them than a batch carries: ids before the first new row, for replay rows and for the
n-gram history of Engram. SGLang keeps them on the host, in the request; they are attached when the batch is
built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

STATE_KEY = "ced"


class RequestTokens(Sequence[int]):
    """Token ids of a request from position 0, without copying them at every step.

    known: prompt and output ids that the host has; new: ids of the positions from `prefix` on, as the batch
    runs them. With overlap the newest sampled id is not in `known` yet, so `new` is what counts from `prefix`
    on.
    """

    __slots__ = ("_new", "_output", "_prefix", "_prompt")

    def __init__(self, prompt: Sequence[int], output: Sequence[int], prefix: int, new: Sequence[int]) -> None:
        if len(prompt) + len(output) < prefix:
            raise ValueError(f"the host knows {len(prompt) + len(output)} token ids, the batch starts at {prefix}")
        self._prompt, self._output, self._prefix, self._new = prompt, output, prefix, new

    def __len__(self) -> int:
        return self._prefix + len(self._new)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._range(start, stop)[::step] if step > 0 else [self[i] for i in range(start, stop, step)]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(index)
        return self._range(position, position + 1)[0]

    def _range(self, start: int, stop: int) -> list[int]:
        split, prompt = self._prefix, len(self._prompt)
        known = min(stop, split)
        out = list(self._prompt[start : min(known, prompt)])
        out += self._output[max(0, start - prompt) : max(0, known - prompt)]
        out += self._new[max(0, start - split) : max(0, stop - split)]
        return out


@dataclass(frozen=True)
class RequestInfo:
    """What a step needs to know of a request.

    prefill_len: tokens of the whole prefill, all chunks. outputs_from: first position whose logprobs it
    wants, if any. request: SGLang's own, to end it.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    prefill_len: int
    outputs_from: int | None
    decode: bool
    request: Any = None


def around_init_new(original: Callable[..., Any], cls: type, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Put a RequestInfo per request into a new ForwardBatch (model_executor/forward_batch_info.py:883).

    It must be a declared field: runners go on with a copy of the batch
    (model_executor/runner/eager_runner.py:184).
    """
    forward_batch = original(cls, batch, *args, **kwargs)
    decoding = {id(request) for request in (batch.decoding_reqs or ())}
    all_decode = batch.forward_mode.is_decode()
    requests = [
        RequestInfo(
            prompt=request.origin_input_ids,
            output=request.output_ids,
            # A retracted request prefills its output too.
            prefill_len=len(request.full_untruncated_fill_ids),
            outputs_from=request.logprob_start_len
            if request.return_logprob and request.logprob_start_len >= 0
            else None,
            decode=all_decode or id(request) in decoding,
            request=request,
        )
        for request in batch.reqs
    ]
    forward_batch.model_specific_states = {STATE_KEY: requests}
    return forward_batch


def requests_of(forward_batch: Any) -> list[RequestInfo]:
    """What `around_init_new` attached."""
    requests: list[RequestInfo] = forward_batch.model_specific_states[STATE_KEY]
    return requests
