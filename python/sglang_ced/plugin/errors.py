"""The one error that stops a launch."""

from __future__ import annotations


class PluginError(RuntimeError):
    """The launch cannot go on. The message names the cause and what to do about it."""
