"""How global KV is stored changes no bit of what is computed: values are rounded before either format holds them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_ced.cache.global_kv import GlobalKv
from sglang_ced.engine.offline import OfflineEngine

REPLAYS = ["exact", "bounded", "encoder"]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Below a pair, at the window and past it, and long enough that top-k leaves most groups out."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (1, 2, 15, 33, 64, 130)]


def cold_and_warm(engine: OfflineEngine, prompt: list[int], hit: int, chunks: tuple[int, ...] = ()) -> list[Tensor]:
    """Logits of a cold prefill, of one that begins on the first `hit` tokens of it, and of a step of both."""
    first = engine.start(prompt)
    cold = engine.prefill(first, chunks)
    second = engine.start(prompt, prefix_of=first, hit=hit)
    warm = engine.prefill(second, chunks)
    for request in (first, second):
        request.tokens.append(7)
    return [cold, warm, *engine.step([(first, 1), (second, 1)])]


def latents(pool: GlobalKv, source: int) -> Tensor:
    return pool.layout.global_record.decode(pool.kv[source])


def index_keys(pool: GlobalKv, source: int) -> Tensor:
    return pool.layout.index_record.decode(pool.index[source])


@pytest.mark.parametrize("replay", REPLAYS)
@pytest.mark.parametrize("chunks", [(), (1, 64), (13,)])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logits_are_the_same_in_both_formats(
    make_engine, ids, replay: str, chunks: tuple[int, ...], kernels: str
) -> None:
    options = {"replay": replay, "kernels": kernels}
    published = cold_and_warm(make_engine(**options), ids(150), 90, chunks)
    plain = cold_and_warm(make_engine(kv_format="bfloat16", **options), ids(150), 90, chunks)
    for a, b in zip(published, plain, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("replay", REPLAYS)
def test_tokens_of_a_batch_are_the_same_in_both_formats(make_engine, prompts, replay: str) -> None:
    tokens = [
        make_engine(replay=replay, kv_format=kv_format).generate(prompts, 20, chunk=19, stop=[])
        for kv_format in ("published", "bfloat16")
    ]
    assert tokens[0] == tokens[1]


def test_both_pools_hold_the_same_values(make_engine, ids) -> None:
    """And not the same bytes: the flag is felt."""
    states = []
    for kv_format in ("published", "bfloat16"):
        engine = make_engine(kv_format=kv_format)
        engine.prefill(engine.start(ids(100)))
        states.append(engine.state)
    packed, plain = (state.global_kv for state in states)
    assert plain.nbytes == 4096 * states[1].layout.global_bytes_per_token > 3 * packed.nbytes
    for source in packed.kv:
        for values in (latents, index_keys):
            assert values(packed, source).any()
            assert torch.equal(values(packed, source), values(plain, source))
