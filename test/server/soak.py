"""A soak of the server: busy random clients for minutes, every sampled token held against the offline engine.

`make soak MINUTES=30`. The pool is small, so requests are evicted, retracted and aborted all the time. While the
clients run, the oracle follows the server's trace. At the end the pools must be as at the start and the memory of
the server's processes flat. The last line is one JSON object; the exit code is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import psutil

import sglang_ced
from sglang_ced.cache.replay import MODES
from sglang_ced.engine.offline import OfflineEngine

sys.path.insert(0, str(Path(__file__).parent))
from oracle import TIE, Mirror
from servers import Server
from traffic import Traffic

PAGE, CONTEXT, POOL = 16, 1000, 4096
RETRACT_EVERY = "17"  # forwards, by SGLang's own switch for tests
IDLE_SECONDS = 5
RSS_GROWTH = 1.02  # last third of the time over the first
ARGUMENTS = (
    *("--page-size", str(PAGE), "--chunked-prefill-size", "128", "--enable-mixed-chunk", "--enable-metrics"),
    *("--max-total-tokens", str(POOL), "--max-running-requests", "8", "--context-length", str(CONTEXT)),
)
MODE_ARGUMENTS = {
    "bounded": (),
    "exact": ("--no-swa-bounded-replay",),
    "encoder": ("--no-enable-decoder-swa-bounded-replay",),
}


class Watcher(threading.Thread):
    """Takes the trace in as it grows, and the resident memory of the server's processes every second."""

    def __init__(self, server: Server, mirror: Mirror) -> None:
        super().__init__(daemon=True)
        self.server, self.mirror, self.stopped = server, mirror, threading.Event()
        self.memory: list[int] = []
        self.failure: BaseException | None = None
        self._leader = psutil.Process(server.process.pid)

    def run(self) -> None:
        try:
            with self.server.trace.open() as trace:
                rest = ""
                while True:
                    last = self.stopped.is_set()
                    *lines, rest = (rest + trace.read()).split("\n")
                    self.mirror.follow(lines)
                    if last:
                        return
                    self.memory.append(self._resident())
                    self.stopped.wait(1)
        except BaseException as error:
            self.failure = error

    def _resident(self) -> int:
        return sum(process.memory_info().rss for process in (self._leader, *self._leader.children(recursive=True)))


def growth(memory: Sequence[int]) -> float:
    """Mean of the last third over that of the first, warm-up left out."""
    third = max(1, len(memory) // 3)
    return mean(memory[-third:]) / mean(memory[:third])


def soak(minutes: float, clients: int, replay: str, seed: int, folder: Path) -> dict[str, object]:
    model = Path(sglang_ced.__file__).parent / "assets" / "ced-toy"
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": RETRACT_EVERY}
    server = Server(model, folder / "log.txt", (*ARGUMENTS, *MODE_ARGUMENTS[replay]), env=environment, traced=True)
    try:
        server.wait_ready()
        engine = OfflineEngine.from_pretrained(
            model, replay=replay, page_size=PAGE, max_tokens=8 * POOL, max_requests=32
        )
        mirror = Mirror(engine)
        watcher = Watcher(server, mirror)
        traffic = Traffic(server.url, seed=seed, max_prompt=CONTEXT - 60, max_new=48, aborts=0.2)
        watcher.start()
        began = time.monotonic()
        traffic.run(clients, seconds=60 * minutes)
        seconds = time.monotonic() - began
        watcher.stopped.set()
        watcher.join()
        if watcher.failure is not None:
            raise watcher.failure
        time.sleep(IDLE_SECONDS)
        # SGLang counts free slots and pages whenever it is idle, and stops at a leak.
        leaks = server.output().count("memory leak detected")
        flushed = server.post("/flush_cache").status_code == 200  # refused while any request holds anything
        metrics, report = server.metrics(), mirror.close()
        for prompt, output in traffic.answers:
            mirror.check_answer(prompt, output)
    finally:
        left = server.stop()
    result = {
        "replay": replay,
        "seconds": round(seconds),
        "requests": traffic.sent,
        "aborted": traffic.aborted,
        "retractions": traffic.retractions,
        "hits": report.hits,
        "replay_rows": int(metrics["replay_rows_total"]),
        "stale_rows": int(metrics["stale_rows_total"]),
        "checked": report.checked,
        "ties": report.ties,
        "tie_bound": TIE,
        "wrong": len(report.wrong),
        "errors": len(traffic.errors),
        "pools_free": flushed,
        "leaks": leaks,
        "rss_growth": round(growth(watcher.memory), 4),
        "processes_left": len(left),
    }
    for line in (*report.wrong[:10], *traffic.errors[:10], *left):
        print(line, file=sys.stderr)
    bad = result["wrong"] or result["errors"] or result["stale_rows"] or left or not flushed or leaks
    result["ok"] = not bad and growth(watcher.memory) < RSS_GROWTH
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--replay", choices=MODES, default="bounded")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # the server is then stopped as well
    with tempfile.TemporaryDirectory() as folder:
        result = soak(given.minutes, given.clients, given.replay, given.seed, Path(folder))
    print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
