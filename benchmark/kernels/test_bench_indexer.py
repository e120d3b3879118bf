"""Twin of test/kernels/test_indexer.py: scores and choice at 8K groups."""

from __future__ import annotations

import pytest
import torch

from sglang_ced.formats import Record, fake_quant_e2m1_ue8m0
from sglang_ced.kernels import cpu, indexer

HEADS, DIM, GROUPS, TOP_K = 16, 128, 8192, 512


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("kind", ["index", "index_bf16"])
def test_bench_index_scores(compare, kind, rows: int) -> None:
    q = fake_quant_e2m1_ue8m0(torch.randn(rows, HEADS, DIM).to(torch.bfloat16))
    keys, weights = Record(DIM, kind).encode(torch.randn(GROUPS, DIM)), torch.randn(rows, HEADS).to(torch.bfloat16)
    versions = (indexer.index_scores.reference, cpu.index_scores)
    macs = rows * HEADS * DIM * GROUPS
    compare(f"index_scores {kind} rows={rows}", *versions, q, weights, keys, macs=macs, nbytes=keys.nbytes)


@pytest.mark.parametrize("rows", [1, 64])
def test_bench_top_groups(compare, rows: int) -> None:
    scores = torch.randn(rows, GROUPS).to(torch.bfloat16)
    compare(f"top_groups rows={rows}", indexer.top_groups.reference, cpu.top_groups, scores, TOP_K)


@pytest.mark.parametrize("rows", [1, 64])
def test_bench_candidate_groups(compare, rows: int) -> None:
    scores, visible = torch.randn(rows, GROUPS).to(torch.bfloat16), torch.full((rows,), GROUPS)
    versions = (indexer.candidate_groups.reference, cpu.candidate_groups)
    compare(f"candidate_groups rows={rows}", *versions, scores, visible, 256, 8)


def test_bench_index_scores_at_candidates(compare) -> None:
    """One row by the candidates of a pool of 512K keys, read where they lie."""
    keys = Record(DIM, "index").encode(torch.randn(4096, DIM)).repeat(128, 1)
    q = fake_quant_e2m1_ue8m0(torch.randn(1, HEADS, DIM).to(torch.bfloat16))
    weights = torch.randn(1, HEADS).to(torch.bfloat16)
    slots = (torch.randperm(len(keys) // 8)[:2048].sort().values[:, None] * 8 + torch.arange(8)).flatten()[None]
    versions, macs = (indexer.index_scores_at.reference, cpu.index_scores_at), HEADS * DIM * slots.numel()
    compare("index_scores_at", *versions, q, weights, keys, slots, macs=macs, nbytes=slots.numel() * keys.shape[1])
