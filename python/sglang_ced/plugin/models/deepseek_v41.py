"""The model class that SGLang loads and calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_model, get_server_args
from torch import Tensor, nn

from sglang_ced.checkpoint.reader import Checkpoint
from sglang_ced.engram_store.table import TableError
from sglang_ced.kernels import registry
from sglang_ced.model.transformer import Transformer
from sglang_ced.plugin import engram, worker
from sglang_ced.plugin.claim import read_config
from sglang_ced.plugin.flags import options_of, replay_of
from sglang_ced.plugin.register import require_registered


class Head:
    """Stands for an lm_head: SGLang's logits processor calls `quant_method.apply` of one that has no `weight`
    (layers/logits_processor.py:1179), so logits are computed here and are the offline engine's, float32."""

    def __init__(self, transformer: Transformer) -> None:
        self.transformer = transformer
        self.quant_method = self

    def apply(self, _head: Head, hidden: Tensor, _bias: Tensor | None = None) -> Tensor:
        """Hidden states [n, hidden size] -> float32 [n, vocabulary].

        Hidden states may come widened (--enable-fp32-lm-head). The copy is for SGLang's samplers, which add biases
        and penalties in place (sampling/sampling_batch_info.py:441): a tensor of inference mode does not allow that.
        """
        return self.transformer.logits(hidden.to(torch.bfloat16)).clone()


class DeepseekV41CedForCausalLM(nn.Module):
    """A `Transformer` behind the interface of SGLang's models."""

    transformer: Transformer
    head: Head

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        require_registered()
        self.config = config
        self.quant_config = None  # stock's fp8 methods must not touch our weights
        # Weight updates are refused with this (model_executor/model_runner_components/weight_updater.py:73).
        self._derived_weight_cache_error = "weights are mapped from the checkpoint; start a new server to serve others"
        server_args = get_server_args()
        path = get_model().model_path
        ced_config = read_config(path, get_model().json_model_override_args)
        self.checkpoint = Checkpoint.open(path, ced_config)
        options = self.options = options_of(server_args)
        registry.activate(options.ced_kernels)
        worker.attach(ced_config, options, replay_of(server_args))
        self.logits_processor = LogitsProcessor(config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Map the checkpoint. SGLang's iterator is left unread: it would copy every tensor."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)  # SGLang builds models under the dtype of the activations
        try:
            with self.checkpoint as checkpoint:
                self.transformer = Transformer.load(checkpoint, engram=self.options.engram)
        finally:
            torch.set_default_dtype(default)
        self.head = Head(self.transformer)

    @torch.no_grad()
    def forward(
        self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch, **_: Any
    ) -> LogitsProcessorOutput:
        """Run the step that the backend has planned for `forward_batch`.

        Where Engram rows cannot be had, its requests are ended and get rows of zeros, which nobody sees.
        """
        backend = get_attn_backend()
        plan = backend.forward_metadata
        if plan.step is None:
            hidden = torch.empty(0, self.config.hidden_size, dtype=torch.bfloat16)
        else:
            prefill = not forward_batch.forward_mode.is_decode()
            try:
                hidden = plan.rows.fill(self.transformer.forward(plan.step, backend.state, plan.next_history))
                backend.metrics.after_forward(prefill)
            except TableError as error:
                engram.end_requests(forward_batch, error)
                hidden = torch.zeros(sum(plan.rows.tails), self.config.hidden_size, dtype=torch.bfloat16)
            backend.engram_metrics.after_forward(prefill)
        return self.logits_processor(input_ids, hidden, self.head, plan.rows.metadata(forward_batch))


EntryClass = DeepseekV41CedForCausalLM
