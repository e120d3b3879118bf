"""Runs a suite: one server after the other, lm-eval against each, and everything kept in a folder before it is judged.

The folder has a subfolder for each run (one pass over the questions) with lm-eval's samples and log, and `run.json`
with what the server counted meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gates import Configuration, Suite
from samples import NO_ANSWER

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "server"))
from servers import Server

LAUNCHER = HERE.parent / "server" / "launcher.py"
COUNTED = ("forwards", "rows", "replay_rows", "hits", "hit_tokens", "stale_rows")


class RunError(RuntimeError):
    """lm-eval or a server did not do its work."""


def folder_of(out: Path, run: str) -> Path:
    """Where a run is kept."""
    return out / run.replace(", ", "-").replace(" ", "-")


def collect(suite: Suite, model: Path, out: Path, limit: int | None = None) -> None:
    """Run all configurations of `suite`. limit: only the first so many questions of each task. Raises RunError."""
    for configuration in suite.configurations:
        began = time.monotonic()
        server = _start(configuration, suite, model, out)
        try:
            _wait_ready(server)
            _say(f"{configuration.name}: server is up after {time.monotonic() - began:.0f} s")
            for number, run in enumerate(configuration.runs()):
                if number == 0 and server.post("/flush_cache").status_code != 200:
                    raise RunError(f"{run}: the cache could not be flushed")
                _pass(server, configuration, suite, model, folder_of(out, run), limit)
        finally:
            server.stop()


def _start(configuration: Configuration, suite: Suite, model: Path, out: Path) -> Server:
    log = folder_of(out, configuration.name).with_suffix(".server.log")
    arguments = ("--enable-metrics", *suite.server, *configuration.arguments)
    if configuration.fault is None:
        return Server(model, log, arguments)
    command, env = (sys.executable, str(LAUNCHER)), {"CED_TEST_FAULT": configuration.fault}
    return Server(model, log, arguments, command=command, env=env)


def _wait_ready(server: Server) -> None:
    try:
        server.wait_ready()
    except pytest.fail.Exception as error:
        raise RunError(str(error)) from None


def _pass(
    server: Server, configuration: Configuration, suite: Suite, model: Path, folder: Path, limit: int | None
) -> None:
    folder.mkdir(parents=True)
    before, began = _counts(server), time.monotonic()
    if suite.completion_tasks:
        options = f"tokenizer_backend=huggingface,tokenizer={model},tokenized_requests=False,max_length=8192"
        _lm_eval("local-completions", suite.completion_tasks, server, configuration, model, folder, limit, options)
    if suite.tool_task:
        _lm_eval("local-chat-completions-tools", (suite.tool_task,), server, configuration, model, folder, limit)
    if suite.chat_tasks:
        tasks, examples = suite.chat_tasks, suite.examples
        _lm_eval("local-chat-completions", tasks, server, configuration, model, folder, limit, examples=examples)
    after, seconds = _counts(server), time.monotonic() - began
    counts = {name: after[name] - before[name] for name in COUNTED}
    (folder / "run.json").write_text(json.dumps({"seconds": round(seconds, 1), **counts}, indent=1) + "\n")
    _say(f"{folder.name}: {seconds:.0f} s, {counts['hits']} cache hits, {counts['replay_rows']} rows replayed")


def _counts(server: Server) -> dict[str, int]:
    found = server.metrics()
    if missing := [name for name in COUNTED if f"{name}_total" not in found]:
        raise RunError(f"the server does not count {missing[0]}: does sglang-ced serve this model (ced doctor)?")
    return {name: int(found[f"{name}_total"]) for name in COUNTED}


def _lm_eval(
    kind: str,
    tasks: tuple[str, ...],
    server: Server,
    configuration: Configuration,
    model: Path,
    folder: Path,
    limit: int | None,
    options: str = "tokenizer_backend=None",
    examples: int = 0,
) -> None:
    """One call of lm-eval, with stock model classes but for tools; its samples and log go to `folder`."""
    is_chat = kind.startswith("local-chat")
    address = f"{server.url}/v1/{'chat/completions' if is_chat else 'completions'}"
    words = [sys.executable, str(HERE / "lm_eval_tools.py"), "run", "--model", kind, "--tasks", ",".join(tasks)]
    words += ["--model_args", f"model={model},base_url={address},num_concurrent={configuration.concurrency},{options}"]
    words += ["--include_path", "tasks", "--batch_size", "1", "--output_path", str(folder), "--log_samples"]
    words += ["--apply_chat_template"] * is_chat + (["--limit", str(limit)] if limit else [])
    words += ["--num_fewshot", str(examples)] if examples else []
    log = folder / f"lm-eval-{kind}.log"
    with log.open("w") as file:
        code = subprocess.run(words, cwd=HERE, env=_environment(folder.parent), stdout=file, stderr=file).returncode
    if code:
        raise RunError(f"lm-eval ended with {code}; the end of {log}:\n{log.read_text()[-2000:]}")


def _environment(out: Path) -> dict[str, str]:
    """No hub is reached. Local data sets are prepared in a cache of this run, so that none is stale."""
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    other = {"LMEVAL_MODEL_NONE_ANSWER_PLACEHOLDER": NO_ANSWER, "TOKENIZERS_PARALLELISM": "false"}
    cache = {} if "HF_HOME" in os.environ else {"HF_HOME": str(out / "huggingface")}
    return os.environ | offline | other | cache


def _say(line: str) -> None:
    print(f"==> {line}", flush=True)
