"""Sphinx settings. Build with `make docs`; the pages come out in build/docs."""

import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "sglang-ced"
author = "the sglang-ced authors"
copyright = f"2026, {author}"
release = importlib.metadata.version("sglang-ced")

extensions = ["myst_parser", "tables"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_ext"]

html_theme = "furo"
html_title = f"sglang-ced {release}"
html_copy_source = False
