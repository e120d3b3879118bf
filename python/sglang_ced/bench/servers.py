"""Servers that are measured: started here, or running already. Known by HTTP, and by /proc if they are ours."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ced.bench.errors import BenchError

START_SECONDS = 600
NAME = "ced"  # by which a server started here knows its model
ARGUMENTS = ("--enable-metrics", "--enable-cache-report")
_KV_LINE = re.compile(r"KV format \w+, ([\d.]+) bytes a token")


@dataclass(frozen=True)
class Server:
    """url: without a path. model: the name that requests give. process, log: of one that was started here."""

    url: str
    model: str
    process: int | None = None
    log: Path | None = None

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics by name, those of several labels added up; empty if the server exports none."""
        try:
            text = _get(f"{self.url}/metrics", 10)
        except (urllib.error.URLError, OSError):
            return {}
        return parse_metrics(text)

    def flush(self) -> None:
        """Empty its prefix cache. Raises BenchError if the server cannot, or is busy."""
        request = urllib.request.Request(f"{self.url}/flush_cache", b"{}", {"Content-Type": "application/json"})
        for wait in (0.5, 1, 2, 4, None):
            try:
                with urllib.request.urlopen(request, timeout=30):
                    return
            except (urllib.error.URLError, OSError) as error:
                if wait is None:
                    raise BenchError(f"{self.url}/flush_cache: {error}: runs would hit what others cached") from None
                time.sleep(wait)

    def memory(self) -> dict[str, float]:
        """Bytes: `peak_rss` of all its processes added up, and `kv_per_token` as its launch said; what is known."""
        out: dict[str, float] = {}
        if self.process is not None:
            out["peak_rss"] = float(sum(_peak_rss(process) for process in _family(self.process)))
        if self.log is not None and (said := _KV_LINE.search(self.log.read_text(errors="replace"))):
            out["kv_per_token"] = float(said[1])
        return out


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as a mapping from name to the sum over labels."""
    out: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            key = name.split("{", 1)[0]
            out[key] = out.get(key, 0.0) + float(value)
    return out


def running(url: str) -> Server:
    """A server at `url`, with the first model that it serves. Raises BenchError if none answers."""
    url = url.rstrip("/")
    try:
        models = json.loads(_get(f"{url}/v1/models", 30))["data"]
    except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
        raise BenchError(f"no server answers at {url}/v1/models: {error}") from None
    return Server(url, models[0]["id"])


@contextmanager
def started(
    model: Path, arguments: Sequence[str], log: Path, threads: int | None = None, cores: Sequence[int] = ()
) -> Iterator[Server]:
    """SGLang with this package on the checkpoint `model`, on a free port of 127.0.0.1; stopped at the end.

    threads: OMP_NUM_THREADS. cores: those it may run on. Raises BenchError, naming the log, if it does not start.
    """
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *ARGUMENTS, *arguments]
    with process(command, log, model_name=NAME, threads=threads, cores=cores) as server:
        yield server


@contextmanager
def process(
    command: Sequence[str],
    log: Path,
    model_name: str,
    threads: int | None = None,
    cores: Sequence[int] = (),
    ready: str = "/health",
    environment: Mapping[str, str] | None = None,
    name_option: str = "--served-model-name",
) -> Iterator[Server]:
    """Any server that takes --host, --port and `name_option`; ready when the path `ready` answers."""
    port = free_port()
    words = [*command, "--host", "127.0.0.1", "--port", str(port)]
    if name_option:
        words += [name_option, model_name]
    env = dict(os.environ) | dict(environment or {}) | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    # OpenMP's threads wait as they do by default, as in the other benchmarks.
    env.pop("OMP_WAIT_POLICY", None)
    if cores:
        words = ["taskset", "-c", ",".join(map(str, cores)), *words]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        # A session of its own: Ctrl-C is for us, and what we start is stopped as one group.
        child = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            _wait(f"http://127.0.0.1:{port}{ready}", child, log)
            yield Server(f"http://127.0.0.1:{port}", model_name, child.pid, log)
        finally:
            _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _wait(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit:
        if child.poll() is not None:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise BenchError(f"the server ended with {child.returncode}: {''.join(last)[:300]} (see {log})")
        try:
            _get(url, 5)
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise BenchError(f"the server did not answer within {START_SECONDS} s: see {log}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(url: str, timeout: float) -> str:
    with urllib.request.urlopen(url, timeout=timeout) as answer:
        text: Any = answer.read()
    return str(text, "utf-8", "replace")


def _family(process: int) -> list[int]:
    """It and all that descend from it."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    family = [process]
    for member in family:
        family += [child for child, parent in parents.items() if parent == member]
    return family


def _peak_rss(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(peak[1]) << 10 if peak else 0
