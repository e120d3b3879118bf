"""What replay costs and saves, counted per step."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sglang_ced.cache.step import Step


@dataclass
class ReplayStats:
    """Counters over any number of steps; `+=` adds another's.

    rows: rows that ran; new_rows of them wrote global KV, replay_rows rebuilt windows. decoder_rows: rows that went
    on into the decoder layers; trimmed_rows did not. hits: requests that began on cached tokens; hit_tokens: how
    many. layer_rows: rows times layers; replay_layer_rows: the part of replay rows. ring_rows_read: window rows of
    earlier steps, each with its tag checked;
    stale_rows of them were not the request's own.
    """

    forwards: int = 0
    rows: int = 0
    new_rows: int = 0
    replay_rows: int = 0
    decoder_rows: int = 0
    trimmed_rows: int = 0
    hits: int = 0
    hit_tokens: int = 0
    layer_rows: int = 0
    replay_layer_rows: int = 0
    ring_rows_read: int = 0
    stale_rows: int = 0

    @classmethod
    def of(cls, step: Step, encoder_layers: int, decoder_layers: int) -> ReplayStats:
        """Counters of one step."""
        replayed = sum(max(0, p.span.prefix - p.start) for p in step.spans)
        replay_decoded = sum(max(0, p.span.prefix - p.decoder_first) for p in step.spans)
        rows, decoded = step.num_rows, len(step.decoder.rows)
        hits = [p.span.prefix for p in step.spans if p.fresh and p.span.prefix]
        return cls(
            forwards=1,
            rows=rows,
            new_rows=rows - replayed,
            replay_rows=replayed,
            decoder_rows=decoded,
            trimmed_rows=rows - decoded,
            hits=len(hits),
            hit_tokens=sum(hits),
            layer_rows=rows * encoder_layers + decoded * decoder_layers,
            replay_layer_rows=replayed * encoder_layers + replay_decoded * decoder_layers,
            ring_rows_read=len(step.encoder.prior_rows) + len(step.decoder.prior_rows),
        )

    @property
    def replay_share(self) -> float:
        """Part of all layer rows that replay took, 0 to 1."""
        return self.replay_layer_rows / self.layer_rows if self.layer_rows else 0.0

    @property
    def trimmed_share(self) -> float:
        """Part of all rows that the decoder did not run, 0 to 1."""
        return self.trimmed_rows / self.rows if self.rows else 0.0

    def __iadd__(self, other: ReplayStats) -> ReplayStats:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self
