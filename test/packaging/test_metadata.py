"""Versions stand in one place for each package, and the metadata of both is whole."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata, version
from pathlib import Path
from typing import Any

import pytest
import yaml

import sgl_kernel_ext
import sglang_ced
from sglang_ced.plugin.seams import EXPECTED_VERSION

ROOT = Path(__file__).parents[2]
PROJECTS = {"sglang-ced": ROOT, "sgl-kernel-ext": ROOT / "sgl-kernel-ext"}


def project(name: str) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((PROJECTS[name] / "pyproject.toml").read_text())["project"]
    return table


@pytest.mark.parametrize("name", PROJECTS)
def test_the_version_stands_in_the_package_alone(name: str) -> None:
    assert "version" in project(name)["dynamic"]
    assert "version" not in project(name)


def test_what_is_installed_has_the_version_of_the_source() -> None:
    assert version("sglang-ced") == sglang_ced.__version__
    assert version("sgl-kernel-ext") == sgl_kernel_ext.__version__


@pytest.mark.parametrize("name", PROJECTS)
def test_metadata_tells_licence_authors_and_python(name: str) -> None:
    table = project(name)
    assert table["license"] == "Apache-2.0"
    assert table["license-files"] == ["LICENSE"]
    assert (PROJECTS[name] / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert table["requires-python"] == ">=3.11"
    assert {"description", "readme", "authors", "keywords", "classifiers"} <= set(table)


def test_the_pin_of_sglang_is_the_version_that_the_seams_expect() -> None:
    assert project("sglang-ced")["optional-dependencies"]["serve"] == [f"sglang=={EXPECTED_VERSION}"]


def test_the_kernel_package_requires_the_torch_it_was_built_for() -> None:
    required = metadata("sgl-kernel-ext").get_all("Requires-Dist") or []
    minor = re.match(r"\d+\.\d+", version("torch"))
    assert minor is not None
    assert required == [f"torch=={minor[0]}.*"]


def test_citation_is_whole() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "title", "message", "authors", "license"} <= set(cited)
    assert cited["license"] == project("sglang-ced")["license"]
    assert "version" not in cited  # it stands in the package alone
