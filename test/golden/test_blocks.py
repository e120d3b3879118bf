"""One layer at a time, fed with the publisher's own input: the sharp test. Limits of test/golden/data/README.md.

Selections are fed back where ties let implementations differ, so that only arithmetic is left.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_ced import reference

PROMPT = "len33"


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """||a - b|| / ||b|| per row."""
    ours, theirs = ours.double(), theirs.double()
    return (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-30)


def run_layers_on_golden_inputs(golden) -> dict[str, Tensor]:
    """Every layer of the reference on the publisher's input for it; all that it noted, and the streams it gave."""
    model, tensors = golden.reference, golden.tensors
    notes: dict[str, Tensor] = {}
    streams, pre_mix, shared = model.start(torch.tensor([golden.ids(PROMPT)]), notes)
    for layer, block in enumerate(model.layers):
        if layer:
            streams = tensors[f"hidden/{PROMPT}/layer{layer - 1}_out"][None]
            pre_mix = tensors[f"hidden/{PROMPT}/layer{layer - 1}_pre_mix"][None]
        if block.plan.has_engram:
            model.engram(layer, streams, shared)
            streams = tensors[f"hidden/{PROMPT}/layer{layer}_engram_out"][None]
        notes[f"layer{layer}_out"], notes[f"layer{layer}_pre_mix"] = block(streams, pre_mix, shared)
    return notes


def test_each_layer_gives_the_publishers_output(golden8, feed_selections) -> None:
    feed_selections(golden8, PROMPT)
    notes = run_layers_on_golden_inputs(golden8)
    for name, median, p99 in (
        ("attn_out", 0.006, 0.02),
        ("ffn_out", 0.006, 0.02),
        ("out", 0.005, 0.03),
        ("engram_out", 0.005, 0.03),
        ("pre_mix", 0.005, 0.03),
    ):
        errors = torch.cat(
            [
                relative_error(
                    notes[f"layer{layer}_{name}"][0], golden8.tensors[f"hidden/{PROMPT}/layer{layer}_{name}"]
                ).flatten()
                for layer in range(golden8.checkpoint.config.num_hidden_layers)
                if f"layer{layer}_{name}" in notes
            ]
        )
        assert errors.median() <= median, name
        assert errors.quantile(0.99) <= p99, name


def test_a_wrong_rope_table_would_be_seen(golden8, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with the plain table everywhere, attention is far out of its limits."""
    frequencies = reference.rope_frequencies
    monkeypatch.setattr(reference, "rope_frequencies", lambda config, compressed: frequencies(config, False))
    notes = run_layers_on_golden_inputs(golden8)
    errors = relative_error(notes["layer4_attn_out"][0], golden8.tensors[f"hidden/{PROMPT}/layer4_attn_out"])
    assert errors.quantile(0.9) > 0.03
