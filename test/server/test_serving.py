"""A server started with the model path alone, as its users drive it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import openai
import pytest
import requests
from oracle import after_hit
from traffic import prompt_ids

from sglang_ced.engine.offline import OfflineEngine

if TYPE_CHECKING:
    from servers import Server

CONTEXT = 8192
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Bergen"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
DSML = 508  # the token that opens tool tags


def chat(server: Server, content: Any, **more: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 12} | more
    return server.client().chat.completions.create(
        model="default", messages=[{"role": "user", "content": content}], **settings
    )


def text_of(message: Any) -> str:
    """All text of an answer, whichever parser took it."""
    return (getattr(message, "reasoning_content", None) or "") + (message.content or "")


# -- the same answers as without a server ----------------------------------------------------------------------


def test_generate_equals_the_offline_engine(server: Server, bounded: OfflineEngine) -> None:
    prompts = [prompt_ids(1), prompt_ids(127, 1), prompt_ids(128, 2), prompt_ids(300, 3)]
    answers = [server.generate(prompt, 8)["output_ids"] for prompt in prompts]
    assert answers == bounded.generate(prompts, 8, stop=[])


def test_sixteen_streams_equal_their_single_runs(server: Server, bounded: OfflineEngine) -> None:
    prompts = [prompt_ids(3 + 13 * i, 100 + i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda prompt: server.generate(prompt, 6)["output_ids"], prompts))
    assert together == bounded.generate(prompts, 6, stop=[])


def test_sixteen_streaming_chats_finish_and_equal_their_single_runs(server: Server) -> None:
    # Shorter than a window, so that hits among them change nothing.
    questions = ["More? " * (1 + i) for i in range(16)]

    def streamed(question: str) -> str:
        parts = chat(server, question, stream=True, max_tokens=5)
        return "".join(text_of(part.choices[0].delta) for part in parts if part.choices)

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(streamed, questions))
    assert together == [text_of(chat(server, question, max_tokens=5).choices[0].message) for question in questions]


def test_a_hit_equals_the_offline_engine_with_the_same_hit(server: Server, bounded: OfflineEngine) -> None:
    first = prompt_ids(200, 5)
    longer = first + prompt_ids(70, 6)
    assert server.post("/flush_cache").status_code == 200
    for prompt, hit in ((first, 0), (first, 192), (longer, 192)):  # whole pages of 64, one token at least is computed
        answer = server.generate(prompt, 6)
        assert answer["meta_info"]["cached_tokens"] == hit
        assert answer["output_ids"] == after_hit(bounded, prompt, 6, hit)[0]


def test_the_launch_says_how_it_replays(server: Server) -> None:
    assert "sglang-ced: replay bounded, window 128" in server.output()


# -- the OpenAI API --------------------------------------------------------------------------------------------


def test_health_and_model_list(server: Server) -> None:
    assert requests.get(f"{server.url}/health", timeout=60).status_code == 200
    assert len(server.client().models.list().data) == 1


def test_completion_with_echo_returns_prompt_logprobs(server: Server) -> None:
    choice = (
        server.client()
        .completions.create(
            model="default", prompt="Once upon a time", max_tokens=3, temperature=0, echo=True, logprobs=2
        )
        .choices[0]
    )
    assert choice.text.startswith("Once upon a time")
    assert len(choice.logprobs.token_logprobs) == len(choice.logprobs.tokens) > 3
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_thinking_goes_into_reasoning_content(server: Server) -> None:
    off = chat(server, "Why?").choices[0].message
    on = chat(server, "Why?", extra_body={"chat_template_kwargs": {"thinking": True}}).choices[0].message
    assert off.content
    assert not getattr(off, "reasoning_content", None)
    assert on.reasoning_content


def test_streaming_gives_the_same_text(server: Server) -> None:
    whole = chat(server, "Count!", max_tokens=20).choices[0]
    parts = [part.choices[0] for part in chat(server, "Count!", max_tokens=20, stream=True) if part.choices]
    assert "".join(text_of(part.delta) for part in parts) == text_of(whole.message)
    assert parts[-1].finish_reason == whole.finish_reason == "length"


def test_stop_string_ends_the_answer_before_it(server: Server) -> None:
    text = text_of(chat(server, "Stop", max_tokens=24).choices[0].message)
    mark = text[len(text) // 2]
    choice = chat(server, "Stop", max_tokens=24, stop=[mark]).choices[0]
    assert text_of(choice.message) == text[: text.index(mark)]
    assert choice.finish_reason == "stop"


def test_tools_enter_the_prompt(server: Server) -> None:
    plain, tools = chat(server, "Weather?"), chat(server, "Weather?", tools=[WEATHER])
    assert tools.usage.prompt_tokens > plain.usage.prompt_tokens + 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(server: Server, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    # The grammar holds these random weights to a tool call; the bias makes them open its tags by the right token.
    answer = chat(
        server,
        "Weather in Oslo?",
        tools=[WEATHER],
        tool_choice=choice,
        max_tokens=200,
        logit_bias={str(DSML): 100},
        stream=stream,
    )
    if stream:
        parts = [part.choices[0] for part in answer if part.choices]
        calls = [call.function for part in parts for call in part.delta.tool_calls or ()]
        finish = parts[-1].finish_reason
    else:
        calls = [call.function for call in answer.choices[0].message.tool_calls]
        finish = answer.choices[0].finish_reason
    assert finish == "tool_calls"
    assert [call.name for call in calls if call.name] == ["get_weather"]
    assert json.loads("".join(call.arguments for call in calls))["city"] in ("Oslo", "Bergen")


def test_penalties_and_seeds_are_accepted(server: Server) -> None:
    settings = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "n": 2}
    assert len(chat(server, "Dice", **settings).choices) == 2


# -- requests that cannot be served ----------------------------------------------------------------------------


@pytest.fixture
def lives_on(server: Server) -> Any:
    """After the test the server still answers."""
    yield
    assert len(server.generate(prompt_ids(5), 2)["output_ids"]) == 2


@pytest.mark.usefixtures("lives_on")
def test_image_in_a_chat_is_refused_by_name(server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="no vision"):
        chat(server, [{"type": "text", "text": "What is this?"}, IMAGE])


@pytest.mark.usefixtures("lives_on")
@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ({"text": "x", "image_data": "iVBORw0KGgo="}, "no vision"),
        ({"input_ids": [5, 100000]}, "100000 is outside the vocabulary of 512"),
        ({"input_ids": [5] * (CONTEXT + 1)}, f"context length ({CONTEXT} tokens)"),
        ({"text": "x", "sampling_params": {"max_new_tokens": CONTEXT}}, str(CONTEXT)),
        ({"text": "x", "return_hidden_states": True}, "hidden states"),
        ({"text": "x", "lora_path": "adapter"}, "LoRA adapter 'adapter'"),
    ],
)
def test_bad_request_is_answered_with_its_cause(server: Server, body: dict, cause: str) -> None:
    answer = server.post("/generate", **body)
    assert answer.status_code == 400
    assert cause in answer.text


@pytest.mark.usefixtures("lives_on")
def test_weights_cannot_be_replaced(server: Server, model: Any) -> None:
    answer = server.post("/update_weights_from_disk", model_path=str(model))
    assert answer.status_code == 400
    assert "start a new server" in answer.text


# -- last: nothing answers afterwards --------------------------------------------------------------------------


def test_sigterm_leaves_no_process(server: Server) -> None:
    assert server.stop() == []
