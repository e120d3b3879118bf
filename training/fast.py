"""`reference.py` made quick enough to train with: the same functions, evaluated for whole batches of short texts.

What differs from the reference, and is held equal to it by `test/training/test_fast.py`:

- attention is one dense masked product over all keys instead of a gather per token (quick up to a thousand tokens);
- the small functions of the hyper-connections are compiled;
- floors of bounded replay may differ from text to text.

What is new: the indexer's own loss. Which groups are picked has no gradient, so its scores are taught to follow the
attention that the layer pays (KL divergence, gradients stop at its inputs), as DeepSeek's sparse attention does. And
guidance, at the start of training: a fact's tokens are to look at whom it is about, an answer at where the fact was
told or at the n-gram it is known by. A deep network and a batch this small take long to find that out by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from sglang_ced import formats, reference
from sglang_ced.config import CedConfig
from sglang_ced.reference import Attention, MoE, Numerics, Reference, Shared, rope_frequencies, rotate

HIDDEN = -1e30
QUICK = Numerics(
    fake_quant=False,
    storage=torch.float32,
    accumulate=torch.float32,
    partial_sums=False,
    softmax_block=1 << 30,
)


@dataclass
class Guidance:
    """Where attention is to look, bool [B, T, T] each: row, position.

    sources: where a row's next token is to be read (by the decoder, in global KV). subjects: what the row speaks of (by
    the layers with the window alone). cues: the end of the n-gram by which the next token is known (by the encoder, in
    its windows, from the first layer with n-gram memory on). The lists are filled in by the layers.
    """

    sources: Tensor
    subjects: Tensor
    cues: Tensor
    at_sources: list[Tensor] = field(default_factory=list)
    at_subjects: list[Tensor] = field(default_factory=list)
    at_cues: list[Tensor] = field(default_factory=list)

    def loss(self) -> Tensor:
        """-log of the share of attention paid to each, of the head that pays it most over the batch; summed."""
        every = (looks for looks in (self.at_sources, self.at_subjects, self.at_cues) if looks)
        best = (torch.cat(looks, 1).mean(0).max() for looks in every if len(looks[0]))
        return -torch.stack([torch.zeros(()), *best]).sum()


@dataclass
class Lesson:
    """What one forward of a training step adds to `Shared`.

    sparse: attend to the indexer's groups only; else to all. teach_readers: scores follow the attention of all layers
    that read what is chosen by them, not just of the one that chooses. teach_at: bool [B, T], rows that count as much
    to the indexer's loss as all others do; None = no row does. engram, global_kv: False = the model does without.
    encoder_floor, decoder_floor: int64 [B] or None.
    index_scores, index_losses: filled in by the layers.
    """

    sparse: bool = True
    teach_indexer: bool = False
    teach_readers: bool = False
    teach_at: Tensor | None = None
    engram: bool = True
    global_kv: bool = True
    encoder_floor: Tensor | None = None
    decoder_floor: Tensor | None = None
    guidance: Guidance | None = None
    index_scores: dict[int, Tensor] = field(default_factory=dict)
    index_losses: list[Tensor] = field(default_factory=list)
    window_masks: dict[bool, Tensor] = field(default_factory=dict)


class FastAttention(Attention):
    """Attention over dense masked keys. `lesson` is set by `FastReference` for each forward."""

    lesson: Lesson

    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        c, num, tokens = self.config, self.numerics, x.shape[1]
        positions = torch.arange(tokens, device=x.device)
        freq = rope_frequencies(c, compressed=self.plan.ratio > 0)
        q_lora = self.q_norm(self.wq_a(x))
        q = rotate(self.wq_b(q_lora).unflatten(-1, (c.num_attention_heads, c.head_dim)), positions, freq)
        keys = num.quant(formats.fake_quant_e4m3, rotate(self.kv_norm(self.wkv(x)), positions, freq))
        mask = self._window_mask(x.shape[0], tokens)
        guidance = self.lesson.guidance
        if guidance and not self.plan.ratio:
            guidance.at_subjects.append(looks_at(q, keys, mask, guidance.subjects))
        if guidance and not self.plan.is_decoder and self.plan.index >= self.config.engram_layer_ids[0]:
            guidance.at_cues.append(looks_at(q, keys, mask, guidance.cues))
        if self.plan.ratio:
            allowed = self._allowed(x, q, q_lora, positions, freq, shared)
            latents = shared.latents[self.plan.kv_source or 0]
            if not self.lesson.global_kv:
                allowed = torch.full_like(allowed, HIDDEN)
            elif guidance and self.plan.is_decoder:
                guidance.at_sources.append(looks_at(q, latents, allowed, guidance.sources))
            keys = torch.cat((keys, latents), 1)
            mask = torch.cat((mask, allowed.expand(x.shape[0], -1, -1)), 2)
        out = dense_attention(q, keys, mask, self.attn_sink)
        return self.wo_b(self._project_groups(rotate(out, positions, freq, inverse=True)))

    def _window_mask(self, batch: int, tokens: int) -> Tensor:
        """float32 [B, T, T]: 0 = in the window, above the row's floor."""
        lesson, half = self.lesson, self.plan.is_decoder
        if half not in lesson.window_masks:
            row, key = torch.arange(tokens)[:, None], torch.arange(tokens)
            seen = ((key <= row) & (key > row - self.config.sliding_window)).expand(batch, -1, -1)
            floor = lesson.decoder_floor if half else lesson.encoder_floor
            if floor is not None:
                floor = floor[:, None, None]
                seen = seen & ((row < floor) | (key >= floor))
            lesson.window_masks[half] = torch.where(seen, 0.0, HIDDEN)
        return lesson.window_masks[half]

    def _allowed(self, x: Tensor, q: Tensor, q_lora: Tensor, positions: Tensor, freq: Tensor, shared: Shared) -> Tensor:
        """float32 [B or 1, T, G]: 0 = the row attends to this group."""
        plan, lesson = self.plan, self.lesson
        if plan.owns_kv:
            latents = self.compressor(x)
            first = torch.arange(latents.shape[1]) * plan.ratio
            shared.index_keys[plan.index] = self.indexer.keys(latents.detach(), first, freq)
            rotated = rotate(latents, first, freq)
            shared.latents[plan.index] = self.numerics.quant(formats.fake_quant_e2m1_e4m3, rotated)
        keys = shared.index_keys[plan.kv_source or 0]
        visible = (positions + 1) // plan.ratio
        hidden = torch.arange(keys.shape[1]) >= visible[:, None]
        if not (lesson.sparse or lesson.teach_indexer):
            return torch.where(hidden, HIDDEN, 0.0)[None]
        if plan.owns_selection:
            scores = self.indexer.scores(x.detach(), q_lora.detach(), keys, positions, freq)
            lesson.index_scores[plan.index] = scores
        if lesson.teach_indexer:
            latents = shared.latents[plan.kv_source or 0].detach()
            for scores in self._taught():
                lesson.index_losses.append(index_loss(scores, q.detach(), latents, hidden, lesson.teach_at))
        if plan.owns_selection:
            scores = lesson.index_scores[plan.index]
            shared.selected[plan.index] = self._selection(scores.detach(), hidden, visible, shared)
        if not lesson.sparse:
            return torch.where(hidden, HIDDEN, 0.0)[None]
        return shared.selected[plan.index_source or 0]

    def _taught(self) -> list[Tensor]:
        """The scores that are to follow this layer's attention: those that choose for it, and for their candidates."""
        plan, scores = self.plan, self.lesson.index_scores
        if not self.lesson.teach_readers:
            return [scores[plan.index]] if plan.owns_selection else []
        candidates = self.config.layers[plan.index_source or 0].candidate_source
        return [scores[source] for source in (plan.index_source, candidates) if source is not None]

    def _selection(self, scores: Tensor, hidden: Tensor, visible: Tensor, shared: Shared) -> Tensor:
        """float32 [B, T, G]: 0 for the groups that the reference would pick."""
        c = self.config
        scores = scores.masked_fill(hidden, -torch.inf)
        if self.plan.candidate_source is not None:
            scores = scores.masked_fill(~shared.candidates[self.plan.candidate_source], -torch.inf)
        elif self.plan.index == c.candidate_source_layer_id:
            shared.candidates[self.plan.index] = reference.candidate_groups(
                scores, visible, c.candidate_topk_blocks, c.candidate_block_size
            )
        groups = reference.top_groups(scores, c.index_topk)
        allowed = torch.full((*scores.shape[:2], scores.shape[2] + 1), HIDDEN)
        allowed.scatter_(2, torch.where(groups < 0, scores.shape[2], groups), 0.0)
        return allowed[..., :-1]


