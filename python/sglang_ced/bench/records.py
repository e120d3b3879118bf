"""What a run leaves: a line for each request (`requests.jsonl`) and what it was run under (`run.json`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_ced.bench.errors import BenchError
from sglang_ced.bench.trace import Trace

RUN, REQUESTS = "run.json", "requests.jsonl"


@dataclass(frozen=True)
class Record:
    """One request. Times in seconds; start: since the first request of the run. input, output, cached: tokens, as the
    server counts them; replayed: rows that were run again to rebuild windows; None where it is not known."""

    session: str
    turn: int
    start: float
    ttft: float
    e2e: float
    input: int
    output: int
    cached: int | None
    replayed: int | None


@dataclass(frozen=True)
class Run:
    """One replay of a trace by `agents` agents at once.

    name: of the configuration. arguments: the server's. repeat: 0, 1, ... of the same. counters: what the server's own
    counters grew by. memory: bytes, see Server.memory. conditions: machine, commit, versions. key: all that decides
    what was measured; a finished run with the same key is not repeated.
    """

    name: str
    agents: int
    repeat: int
    arguments: list[str]
    trace: dict[str, Any]
    conditions: dict[str, Any]
    seconds: float
    counters: dict[str, float]
    memory: dict[str, float]
    key: dict[str, Any]
    records: list[Record] = field(default_factory=list, repr=False)

    def save(self, directory: Path) -> None:
        """Write both files; run.json last, which makes the run count as finished."""
        lines = [json.dumps(asdict(record)) + "\n" for record in self.records]
        (directory / REQUESTS).write_text("".join(lines), encoding="utf-8")
        about = {key: value for key, value in asdict(self).items() if key != "records"}
        part = directory / f"{RUN}.part"
        part.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        part.rename(directory / RUN)

    @classmethod
    def load(cls, directory: Path) -> Run:
        """A finished run. Raises BenchError if it is none."""
        try:
            about = json.loads((directory / RUN).read_text(encoding="utf-8"))
            lines = (directory / REQUESTS).read_text(encoding="utf-8").splitlines()
            return cls(**about, records=[Record(**json.loads(line)) for line in lines])
        except (OSError, TypeError, ValueError) as error:
            raise BenchError(f"{directory} is no finished run: {error}") from None


def load_runs(directories: Iterable[Path]) -> list[Run]:
    """All finished runs at or below each. Raises BenchError, naming the directory, if one has none."""
    runs = []
    for directory in directories:
        found = sorted(directory.rglob(RUN))
        if not found:
            raise BenchError(f"no finished run in {directory}")
        runs += [Run.load(file.parent) for file in found]
    return runs


def read_aiperf(directory: Path, trace: Trace, template: int = 0) -> list[Record]:
    """Records of a replay from what aiperf wrote, in the order of the trace; `replayed` is left open.

    template: tokens that a server may add to a prompt. Raises BenchError if a request failed, is missing, or did not
    have the lengths of the trace.
    """
    file = directory / "profile_export.jsonl"
    if not file.is_file():
        raise BenchError(f"aiperf left no {file}: see {directory / 'logs'}")
    raw = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    failed = [row for row in raw if row.get("error")]
    if failed:
        error = failed[0]["error"]
        raise BenchError(f"{len(failed)} of {len(raw)} requests failed, the first with {str(error)[:300]}: see {file}")
    begin = min((row["metadata"]["request_start_ns"] for row in raw), default=0)
    found = {(r.session, r.turn): r for r in (_record(row, begin) for row in raw)}
    wanted = {(request.session, request.turn): request for request in trace.requests}
    if found.keys() != wanted.keys() or len(raw) != len(wanted):
        raise BenchError(f"{file} has {len(raw)} requests, the trace {len(wanted)}: the run was cut short")
    for key, request in wanted.items():
        got = found[key]
        if not 0 <= got.input - request.input <= template or got.output != request.output:
            raise BenchError(
                f"session {got.session!r}, turn {got.turn}: {got.input} tokens in and {got.output} out, and not "
                f"{request.input} and {request.output} as in the trace"
            )
    return [found[key] for key in wanted]


def _record(row: dict[str, Any], begin: int) -> Record:
    metadata, metrics = row["metadata"], row["metrics"]

    def metric(name: str) -> Any:
        return metrics[name]["value"] if name in metrics else None

    try:
        return Record(
            session=metadata["conversation_id"],
            turn=metadata["turn_index"],
            start=(metadata["request_start_ns"] - begin) / 1e9,
            ttft=metrics["time_to_first_token"]["value"] / 1e3,
            e2e=metrics["request_latency"]["value"] / 1e3,
            input=metrics["usage_prompt_tokens"]["value"],
            output=metrics["usage_completion_tokens"]["value"],
            cached=metric("usage_prompt_cache_read_tokens"),
            replayed=None,
        )
    except KeyError as error:
        raise BenchError(
            f"session {metadata['conversation_id']!r}, turn {metadata['turn_index']}: no {error}: "
            "the server must count tokens (usage) in streams"
        ) from None
