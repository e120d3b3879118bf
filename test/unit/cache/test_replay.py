"""The replay plan against slow, obvious models of what depends on what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ced.cache.replay import plan_replay


def warm_rows_are_exact(start: int, decoder_start: int, hit: int, window: int, encoder: int, decoder: int) -> bool:
    """Whether the row at `hit` comes out as in a cold run, if rows below `start` (`decoder_start`) do not run.

    A layer's output at t is right if all its inputs in [t - window + 1, t] are; one below the first row run is not.
    """
    right = [position >= start for position in range(hit + 1)]
    for layer in range(encoder + decoder):
        if layer >= encoder:
            right = [ok and position >= decoder_start for position, ok in enumerate(right)]
        right = [all(right[max(0, t - window + 1) : t + 1]) for t in range(hit + 1)]
    return right[hit]


@given(
    hit=st.integers(0, 40),
    new=st.integers(1, 8),
    window=st.integers(1, 6),
    encoder=st.integers(1, 4),
    decoder=st.integers(1, 4),
)
def test_exact_replay_is_enough_and_no_more(hit: int, new: int, window: int, encoder: int, decoder: int) -> None:
    plan = plan_replay("exact", hit, hit + new, hit + new - 1, window, encoder, decoder)
    assert 0 <= plan.start <= plan.decoder_start <= hit
    assert warm_rows_are_exact(plan.start, plan.decoder_start, hit, window, encoder, decoder)
    if plan.start > 0 and window > 1:
        assert not warm_rows_are_exact(plan.start + 1, plan.decoder_start, hit, window, encoder, decoder)
    if plan.decoder_start > 0 and window > 1:
        assert not warm_rows_are_exact(plan.start, plan.decoder_start + 1, hit, window, encoder, decoder)


def test_halo_of_the_released_model() -> None:
    """40 layers of window 128: the decoder needs the encoder's exact rows below its own halo, so the halves add up."""
    plan = plan_replay("exact", 100_000, 100_001, 100_000, 128, 20, 20)
    assert 100_000 - plan.start == 40 * 127
    assert 100_000 - plan.decoder_start == 20 * 127


@given(hit=st.integers(0, 600), new=st.integers(1, 600), window=st.integers(1, 128))
def test_bounded_replay_runs_the_last_window_of_the_hit_and_of_the_prompt(hit: int, new: int, window: int) -> None:
    prompt = hit + new
    plan = plan_replay("bounded", hit, prompt, prompt - 1, window, 20, 20)
    replayed = [t for t in range(hit) if t >= plan.start]
    assert replayed == list(range(hit))[-window:]
    decoded = [t for t in range(plan.start, prompt) if t >= plan.decoder_start]
    assert decoded == list(range(plan.start, prompt))[-window:]


@given(hit=st.integers(0, 60), new=st.integers(1, 60), wanted=st.integers(0, 59))
def test_bounded_replay_decodes_every_row_whose_output_is_wanted(hit: int, new: int, wanted: int) -> None:
    prompt = hit + new
    plan = plan_replay("bounded", hit, prompt, min(hit + wanted, prompt - 1), 8, 2, 2)
    assert plan.decoder_start <= min(hit + wanted, prompt - 1)


@given(hit=st.integers(0, 600), new=st.integers(1, 600))
def test_encoder_replay_alone_trims_no_decoder_row(hit: int, new: int) -> None:
    plan = plan_replay("encoder", hit, hit + new, hit + new - 1, 128, 20, 20)
    assert plan.start == plan.decoder_start == plan_replay("bounded", hit, hit + new, hit + new - 1, 128, 20, 20).start


@given(prompt=st.integers(1, 16))
def test_a_cold_prompt_within_the_window_is_not_trimmed(prompt: int) -> None:
    plan = plan_replay("bounded", 0, prompt, prompt - 1, 16, 20, 20)
    assert plan == plan_replay("exact", 0, prompt, prompt - 1, 16, 20, 20)


def test_a_hit_of_the_whole_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="a hit of 8 tokens leaves no row"):
        plan_replay("bounded", 8, 8, 7, 4, 2, 2)