def dense_attention(q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor) -> Tensor:
    """q [B, T, H, D], keys [B, K, D] (also the values), mask float32 [B, T, K], sink [H] -> [B, T, H, D].

    The sink is one more key, which only the head's own extra dimension sees, and whose value is zero.
    """
    batch, tokens, heads, dim = q.shape
    scale, extra = dim**-0.5, -heads % 8 + heads
    marks = torch.eye(heads, extra).expand(batch, tokens, -1, -1)
    q = torch.cat((q, marks), -1).transpose(1, 2)
    sink_key = F.pad(sink / scale, (dim, extra - heads)).expand(batch, 1, -1)
    keys = torch.cat((F.pad(keys, (0, extra)), sink_key), 1).unsqueeze(1).expand(-1, heads, -1, -1)
    mask = F.pad(mask, (0, 1)).unsqueeze(1)
    out = F.scaled_dot_product_attention(q, keys, keys, attn_mask=mask, scale=scale)
    return out[..., :dim].transpose(1, 2)


def index_loss(
    scores: Tensor, q: Tensor, latents: Tensor, hidden: Tensor, teach_at: Tensor | None = None, every: int = 4
) -> Tensor:
    """KL divergence of the indexer's distribution from the heads' mean attention over groups: the mean over every 4th
    row, plus the mean over the rows `teach_at`.

    scores [B, T, G], q [B, T, H, D], latents [B, G, D], hidden bool [T, G].
    """
    regular = torch.zeros(scores.shape[:2], dtype=torch.bool)
    regular[:, every - 1 :: every] = True
    regular &= ~hidden.all(-1)
    loss = _divergence(scores, q, latents, hidden, regular).mean()
    if teach_at is not None and (rows := teach_at & ~hidden.all(-1)).any():
        loss = loss + _divergence(scores, q, latents, hidden, rows).mean()
    return loss


