"""The report of what has moved in SGLang (tools/pin_watch.py)."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
from tools import pin_watch
from tools.pin_watch import Finding, Place

from sglang_ced.plugin import seams


@pytest.fixture(scope="module")
def places() -> dict[str, Place]:
    return pin_watch.places()


def test_every_seam_of_the_pinned_version_has_a_place(places: dict[str, Place]) -> None:
    assert set(places) == {seam.target for seam in seams.SEAMS}
    assert all(place.file.endswith(".py") and place.digest for place in places.values())


def test_nothing_has_moved_against_oneself(places: dict[str, Place]) -> None:
    assert {finding.state for finding in pin_watch.findings(places)} == {"same"}


def test_moved_changed_and_missing_seams_are_told_apart(
    places: dict[str, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved, changed, gone = (seam.target for seam in seams.SEAMS[:3])
    before = dict(places)
    before[moved] = dataclasses.replace(places[moved], line=places[moved].line + 1)
    before[changed] = dataclasses.replace(places[changed], digest="another")
    broken = dataclasses.replace(seams.SEAMS[2], path=seams.SEAMS[2].path + "Gone")
    table = (*seams.SEAMS[:2], broken, *seams.SEAMS[3:])
    monkeypatch.setattr(seams, "SEAMS", table)
    monkeypatch.setattr(pin_watch.seams.check_seams, "__defaults__", (None, table))
    states = {finding.target: finding.state for finding in pin_watch.findings(before)}
    assert (states[moved], states[changed], states[broken.target]) == ("moved", "changed", "misfit")
    assert gone not in states
    assert set(states.values()) == {"moved", "changed", "misfit", "same"}


def test_the_expected_version_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Path(seams.__file__).read_text()
    copy = tmp_path / "seams.py"
    copy.write_text(before)
    monkeypatch.setattr(pin_watch.seams, "__file__", str(copy))
    with contextlib.suppress(KeyboardInterrupt), pin_watch.expected_version("9.9.9"):
        assert 'EXPECTED_VERSION = "9.9.9"' in copy.read_text()
        raise KeyboardInterrupt
    assert copy.read_text() == before


def test_a_report_names_what_to_read() -> None:
    found = [Finding("a.b", "changed", "x.py:3, was x.py:1"), Finding("c.d", "misfit", "c.d: not found")]
    text = pin_watch.report(found, "1", "2", (False, "1 failed"))
    assert "1 no longer fit, 1 changed, 0 moved, 0 are the same" in text
    assert "`a.b`: x.py:3, was x.py:1" in text
    assert "Server test: FAILED" in text
