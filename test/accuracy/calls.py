"""Tool calls as text: one line for each, written in one way only."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any


def call_line(name: str, arguments: dict[str, Any]) -> str:
    """`name {"argument": value, ...}`, arguments by name."""
    return f"{name} {json.dumps(arguments, sort_keys=True, ensure_ascii=False)}"


def as_text(message: dict[str, Any]) -> str:
    """What an answer of /v1/chat/completions says, then its calls. Arguments that are no JSON stay as they came."""
    lines = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        name, given = call["function"]["name"], call["function"]["arguments"]
        line = f"{name} {given}"
        with suppress(json.JSONDecodeError):
            line = call_line(name, json.loads(given))
        lines.append(line)
    return "\n".join(lines)