def _divergence(scores: Tensor, q: Tensor, latents: Tensor, hidden: Tensor, rows: Tensor) -> Tensor:
    """The divergence in each of the rows, bool [B, T] -> [N]."""
    text, row = rows.nonzero(as_tuple=True)
    with torch.no_grad():
        attention = torch.cat([q[i, rows[i]].flatten(0, 1) @ latents[i].T for i in range(len(q))])
        attention = attention.unflatten(0, (-1, q.shape[2])) * q.shape[-1] ** -0.5
        target = attention.masked_fill(hidden[row, None], HIDDEN).softmax(-1).mean(1)
    log = scores[text, row].masked_fill(hidden[row], HIDDEN).log_softmax(-1)
    return (target * (target.clamp_min(1e-9).log() - log)).masked_fill(hidden[row], 0.0).sum(-1)


def looks_at(q: Tensor, keys: Tensor, mask: Tensor, sources: Tensor) -> Tensor:
    """log of the share of its attention to these keys that a head pays to the sources: [N, H], N rows that have any.

    q [B, T, H, D]; keys [B, K, D]; mask float32 [B or 1, T, K], 0 = seen; sources bool [B, T, K].
    """
    text, row = sources.any(-1).nonzero(as_tuple=True)
    scores = torch.einsum("nhd,nkd->nhk", q[text, row], keys[text]) * q.shape[-1] ** -0.5
    log = (scores + mask.expand_as(sources)[text, row][:, None]).log_softmax(-1)
    return log.masked_fill(~sources[text, row][:, None], HIDDEN).logsumexp(-1)


class FastMoE(MoE):
    """MoE that remembers how many tokens each expert got."""

    last_load: Tensor

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights = super().route(x)
        self.last_load = chosen.flatten().bincount(minlength=self.config.n_routed_experts).float()
        return chosen, weights


class FastReference(Reference):
    """`Reference` with FastAttention. `lesson` None = sparse, no floors, no indexer loss."""

    def __init__(self, config: CedConfig, token_map: Tensor, numerics: Numerics = QUICK) -> None:
        super().__init__(config, token_map, numerics)
        for block in self.layers:
            block.attn.__class__ = FastAttention
            block.ffn.__class__ = FastMoE

    def hidden(self, ids: Tensor, lesson: Lesson | None = None) -> Tensor:
        """Final normed states [B, T, d], before the head."""
        lesson = lesson or Lesson()
        for block in self.layers:
            block.attn.lesson = lesson
        streams, pre_mix, shared = self.start(ids)
        for layer, block in enumerate(self.layers):
            if lesson.engram:
                streams = self.engram(layer, streams, shared)
            streams, pre_mix = block(streams, pre_mix, shared)
        return self.norm(reference.collapse(streams, pre_mix, self.numerics))


def compile_small_functions() -> None:
    """Compile the hyper-connections: many tiny operations over all streams. Needs a C++ compiler."""
    for owner, name in (
        (reference.HyperConnection, "forward"),
        (reference, "expand"),
        (reference, "collapse"),
    ):
        setattr(owner, name, torch.compile(getattr(owner, name), dynamic=False))
