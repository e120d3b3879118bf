"""The bundled model does what README says: each line of its table, asked over the chat endpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import sglang_ced
from sglang_ced.cli.models import bundled_path

if TYPE_CHECKING:
    from servers import Server

README = Path(sglang_ced.__file__).parents[2] / "README.md"
LINE = re.compile(r"^\| (.*) \| `(.*)` \| `(.*)` \|$", re.MULTILINE)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_fox", "parameters": SCHEMA}}


def examples() -> list[tuple[str, str]]:
    """(asked, answered) of the table of skills."""
    table = README.read_text(encoding="utf-8").split("| skill | asked | answered |")[1].split("\n\n")[0]
    return [(asked, answered) for _, asked, answered in LINE.findall(table)]


@pytest.fixture(scope="module")
def model() -> Path:
    return bundled_path("ced-tiny")


def test_the_table_has_an_example_of_each_skill_but_tools_and_chat() -> None:
    assert len(examples()) == 5


@pytest.mark.parametrize(("asked", "answered"), examples())
def test_an_example_is_answered_as_printed(server: Server, asked: str, answered: str) -> None:
    body = {"messages": [{"role": "user", "content": asked}], "max_tokens": 40, "temperature": 0}
    choice = server.post("/v1/chat/completions", **body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (answered, "stop")


def test_the_tool_call_of_the_readme_is_as_printed(server: Server) -> None:
    text = README.read_text(encoding="utf-8")
    body = json.loads(next(body for body in re.findall(r"-d '(\{.*?\})'\n", text, re.DOTALL) if '"tools"' in body))
    (call,) = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["tool_calls"]
    function = call["function"]
    assert f'`"name":"{function["name"]}","arguments":{json.dumps(function["arguments"])}`' in text


def test_an_easy_tool_is_called_and_its_result_told(server: Server) -> None:
    messages = [{"role": "user", "content": "Use get_fox with city Oslo"}]
    body = {"messages": messages, "tools": [TOOL], "max_tokens": 80, "temperature": 0}
    message = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_fox", {"city": "Oslo"})
    body["messages"] = [*messages, message, {"role": "tool", "tool_call_id": call["id"], "content": "lamp"}]
    answer = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert answer["content"] == "The result is lamp."
