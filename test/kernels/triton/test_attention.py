"""Attention from packed records: within a step of the rounded probabilities, and nearly always the reference's bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_ced.formats import Record
from sglang_ced.kernels import attention
from sglang_ced.kernels.triton import attention as fast

Case = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]


def make_case(make_input, rows, heads, dim, window, slots, width, seed, spread=0, kind="global") -> Case:
    """(q, window, pool, keys, sink) with about a quarter of the key entries empty."""
    generator = torch.Generator().manual_seed(seed)
    pool = Record(dim, kind).encode(make_input((slots, dim), seed + 1)) if slots else None
    keys = torch.randint(-(window + slots) // 3 - 1, window + slots, (rows, width), generator=generator).clamp_min(-1)
    sink = torch.randn(heads, generator=generator)
    return make_input((rows, heads, dim), seed + 2, spread), make_input((window, dim), seed + 3), pool, keys, sink


def error_of(q: Tensor, window: Tensor, pool: Tensor | None, keys: Tensor, sink: Tensor) -> Tensor:
    """A probability is rounded to bfloat16 and may be a step away, 2^-8 of it; so may a score, by its sum's error."""
    values = window
    if pool is not None:
        values = torch.cat((window, Record(window.shape[1], "global").decode(pool)))
    values = values[keys.clamp_min(0)].double()
    dim = q.shape[-1]
    scores = torch.einsum("thd,tkd->thk", q.double(), values) * dim**-0.5
    off = torch.einsum("thd,tkd->thk", q.double().abs(), values.abs()).amax(-1) * dim**-0.5 * dim * 2.0**-23
    scores = scores.masked_fill((keys < 0).unsqueeze(1), -torch.inf)
    with_sink = torch.cat((scores, sink.double()[None, :, None].expand(len(q), -1, 1)), -1)
    share = torch.softmax(with_sink, -1)[..., :-1]
    return (2.0**-8 + 2 * off).unsqueeze(-1) * torch.einsum("thk,tkd->thd", share, values.abs())


def check(assert_near, move, case: Case) -> None:
    assert_near(fast.attend(*move(case)), attention.attend.reference(*case), error_of(*case))


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    rows=st.integers(0, 2),
    heads=st.sampled_from([1, 5, 17]),
    dim=st.sampled_from([16, 32, 48, 64]),
    window=st.integers(1, 200),
    slots=st.sampled_from([0, 1, 70]),
    width=st.integers(1, 150),
    spread=st.integers(0, 4),
    seed=st.integers(0, 2**31),
)
def test_attend_equals_reference(assert_near, make_input, move, rows, heads, dim, window, slots, width, spread, seed):
    check(assert_near, move, make_case(make_input, rows, heads, dim, window, slots, width, seed, spread))


def test_groups_may_be_stored_as_bfloat16(assert_same, make_input, move, monkeypatch) -> None:
    monkeypatch.setattr(fast, "ROWS_AT_ONCE", 2)
    packed, plain = (make_case(make_input, 3, 3, 48, 30, 70, 100, 1, kind=k) for k in ("global", "global_bf16"))
    assert_same(fast.attend(*move(plain)), fast.attend(*move(packed)))


def test_attend_equals_reference_at_the_published_width(assert_near, make_input, move) -> None:
    check(assert_near, move, make_case(make_input, 1, 16, 512, 130, 600, 192, 0))


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_attend_matches_the_publisher(golden_ops: dict[str, Tensor], move, name: str) -> None:
    """Within the limits of test/golden/data/README.md; all keys of a golden case are window rows."""
    q, kv, keys, sink, out = (golden_ops[f"sparse_attn_{name}/{part}"] for part in ("q", "kv", "idx", "sink", "out"))
    q, keys, out = q[:4], keys[:4], out[:4]
    actual = fast.attend(move(q), move(kv), None, move(keys.long()), move(sink)).cpu()
    assert (actual - out).abs().max() <= 0.01 * out.abs().max()
    assert (actual == out).float().mean() >= 0.98


def test_row_without_keys_gives_zeros(make_input, move) -> None:
    q, window, pool, keys, sink = make_case(make_input, 3, 2, 32, 10, 10, 70, 0)
    keys[1] = -1
    out = fast.attend(*move((q, window, pool, keys, sink)))
    assert not out[1].any()
    assert out[::2].any()


def test_nan_stays_in_its_head(make_input, move) -> None:
    case = make_case(make_input, 2, 6, 32, 10, 10, 70, 0)
    case[0][1, 3, 5] = torch.nan
    bad = fast.attend(*move(case)).isnan().all(-1)
    assert bad[1, 3]
    assert bad.sum() == 1


def test_a_row_does_not_depend_on_its_batch(assert_same, make_input, move) -> None:
    q, window, pool, keys, sink = move(make_case(make_input, 4, 6, 64, 100, 100, 130, 0))
    whole = fast.attend(q, window, pool, keys, sink)
    for rows in (slice(0, 1), slice(2, 4)):
        assert_same(fast.attend(q[rows], window, pool, keys[rows], sink), whole[rows])


def test_strides_do_not_matter(assert_same, make_input, move) -> None:
    q, window, pool, keys, sink = move(make_case(make_input, 3, 2, 32, 10, 10, 20, 0))
    wide = torch.zeros(10, 33, dtype=torch.bfloat16, device=q.device)
    wide[:, 1:] = window
    strided = (q.transpose(0, 1).contiguous().transpose(0, 1), wide[:, 1:], pool, keys.T.contiguous().T, sink)
    assert_same(fast.attend(*strided), fast.attend(q, window, pool, keys, sink))


def test_records_of_another_size_are_refused(make_input) -> None:
    q, window, pool, keys, sink = make_case(make_input, 3, 2, 32, 10, 10, 20, 0)
    with pytest.raises(ValueError, match="global record of 32 values takes 18 bytes"):
        fast.attend(q, window, pool[:, :17], keys, sink)
