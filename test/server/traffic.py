"""Random requests as busy clients send them: sessions that branch and go on, aborts, prompt logprobs."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import requests


def prompt_ids(length: int, seed: int = 0) -> list[int]:
    """Ids of ordinary byte tokens."""
    draw = random.Random(seed)
    return [draw.randrange(10, 250) for _ in range(length)]


@dataclass
class Traffic:
    """Clients of one server. max_prompt, max_new: tokens of a request. aborts: part of the requests that are aborted,
    half of them by `/abort_request` and half by hanging up. priorities: send them."""

    url: str
    seed: int = 0
    max_prompt: int = 500
    max_new: int = 24
    aborts: float = 0.15
    logprobs: float = 0.1
    priorities: bool = False
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    sent: int = 0
    aborted: int = 0
    retractions: int = 0
    cached_tokens: int = 0
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock, self._texts = threading.Lock(), [prompt_ids(40, self.seed)]
        self._stopped = False

    def run(self, clients: int, count: int | None = None, seconds: float | None = None) -> None:
        """Send `count` requests, or for `seconds`, from as many clients at a time."""
        end = None if seconds is None else time.monotonic() + seconds
        more = self._counter(count, end)

        def client(number: int) -> None:
            draw, http = random.Random(f"{self.seed} {number}"), requests.Session()
            while more():
                self._one(draw, http)

        with ThreadPoolExecutor(clients) as pool:
            try:
                list(pool.map(client, range(clients)))
            except BaseException:
                self._stopped = True
                raise

    def _counter(self, count: int | None, end: float | None) -> Callable[[], bool]:
        def more() -> bool:
            with self._lock:
                late = end is not None and time.monotonic() > end
                if self._stopped or late or (count is not None and self.sent >= count):
                    return False
                self.sent += 1
                return True

        return more

    def _prompt(self, draw: random.Random) -> list[int]:
        """A new text, or an earlier one: repeated, cut and gone on with another way, or gone on with."""
        with self._lock:
            base = draw.choice(self._texts)
        kind = draw.random()
        if kind < 0.25:
            base = []
        elif kind < 0.6:
            base = base[: draw.randrange(len(base))]
        more = 0 if kind > 0.9 else draw.choice((1, 5, 30, 120, self.max_prompt))
        prompt = base + [draw.randrange(10, 250) for _ in range(draw.randint(0, more))]
        return prompt[: self.max_prompt] or [20]

    def _one(self, draw: random.Random, http: requests.Session) -> None:
        prompt, new = self._prompt(draw), draw.randint(1, self.max_new)
        rid = f"{draw.getrandbits(64):x}"
        body = {
            "rid": rid,
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        }
        if draw.random() < self.logprobs:
            body |= {"return_logprob": True, "logprob_start_len": draw.randrange(len(prompt))}
        if self.priorities:
            body["priority"] = draw.randrange(3)
        if draw.random() < self.aborts:
            self._abort(body, draw, http)
            return
        answer = http.post(f"{self.url}/generate", json=body, timeout=300)
        with self._lock:
            if answer.status_code != 200:
                self.errors.append(f"{answer.status_code} {answer.text[:300]}")
                return
            found = answer.json()
            output, meta = found["output_ids"], found["meta_info"]
            if meta["finish_reason"]["type"] != "length" or len(output) != new:
                self.errors.append(f"{meta['finish_reason']} after {len(output)} of {new} tokens")
            self.retractions += meta.get("num_retractions", 0)
            self.cached_tokens += meta["cached_tokens"]
            if output:
                self.answers.append((prompt, output))
                self._keep(prompt + output)

    def _abort(self, body: dict, draw: random.Random, http: requests.Session) -> None:
        delay = draw.random() * 0.3
        if draw.random() < 0.5:
            with contextlib.suppress(requests.Timeout):
                requests.post(f"{self.url}/generate", json=body, timeout=0.02 + delay)
        else:
            timer = threading.Timer(
                delay, lambda: requests.post(f"{self.url}/abort_request", json={"rid": body["rid"]}, timeout=60)
            )
            timer.start()
            http.post(f"{self.url}/generate", json=body, timeout=300)
            timer.join()
        with self._lock:
            self.aborted += 1
            self._keep(body["input_ids"])  # what it has left in the cache will be hit

    def _keep(self, text: list[int]) -> None:
        self._texts.append(text)
        if len(self._texts) > 40:
            self._texts.pop(0)
