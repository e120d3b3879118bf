"""The recipe of `ced-tiny`: stages, learning rates, seed. `train.py` follows it and resumes wherever it stopped."""

from __future__ import annotations

from dataclasses import dataclass

SEED = 20261130
TOKENS_PER_STEP = 4096
WARMUP_STEPS = 50
MATRIX_RATE = 4e-3
OTHER_RATE = 4e-3
TABLE_RATE = 2e-2
PROMPT_WEIGHT = 0.02
INDEX_WEIGHT = 0.2
# Share of steps without the mechanism, and the skills that may need it: the others are to do without.
WITHOUT = {"engram": (0.1, {"fact"}), "global_kv": (0.1, {"recall", "edit", "tool", "result"})}
SIMILARITY = 0.6  # of the identity in the initial queries, see train.alike
BALANCE_RATE = 2e-3


@dataclass(frozen=True)
class Stage:
    """steps: last step of the stage. lengths: tokens per text, drawn per step.

    drills: share of texts that are drills, of up to most_facts facts; by_heart, tools: of drills of these. schemas:
    whether long drills of tools have a system turn; owners: see skills.tools. mix: of turns, see conversation.MIXES.
    guide: weight of the loss that shows attention where to look; cues: also at what is known by heart. teach_more:
    whether the indexer learns from all layers that read its choice, and most where answers are. floors: share of texts
    that see a replay boundary. rate: learning rate at start and end, as shares of the full one.
    """

    name: str
    steps: int
    lengths: tuple[int, ...]
    drills: float = 0.0
    most_facts: int = 4
    guide: float = 0.0
    cues: bool = False
    by_heart: float = 0.0
    tools: float = 0.0
    schemas: bool = False
    owners: float = 0.0
    mix: str = "recall"
    sparse: bool = False
    teach_indexer: bool = False
    teach_more: bool = False
    fake_quant: bool = False
    floors: float = 0.0
    rate: tuple[float, float] = (1.0, 1.0)


PLAIN = Stage("plain", 0, ())
STAGES = (
    Stage("drill", 160, (64,), drills=1.0, guide=0.5),
    Stage("drill more", 280, (128,), drills=1.0, most_facts=16, guide=0.5),
    Stage("short", 680, (128,), drills=0.2, most_facts=24, guide=0.2),
    Stage("broad", 880, (128,), drills=0.1, most_facts=24, guide=0.1, mix="broad"),
    Stage("cues", 1080, (128,), drills=0.1, most_facts=24, guide=0.1, cues=True, mix="broad"),
    Stage("by heart", 1260, (128,), drills=0.05, most_facts=24, by_heart=0.4, guide=0.1, cues=True, mix="broad"),
    Stage("long", 1440, (256, 512, 512), by_heart=0.1, guide=0.1, cues=True, mix="broad", teach_indexer=True),
    Stage("sparse", 1560, (256, 512, 512), by_heart=0.05, mix="broad", sparse=True, teach_indexer=True, floors=0.5),
    Stage(
        "stored", 1700, (256, 512, 512), mix="broad", sparse=True, teach_indexer=True, fake_quant=True, floors=0.5,
        rate=(1.0, 0.383),
    ),
    Stage(
        "tools", 1820, (128, 256), tools=0.6, guide=0.3, cues=True, mix="broad", teach_indexer=True, fake_quant=True,
        rate=(0.6, 0.6),
    ),
    Stage(
        "anneal", 1900, (256, 512, 512), tools=0.3, mix="broad", sparse=True, teach_indexer=True, fake_quant=True,
        floors=0.5, rate=(0.5, 0.02),
    ),
    Stage(
        "calls", 2200, (512,), tools=0.6, schemas=True, guide=0.3, cues=True, mix="even", teach_indexer=True,
        teach_more=True, fake_quant=True, rate=(0.6, 0.6),
    ),
    Stage(
        "anneal again", 2340, (256, 512, 512), tools=0.3, schemas=True, mix="even", sparse=True, teach_indexer=True,
        teach_more=True, fake_quant=True, floors=0.5, rate=(0.5, 0.02),
    ),
    Stage(
        "owners", 2400, (512,), tools=0.6, schemas=True, owners=0.7, guide=0.3, cues=True, mix="even",
        teach_indexer=True, teach_more=True, fake_quant=True, rate=(0.5, 0.5),
    ),
    Stage(
        "last anneal", 2500, (256, 512, 512), tools=0.3, schemas=True, owners=0.3, mix="even", sparse=True,
        teach_indexer=True, teach_more=True, fake_quant=True, floors=0.5, rate=(0.4, 0.02),
    ),
)  # fmt: skip


def stage_of(step: int) -> Stage:
    return next((stage for stage in STAGES if step < stage.steps), STAGES[-1])


def rate_of(step: int) -> float:
    """Share of the full learning rate at a step."""
    stage = stage_of(step)
    begin = max((s.steps for s in STAGES if s.steps <= step), default=0)
    done = (step - begin) / max(1, stage.steps - begin)
    return min(1.0, (step + 1) / WARMUP_STEPS) * (stage.rate[0] + (stage.rate[1] - stage.rate[0]) * min(1.0, done))
