"""The wheel's requirement of torch: the minor version that it is built against, for its C++ interface is not stable."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import Any


def dynamic_metadata(field: str, settings: dict[str, Any] | None = None) -> list[str]:
    """Called by scikit-build-core for the field `dependencies`. Raises PackageNotFoundError where torch is missing."""
    if field != "dependencies" or settings:
        raise RuntimeError(
            f"torch_requirement gives `dependencies`, without settings; asked for {field!r}, {settings!r}"
        )
    major, minor = re.match(r"(\d+)\.(\d+)", version("torch")).groups()  # type: ignore[union-attr]
    return [f"torch=={major}.{minor}.*"]


def get_requires_for_dynamic_metadata(_settings: dict[str, Any] | None = None) -> list[str]:
    """What must be there to ask."""
    return ["torch"]
