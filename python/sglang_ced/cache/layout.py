"""Bytes of every kind of state, from the config alone. Allocation, sizing, tests and docs read them here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from sglang_ced.config import CedConfig
from sglang_ced.formats import Record

# How global KV and index keys are stored: packed as the publisher does, or the same values as bfloat16, for comparison.
KvFormat = Literal["published", "bfloat16"]
KV_FORMATS: tuple[KvFormat, ...] = get_args(KvFormat)

# How many of its newest tokens a request may take back (rejected drafts): what the rings keep beyond need.
RING_SLACK = 8
# Rows of pairs kept per request: the newest pair and what may be taken back, rounded up to a power of two.
PENDING_RING = 16


@dataclass(frozen=True)
class CacheLayout:
    """Record formats and sizes of one model's caches.

    kv_format: of global KV and index keys; windows are stored as e4m3 in both. Raises ValueError for another word.
    """

    config: CedConfig
    kv_format: KvFormat = "published"

    def __post_init__(self) -> None:
        if self.kv_format not in KV_FORMATS:
            raise ValueError(f"KV format: {self.kv_format!r} is not one of {', '.join(KV_FORMATS)}")

    @cached_property
    def global_record(self) -> Record:
        return Record(self.config.head_dim, "global" if self.kv_format == "published" else "global_bf16")

    @cached_property
    def index_record(self) -> Record:
        return Record(self.config.index_head_dim, "index" if self.kv_format == "published" else "index_bf16")

    @cached_property
    def window_record(self) -> Record:
        return Record(self.config.head_dim, "window")

    @property
    def sources(self) -> tuple[int, ...]:
        """Layers that own global KV."""
        return self.config.kv_source_layer_ids

    def ratio(self, source: int) -> int:
        """Tokens per group of a source layer."""
        return self.config.compress_ratios[source]

    @property
    def global_bytes_per_token(self) -> float:
        """Global KV and index keys of all sources; the released schedule takes 890.0, as bfloat16 3200.0."""
        per_group = self.global_record.nbytes + self.index_record.nbytes
        return sum(per_group / self.ratio(source) for source in self.sources)

    @property
    def ring_capacity(self) -> int:
        """Positions per request in the window ring."""
        return self.config.sliding_window + RING_SLACK

    @property
    def window_bytes_per_slot(self) -> int:
        """Window ring of one request, all layers, tags included."""
        tags = 2 * 8 * self.ring_capacity
        return self.config.num_hidden_layers * self.ring_capacity * self.window_record.nbytes + tags

    @property
    def pair_sources(self) -> tuple[int, ...]:
        """Sources whose groups are pairs of tokens."""
        return tuple(source for source in self.sources if self.ratio(source) == 2)

    @property
    def pending_bytes_per_slot(self) -> int:
        """Unpaired halves of one request: float32 (kv, gate) per pair source, tags included."""
        return PENDING_RING * (len(self.pair_sources) * 2 * self.config.head_dim * 4 + 8)
