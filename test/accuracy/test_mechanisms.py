"""Faults and ablations do something: a control that changes nothing would control nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ablate
import pytest
import torch
from torch import Tensor

import sglang_ced
from sglang_ced.engine.offline import OfflineEngine

MODEL = Path(sglang_ced.__file__).parent / "assets" / "ced-toy"
SERVER = Path(__file__).parents[1] / "server"
PROMPT = [3 + (7 * i * i + 11 * i) % 400 for i in range(200)]


def logits_of(engine: OfflineEngine) -> Tensor:
    return engine.prefill(engine.start(PROMPT), all_rows=True)


@pytest.fixture(scope="module")
def healthy() -> Tensor:
    return logits_of(OfflineEngine.from_pretrained(MODEL))


@pytest.mark.parametrize("mechanism", ablate.MECHANISMS)
def test_an_ablation_changes_answers_and_nothing_does_not(mechanism: str, healthy: Tensor) -> None:
    engine = OfflineEngine.from_pretrained(MODEL)
    ablate.MECHANISMS[mechanism](engine)
    assert torch.equal(logits_of(engine), healthy) == (mechanism == "none")


def test_the_newest_groups_are_all_groups_while_there_are_few(healthy: Tensor) -> None:
    """Without the indexer, rows with no more groups than it may pick see what they saw before."""
    engine = OfflineEngine.from_pretrained(MODEL)
    ablate.indexer(engine)
    few = engine.config.index_topk
    changed = (logits_of(engine) != healthy).any(-1)
    assert not changed[:few].any()
    assert changed[few:].any()


# A fault patches modules for good, so it gets a process of its own: a request that leaves its rows in a ring, another
# one in the same slot, prefilled and decoded, and one that hits its first 128 tokens. Biases are not 0 in the toy.
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import faults, torch
from safetensors.torch import save_file
if sys.argv[3] != "-":
    faults.FAULTS[sys.argv[3]]()
from sglang_ced.engine.offline import OfflineEngine
engine = OfflineEngine.from_pretrained(sys.argv[2], max_requests=2)
prompt = [3 + (7 * i * i + 11 * i) % 400 for i in range(200)]
before = engine.start(prompt[::-1])
engine.prefill(before)
engine.finish(before)
donor = engine.start(prompt)
cold = [engine.prefill(donor)]
for token in range(3, 30):
    donor.tokens.append(token)
    cold += engine.step([(donor, 1)])
warm = engine.prefill(engine.start(prompt, donor, 128))
save_file({"cold": torch.cat(cold), "warm": warm}, sys.argv[4])
"""


def outcome(fault: str, folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    file = folder / "logits.safetensors"
    subprocess.run([sys.executable, "-c", SCRIPT, str(SERVER), str(MODEL), fault, str(file)], check=True, timeout=120)
    return load_file(file)


@pytest.fixture(scope="module")
def without_fault(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return outcome("-", tmp_path_factory.mktemp("healthy"))


@pytest.mark.parametrize(
    ("fault", "changed"),
    [
        ("one_row_short", "warm"),
        ("no_replay", "warm"),
        ("window_short", "cold"),
        ("window_without_newest", "cold"),
        ("stale_row", "cold"),
        ("ties_reversed", "cold"),
        ("router_bias_weighs", "cold"),
    ],
)
def test_a_fault_changes_logits(fault: str, changed: str, without_fault: dict[str, Tensor], tmp_path: Path) -> None:
    broken = outcome(fault, tmp_path)
    assert not torch.equal(broken[changed], without_fault[changed])
    if changed == "warm":
        assert torch.equal(broken["cold"], without_fault["cold"]), "the fault lies in hits alone"
