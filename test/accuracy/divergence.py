"""Where two answers to one question part, and how sure the model was there, by the offline engine in exact mode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from samples import Sample
from tokenizers import Tokenizer

from sglang_ced.engine.offline import OfflineEngine


@dataclass(frozen=True)
class Divergence:
    """token: how many tokens of the answer are the same. baseline, candidate: the next one in each. gap: between the
    two best log-probabilities there. best: the token of the best one.
    """

    id: str
    token: int
    baseline: str
    candidate: str
    best: str
    gap: float


class Judge:
    """Computes what the answers were chosen from, without a server and without a cache."""

    def __init__(self, model: Path) -> None:
        self.engine = OfflineEngine.from_pretrained(model, max_requests=1, max_tokens=8192)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.end = self.tokenizer.id_to_token(self.engine.config.eos_token_ids[0])

    def first_divergence(self, baseline: Sample, candidate: Sample) -> Divergence:
        """Both of one prompt, with outputs that differ. Raises ValueError if they do not, or come from a chat."""
        if not baseline.prompt or baseline.output == candidate.output:
            raise ValueError(f"question {baseline.id}: no two different texts after one prompt")
        one, two = (self._encode(sample.output + self.end) for sample in (baseline, candidate))
        same = next(i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b)
        request = self.engine.start(self._encode(baseline.prompt) + one[:same])
        try:
            best = self.engine.prefill(request)[-1].log_softmax(-1).topk(2)
        finally:
            self.engine.finish(request)
        words = [self.tokenizer.decode([int(i)], skip_special_tokens=False) for i in (one[same], two[same])]
        first = self.tokenizer.decode([int(best.indices[0])], skip_special_tokens=False)
        return Divergence(baseline.id, same, *words, first, float(best.values[0] - best.values[1]))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids
