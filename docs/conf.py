"""Sphinx settings. Build with `make docs`; the pages come out in build/docs."""

import sys
from pathlib import Path

from sglang_ced import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "sglang-ced"
author = "the sglang-ced authors"
copyright = f"2026, {author}"
release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "api_docstrings",
    "drawings",
    "ops",
    "tables",
]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_ext"]

# Copy what one types: neither prompts nor the output after them.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"sglang-ced {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["drawings.css"]
html_favicon = "_static/favicon.svg"
