"""The error of this room."""

from __future__ import annotations


class BenchError(ValueError):
    """A trace, a tool or a run that cannot be used; the message says which, and what to do."""
