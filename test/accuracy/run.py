"""The accuracy gates: `python test/accuracy/run.py [collect|judge|both] [--suite tiny|quick|controls|published]`.

`collect` runs servers and lm-eval and keeps everything in --out; `judge` reads it, prints the table and ends with 0
only if every gate passed. They are two steps so that evidence can be put away before it is judged.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import gates
import report
from collect import RunError, collect, folder_of
from samples import SampleError

from sglang_ced.cli.models import bundled_path

ROOT = Path(__file__).resolve().parents[2]


def suite_of(options: argparse.Namespace) -> gates.Suite:
    """The suite that the options name."""
    if options.suite == "published":
        floors = {"gsm8k": options.gsm8k_floor, "gpqa": options.gpqa_floor}
        return gates.published(tuple(options.server_args.split()), floors, options.margin)
    return {"tiny": gates.TINY, "quick": gates.QUICK, "controls": gates.CONTROLS}[options.suite]


def judge(suite: gates.Suite, model: Path, out: Path, look: bool) -> bool:
    """Print and write the report; whether everything passed. Raises SampleError for missing or odd samples."""
    runs = report.read_runs(suite, out)
    hits = {name: json.loads((folder_of(out, name) / "run.json").read_text())["hits"] for name in runs}
    verdicts = report.judge(suite, runs, hits, model if look else None)
    text = report.markdown(suite, runs, verdicts)
    (out / "report.md").write_text(text + "\n", encoding="utf-8")
    (out / "report.json").write_text(report.machine(verdicts, {"model": model.name}), encoding="utf-8")
    print(text)
    return all(verdict.passed for verdict in verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the accuracy gates.")
    parser.add_argument("step", nargs="?", choices=("collect", "judge", "both"), default="both")
    parser.add_argument("--suite", choices=("tiny", "quick", "controls", "published"), default="tiny")
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: the bundled ced-tiny")
    parser.add_argument("--out", type=Path, help="an empty folder; default: build/accuracy/SUITE, emptied first")
    parser.add_argument("--limit", type=int, help="only the first so many questions of each task, for a look")
    published = parser.add_argument_group("published")
    published.add_argument("--margin", type=float, default=gates.MARGIN, help="of accuracy (default: %(default)s)")
    published.add_argument("--gsm8k-floor", type=float, default=0.9, help="least accuracy (default: %(default)s)")
    published.add_argument("--gpqa-floor", type=float, default=0.5, help="least accuracy (default: %(default)s)")
    published.add_argument("--server-args", default="", help="more options for every server, as one word")
    options = parser.parse_args()
    model = (options.model or bundled_path("ced-tiny")).resolve()
    out = (options.out or ROOT / "build" / "accuracy" / options.suite).resolve()
    suite = suite_of(options)
    if options.step != "judge":
        if options.out is None:
            shutil.rmtree(out, ignore_errors=True)
        elif out.is_dir() and any(out.iterdir()):
            raise ValueError(f"--out {out}: is not empty; name a new folder")
        out.mkdir(parents=True, exist_ok=True)
        collect(suite, model, out, options.limit)
    if options.step == "collect":
        return 0
    return 0 if judge(suite, model, out, look=options.suite != "published") else 1


if __name__ == "__main__":
    try:
        code = main()
    except (RunError, SampleError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)
