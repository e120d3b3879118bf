"""The contracts of the ops of one room, for the reference of the Python API.

    ```{ced-ops} norm
    ```

An op is an object that is called like its reference, so autodoc cannot see its signature; this directive can.
"""

from __future__ import annotations

import importlib
import inspect

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from sglang_ced.kernels import registry


class CedOps(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        room = self.arguments[0]
        importlib.import_module(f"sglang_ced.kernels.{room}")
        found = [each for name, each in sorted(registry.OPS.items()) if name.startswith(f"{room}.")]
        if not found:
            raise self.error(f"sglang_ced.kernels.{room} has no op")
        lines = [line for each in found for line in _entry(each)]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source=__file__), self.content_offset, container)
        return container.children


def _entry(each: registry.Op[..., object]) -> list[str]:
    signature = inspect.signature(each.reference)
    text = inspect.getdoc(each.reference)
    if not text:
        raise ValueError(f"op {each.name} has no docstring, which is its contract")
    head = f"````{{py:function}} sglang_ced.kernels.{each.name}{signature}".replace("'", "")
    return [head, "", *text.splitlines(), "````", ""]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("ced-ops", CedOps)
    return {"parallel_read_safe": True}
