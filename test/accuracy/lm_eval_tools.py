"""lm-eval with one more model class, for tasks whose answer is a tool call: `python lm_eval_tools.py run --model ...`.

lm-eval sends no `tools`, and of an answer it reads `content` alone, which is empty where a tool is called.
"""

from __future__ import annotations

import json
from typing import Any

from calls import as_text
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalChatCompletion


@register_model("local-chat-completions-tools")
class ToolChatCompletion(LocalChatCompletion):
    """`local-chat-completions` that sends the system message as `tools` (JSON), and gives calls as lines of text."""

    def _create_payload(self, messages: list[dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        system, *turns = messages
        payload: dict[str, Any] = super()._create_payload(turns, *args, **kwargs)
        return payload | {"tools": json.loads(system["content"])}

    def parse_generations(self, outputs: dict[str, Any] | list[dict[str, Any]], **kwargs: Any) -> list[str]:
        answers = outputs if isinstance(outputs, list) else [outputs]
        return [as_text(choice["message"]) for answer in answers for choice in answer["choices"]]


if __name__ == "__main__":
    cli_evaluate()
