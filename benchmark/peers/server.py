"""Our server, started as a user would, and a streaming client of it."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmark.peers.point import Measured, Point

START_TIMEOUT = 300
REQUEST_TIMEOUT = 1800


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(checkpoint: Path, threads: int, requests: int, tokens: int, log: Path) -> Iterator[str]:
    """A running server's address; stopped at the end. Raises RuntimeError, naming the log, if it does not start."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(checkpoint)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-running-requests", str(requests)]
    command += ["--max-total-tokens", str(tokens)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        address = f"http://127.0.0.1:{port}"
        try:
            _wait(address, process, log)
            yield address
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + START_TIMEOUT
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}: see {log}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not answer within {START_TIMEOUT} s: see {log}")


def measure(address: str, point: Point, seed: int) -> Measured:
    """`point.batch` streaming requests at once, whose prompts share no prefix with earlier ones of other seeds."""
    draw = random.Random(seed)
    prompts = [draw.choices(range(3, 250), k=point.prompt) for _ in range(point.batch)]
    arrivals: list[list[float]] = [[] for _ in prompts]
    errors: list[Exception] = []

    def ask(prompt: list[int], times: list[float]) -> None:
        try:
            times.extend(_stream(address, prompt, point.output))
        except Exception as error:  # told in the thread that waits
            errors.append(error)

    threads = [threading.Thread(target=ask, args=pair) for pair in zip(prompts, arrivals, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    first = sum(times[0] for times in arrivals) / point.batch
    steps = sum((times[-1] - times[0]) / (point.output - 1) for times in arrivals) / point.batch
    return Measured(first, steps)


def _stream(address: str, prompt: list[int], output: int) -> list[float]:
    """Seconds from the request to each event. Raises RuntimeError if tokens are missing."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": output, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    request = urllib.request.Request(
        f"{address}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start, times, tokens = time.perf_counter(), [], 0
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - start)
                tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
    if tokens != output:
        raise RuntimeError(f"{tokens} tokens came, {output} were asked for")
    return times
