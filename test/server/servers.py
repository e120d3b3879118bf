"""Real servers: started on a free port in their own session, stopped by SIGTERM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import openai
import psutil
import pytest
import requests

READY_SECONDS = 240
STOP_SECONDS = 60


class Server:
    """One launch of SGLang with `arguments` after the model path. traced: through launcher.py, with a trace.

    Servers under test are strict: a window row that is not the request's own stops them. (So does SGLang at a leak of
    its pools: it counts them whenever it is idle.)
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        arguments: Sequence[str] = (),
        command: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
        env: dict[str, str] | None = None,
        traced: bool = False,
    ) -> None:
        self.log, self.port, self.trace = log, _free_port(), log.with_suffix(".jsonl")
        env = {"CED_STRICT": "1"} | (env or {})
        if traced:
            command = (sys.executable, str(Path(__file__).with_name("launcher.py")))
            env["CED_TEST_TRACE"] = str(self.trace)
        self.url = f"http://127.0.0.1:{self.port}"
        words = [*command, "--model-path", str(model), "--port", str(self.port), *arguments]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, env=os.environ | env, start_new_session=True
            )

    def wait_ready(self) -> Server:
        """Return once the server answers requests. Fails with the end of its log if it does not."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if "The server is fired up and ready to roll!" in self.output():
                return self
            time.sleep(0.5)
        pytest.fail(f"the server did not start:\n{self.output()[-4000:]}")

    def wait_exit(self) -> int:
        """Exit code of a launch that is expected to stop by itself."""
        try:
            return self.process.wait(READY_SECONDS)
        except subprocess.TimeoutExpired:
            self.stop()
            pytest.fail(f"the launch went on:\n{self.output()[-4000:]}")

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def stop(self) -> list[str]:
        """Stop by SIGTERM; the processes of this server that are still there after a while, which are then killed."""
        members = _session(self.process.pid)
        self.process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(members, timeout=STOP_SECONDS)
        names = [" ".join(process.cmdline()) or process.name() for process in left if process.is_running()]
        for process in left:
            process.kill()
        self.process.wait(STOP_SECONDS)
        return names

    def post(self, path: str, **body: object) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=300)

    def generate(self, prompt: Sequence[int], new: int, **more: object) -> dict:
        """Greedy `/generate` of token ids, not stopped by EOS."""
        sampling = {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        answer = self.post("/generate", input_ids=list(prompt), sampling_params=sampling, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metrics(self) -> dict[str, float]:
        """Our metrics by name: value of the one series of each."""
        lines = requests.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        ours = [line.rsplit(" ", 1) for line in lines if line.startswith("sglang_ced:")]
        return {series.partition("{")[0].removeprefix("sglang_ced:"): float(value) for series, value in ours}

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _session(leader: int) -> list[psutil.Process]:
    """Every process of the session that `leader` leads."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                found.append(process)
        except ProcessLookupError:
            continue
    return found
