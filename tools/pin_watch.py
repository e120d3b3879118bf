"""What of SGLang has moved since the version that the plugin was written against.

    python tools/pin_watch.py snapshot seams-old.json             in an environment with the pinned version
    python tools/pin_watch.py compare seams-old.json --report pin-watch.md --server-test     in one with another

A snapshot holds, for every seam, where its source is and a digest of it. `compare` says of each seam whether it is the
same, has moved, has changed (read it again), or no longer fits (the launch would stop). With --server-test it also
runs a server test, for which this SGLang is taken for the expected one. Ends with 1 if a seam no longer fits or the
test fails; seams that have merely changed are reported.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from sglang_ced.plugin import seams

ROOT = Path(__file__).parents[1]
SERVER_TEST = ("test/server/test_serving.py", "-m", "not slow", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Place:
    """Where a seam's source is. digest: of its text; a value that is no code has that of its module."""

    file: str
    line: int
    digest: str


@dataclass(frozen=True)
class Finding:
    """state: same, moved, changed, or misfit."""

    target: str
    state: str
    text: str


def places() -> dict[str, Place]:
    """Place of every seam that this SGLang has."""
    out = {}
    for seam in seams.SEAMS:
        try:
            out[seam.target] = _place(seam)
        except (ImportError, AttributeError):
            continue
    return out


def _place(seam: seams.Seam) -> Place:
    found = inspect.unwrap(seam.resolve())
    found = getattr(found, "__func__", found)
    module = sys.modules["sglang.srt." + seam.path.partition(":")[0]]
    try:
        lines, line = inspect.getsourcelines(found)
        file = inspect.getsourcefile(found)
    except TypeError:  # a value, such as a list of names
        lines, line, file = inspect.getsourcelines(module)[0], 0, module.__file__
    text = "".join(lines)
    return Place(str(file).rpartition("/sglang/srt/")[2], line, hashlib.sha256(text.encode()).hexdigest())


def findings(before: dict[str, Place]) -> Iterator[Finding]:
    """What has become of every seam, taking the installed version for the expected one."""
    now = places()
    misfits = dict(_misfits())
    for seam in seams.SEAMS:
        old, new = before.get(seam.target), now.get(seam.target)
        if seam.target in misfits:
            yield Finding(seam.target, "misfit", misfits[seam.target])
        elif old is None or new is None:
            yield Finding(seam.target, "changed", "it was not in the old version" if old is None else "no source")
        elif old.digest != new.digest:
            yield Finding(seam.target, "changed", f"{new.file}:{new.line}, was {old.file}:{old.line}")
        elif (old.file, old.line) != (new.file, new.line):
            yield Finding(seam.target, "moved", f"{new.file}:{new.line}, was {old.file}:{old.line}")
        else:
            yield Finding(seam.target, "same", f"{new.file}:{new.line}")


def _misfits() -> Iterator[tuple[str, str]]:
    """(seam, problem) of the plugin's own check, the version left out."""
    for problem in seams.check_seams():
        if not problem.startswith("version: "):
            yield problem.partition(":")[0], problem


@contextmanager
def expected_version(found: str) -> Iterator[None]:
    """The plugin's sources expect version `found` while this holds, and what they expected before afterwards."""
    file = Path(seams.__file__)
    text = file.read_text(encoding="utf-8")
    changed, count = re.subn(r'^EXPECTED_VERSION = ".*"$', f'EXPECTED_VERSION = "{found}"', text, flags=re.MULTILINE)
    if count != 1:
        raise RuntimeError(f"{file}: has no line EXPECTED_VERSION")
    try:
        if changed != text:
            file.write_text(changed, encoding="utf-8")
        yield
    finally:
        if changed != text:
            file.write_text(text, encoding="utf-8")


def server_test(found: str) -> tuple[bool, str]:
    """Whether the server test passes with the installed SGLang, and the end of what it says."""
    with expected_version(found):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *SERVER_TEST],
            cwd=ROOT,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    return done.returncode == 0, done.stdout[-6000:]


def report(found: list[Finding], old: str, new: str, test: tuple[bool, str] | None) -> str:
    """The report as Markdown."""
    counts = {state: sum(f.state == state for f in found) for state in ("misfit", "changed", "moved", "same")}
    lines = [
        f"# SGLang {new} against {old}",
        "",
        f"{len(found)} seams: {counts['misfit']} no longer fit, {counts['changed']} changed, {counts['moved']} moved, "
        f"{counts['same']} are the same.",
    ]
    for state, title in (("misfit", "No longer fit"), ("changed", "Changed: read them again"), ("moved", "Moved")):
        if counts[state]:
            lines += ["", f"## {title}", ""]
            lines += [f"- `{f.target}`: {f.text}" for f in found if f.state == state]
    if test is not None:
        passed, output = test
        lines += ["", f"## Server test: {'passed' if passed else 'FAILED'}", "", "```text", output.strip(), "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    snapshot = commands.add_parser("snapshot", help="write places and digests of all seams")
    snapshot.add_argument("file", type=Path)
    compare = commands.add_parser("compare", help="compare the installed SGLang with a snapshot")
    compare.add_argument("file", type=Path)
    compare.add_argument("--report", type=Path, help="write the report there too")
    compare.add_argument("--server-test", action="store_true", help="run a server test as well")
    args = parser.parse_args()
    found = version("sglang")
    if args.command == "snapshot":
        record = {"sglang": found, "seams": {name: asdict(place) for name, place in places().items()}}
        args.file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{args.file}: {len(record['seams'])} of {len(seams.SEAMS)} seams of SGLang {found}")
        return 0
    record = json.loads(args.file.read_text(encoding="utf-8"))
    all_findings = list(findings({name: Place(**place) for name, place in record["seams"].items()}))
    test = server_test(found) if args.server_test else None
    text = report(all_findings, record["sglang"], found, test)
    if args.report:
        args.report.write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(f.state == "misfit" for f in all_findings) or (test and not test[0]) else 0


if __name__ == "__main__":
    sys.exit(main())
