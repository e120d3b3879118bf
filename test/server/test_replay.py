"""Bounded replay under every kind of request, counted, and in one forward for many hits."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import requests
import torch
from oracle import after_hit
from traffic import prompt_ids

from sglang_ced.engine.offline import OfflineEngine

if TYPE_CHECKING:
    from servers import Server

PAGE, WINDOW, ENCODER, DECODER = 16, 128, 4, 4
CLOSE = {"rtol": 0, "atol": 2e-6}  # SGLang takes log-probabilities in another order of sums
LAUNCH = {
    "traced": True,
    "arguments": (
        *("--page-size", str(PAGE), "--chunked-prefill-size", "512", "--max-total-tokens", "16384"),
        *("--enable-metrics", "--enable-streaming-session", "--enable-session-radix-cache"),
        *("--return-hidden-states-mode", "last"),
        # SGLang's flags for its own replay say nothing new here.
        *("--enable-encoder-swa-bounded-replay", "--enable-decoder-swa-bounded-replay"),
    ),
}


def primed(server: Server, prompt: list[int], hit: int) -> None:
    """Leave the first `hit` tokens in the cache, and nothing else."""
    assert server.post("/flush_cache").status_code == 200
    if hit:
        server.generate(prompt[: hit + 1], 1)


# -- metrics ---------------------------------------------------------------------------------------------------


def test_counters_have_the_values_worked_out_by_hand(server: Server) -> None:
    prompt = prompt_ids(300, 1)
    primed(server, prompt, 0)
    start = server.metrics()

    def since(before: dict[str, float]) -> dict[str, float]:
        return {name: value - before[name] for name, value in server.metrics().items()}

    server.generate(prompt, 1)
    cold = since(start)
    layer_rows = 300 * ENCODER + WINDOW * DECODER
    expected = {"forwards": 1, "rows": 300, "new_rows": 300, "replay_rows": 0, "hits": 0, "hit_tokens": 0}
    expected |= {"decoder_rows": WINDOW, "trimmed_rows": 300 - WINDOW, "layer_rows": layer_rows}
    expected |= {"replay_layer_rows": 0, "ring_rows_read": 0, "stale_rows": 0}
    assert {name: cold[f"{name}_total"] for name in expected} == expected
    record = 64 + 2  # one byte for each of 64 values, one for the scale of each 32
    assert cold["window_bytes_not_cached_total"] == 300 * (ENCODER + DECODER) * record
    assert cold["rows_per_forward_sum"] == 300

    start = server.metrics()
    server.generate(prompt, 1)
    warm, hit = since(start), 288
    expected = {"forwards": 1, "new_rows": 300 - hit, "replay_rows": WINDOW, "hits": 1, "hit_tokens": hit}
    expected |= {"decoder_rows": WINDOW, "trimmed_rows": 300 - hit, "stale_rows": 0}
    expected |= {"replay_layer_rows": WINDOW * ENCODER + (hit - (300 - WINDOW)) * DECODER}
    assert {name: warm[f"{name}_total"] for name in expected} == expected
    assert 0 < server.metrics()["ring_occupancy"] <= 1


def test_metrics_carry_the_labels_of_sglang(server: Server) -> None:
    lines = requests.get(f"{server.url}/metrics", timeout=60).text.splitlines()

    def labels(name: str) -> str:
        return next(line for line in lines if line.startswith(name + "{")).partition("{")[2].partition("}")[0]

    assert labels("sglang_ced:replay_rows_total") == labels("sglang:num_running_reqs")


def test_a_prefill_is_logged_beside_the_line_of_sglang(server: Server) -> None:
    prompt = prompt_ids(200, 2)
    primed(server, prompt, 64)
    server.generate(prompt, 1)
    expected = (
        "Prefill replay, #hit: 1, #hit-token: 64, #replay-row: 64, #new-row: 136, #decoder-row: 128, #trimmed-row: 72"
    )
    deadline = time.monotonic() + 20  # SGLang's line comes when it handles the result, maybe after the answer is out
    while time.monotonic() < deadline:
        lines = [line for line in server.output().splitlines() if "Prefill" in line]  # not those of other processes
        ours = [i for i, line in enumerate(lines) if expected in line]
        following = lines[ours[0] + 1 : ours[0] + 3] if len(ours) == 1 else []
        if len(following) == 2 and "Prefill engram" in following[0] and "Prefill batch" in following[1]:
            return
        time.sleep(0.2)
    pytest.fail(f"not one line on replay, one on n-gram memory and SGLang's, in this order: {lines[-4:]}")


def test_hits_of_one_batch_take_one_forward(server: Server, check_trace: Any) -> None:
    """Which requests share a batch is for SGLang to say; test_scripted.py makes it eight."""
    shared = prompt_ids(400, 3)
    prompts = [shared + prompt_ids(5 + i, 50 + i) for i in range(8)]
    primed(server, [*shared, 10], 400)
    assert server.post("/pause_generation", mode="in_place").status_code == 200
    start, lines = server.metrics(), len(server.output().splitlines())
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.generate, prompt, 4) for prompt in prompts]
        time.sleep(1)
        assert server.post("/continue_generation").status_code == 200
        outputs = [answer.result()["output_ids"] for answer in answers]
    assert server.metrics()["hits_total"] - start["hits_total"] == 8
    log = "".join(server.output().splitlines()[lines:])
    batches = log.count("Prefill batch")
    assert log.count("Prefill replay") == batches < 8
    check_trace(server, list(zip(prompts, outputs, strict=True)), PAGE)


# -- kinds of requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "hit", "start"),
    [(300, 0, 0), (300, 0, 250), (300, 160, 160), (300, 160, 299), (1200, 0, 100), (1200, 160, 400), (1200, 0, 1199)],
)
def test_logprobs_equal_the_offline_engine(
    server: Server, bounded: OfflineEngine, length: int, hit: int, start: int
) -> None:
    """Of the whole prompt or from an offset, cold and after a hit, in one chunk of 512 and over several."""
    prompt = prompt_ids(length, 4)
    primed(server, prompt, hit)
    answer = server.generate(prompt, 3, return_logprob=True, logprob_start_len=start)
    meta = answer["meta_info"]
    assert meta["cached_tokens"] == hit
    tokens, logits = after_hit(bounded, prompt, 3, hit, outputs_from=start)
    assert answer["output_ids"] == tokens
    expected = logits.log_softmax(-1)[torch.arange(len(logits)), torch.tensor(prompt[start + 1 :] + tokens)]
    entries = meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]
    torch.testing.assert_close(torch.tensor([entry[0] for entry in entries]), expected, **CLOSE)
    assert [entry[1] for entry in entries] == prompt[start + 1 :] + tokens


def test_logprobs_of_one_request_leave_others_trimmed(server: Server) -> None:
    prompts = [prompt_ids(400, 60), prompt_ids(401, 61)]
    primed(server, prompts[0], 0)
    start = server.metrics()
    server.generate(prompts[0], 1, return_logprob=True, logprob_start_len=0)
    server.generate(prompts[1], 1)
    assert server.metrics()["decoder_rows_total"] - start["decoder_rows_total"] == 400 + WINDOW


@pytest.mark.parametrize(("length", "hit"), [(300, 0), (300, 160), (1200, 0)])
def test_last_hidden_states_give_the_logits(server: Server, bounded: OfflineEngine, length: int, hit: int) -> None:
    prompt = prompt_ids(length, 5)
    primed(server, prompt, hit)
    answer = server.post("/v1/completions", prompt=prompt, max_tokens=1, temperature=0, return_hidden_states="last")
    assert answer.status_code == 200, answer.text
    hidden = torch.tensor(answer.json()["choices"][0]["hidden_states"], dtype=torch.bfloat16)
    _, logits = after_hit(bounded, prompt, 1, hit)
    torch.testing.assert_close(bounded.model.logits(hidden.view(1, -1)), logits, rtol=0, atol=0)


def test_full_hidden_states_are_refused_by_name(server: Server) -> None:
    answer = server.post("/generate", input_ids=prompt_ids(20), return_hidden_states=True)
    assert answer.status_code == 400
    assert "--return-hidden-states-mode full" in answer.text


def test_several_samples_of_one_prompt(server: Server, check_trace: Any) -> None:
    prompt = prompt_ids(180, 6)
    primed(server, prompt, 0)
    sampling = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True, "n": 3}
    answers = server.post("/generate", input_ids=prompt, sampling_params=sampling).json()
    assert len(answers) == 3
    check_trace(server, [(prompt, answer["output_ids"]) for answer in answers], PAGE)


@pytest.mark.parametrize("hit", [0, 96])
def test_no_new_token_and_one(server: Server, bounded: OfflineEngine, hit: int) -> None:
    prompt = prompt_ids(180, 7)
    primed(server, prompt, hit)
    scored = server.generate(prompt, 0, return_logprob=True, logprob_start_len=hit)
    assert scored["output_ids"] == []
    _, logits = after_hit(bounded, prompt, 1, hit, outputs_from=hit)
    expected = logits.log_softmax(-1)[torch.arange(179 - hit), torch.tensor(prompt[hit + 1 :])]
    found = torch.tensor([entry[0] for entry in scored["meta_info"]["input_token_logprobs"][1:]])
    torch.testing.assert_close(found, expected, **CLOSE)
    primed(server, prompt, hit)
    answer = server.generate(prompt, 1)
    assert answer["meta_info"]["cached_tokens"] == hit
    assert answer["output_ids"] == after_hit(bounded, prompt, 1, hit)[0]


def test_adapters_are_refused_by_name(server: Server) -> None:
    answer = server.post("/generate", input_ids=prompt_ids(20), lora_path="adapter")
    assert answer.status_code == 400
    assert "LoRA adapter 'adapter'" in answer.text
    assert server.post("/load_lora_adapter", lora_name="adapter", lora_path="adapter").status_code == 400


# -- sessions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [True, False])
def test_turns_of_a_session_equal_the_offline_engine(server: Server, check_trace: Any, streaming: bool) -> None:
    """A streaming session keeps its slot, and with it its windows, over turns."""
    opened = server.post("/open_session", capacity_of_str_len=4000, streaming=streaming)
    assert opened.status_code == 200
    session, text, answers, rid = json.loads(opened.text), [], [], None
    for turn in range(4):
        new = prompt_ids(90 + turn, 70 + turn)
        answer = server.generate(new, 6, session_params={"id": session, "rid": rid})
        rid = answer["meta_info"]["id"] if not streaming else None
        answers.append((text + new, answer["output_ids"]))
        text = text + new + answer["output_ids"]
        assert answer["meta_info"]["prompt_tokens"] == len(answers[-1][0])
    assert server.post("/close_session", session_id=session).status_code == 200
    check_trace(server, answers, PAGE)


def test_requests_of_a_radix_session_equal_the_offline_engine(server: Server, check_trace: Any) -> None:
    text, answers = [], []
    for turn in range(3):
        text = text + prompt_ids(90 + turn, 80 + turn)
        answer = server.generate(text, 6, session_id="a session")
        answers.append((text, answer["output_ids"]))
        text = text + answer["output_ids"]
        assert (answer["meta_info"]["cached_tokens"] > 0) == (turn > 0)
    check_trace(server, answers, PAGE)


# -- last: the pool is as it was at the start ------------------------------------------------------------------


def test_nothing_is_held_at_the_end(server: Server) -> None:
    assert server.post("/flush_cache").status_code == 200
