"""Servers under test, and the offline engines that their answers are held against."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import sglang_ced
from sglang_ced.cache.replay import Replay
from sglang_ced.engine.offline import OfflineEngine

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside this one
from oracle import Report, mirror_of
from servers import Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything below this folder is marked `server`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.server)


@pytest.fixture(scope="session")
def model() -> Path:
    """The checkpoint that comes with the package."""
    return Path(sglang_ced.__file__).parent / "assets" / "ced-toy"


@pytest.fixture(scope="session")
def exact(model: Path) -> OfflineEngine:
    """The same checkpoint without a server: what an exact server's answers must equal, token by token."""
    return OfflineEngine.from_pretrained(model, max_tokens=16384, page_size=2)


@pytest.fixture(scope="session")
def bounded(model: Path) -> OfflineEngine:
    """The same for a server with bounded replay; see oracle.py for what its answers depend on."""
    return OfflineEngine.from_pretrained(model, replay="bounded", max_tokens=16384, page_size=2)


@pytest.fixture(scope="session")
def check_trace(model: Path) -> Callable[..., Report]:
    """Hold a traced server's answers, (prompt, output) each, against the offline engine; fails on a wrong token."""

    def check(
        server: Server, answers: Sequence[tuple[list[int], list[int]]] = (), page: int = 64, replay: Replay = "bounded"
    ) -> Report:
        engine = OfflineEngine.from_pretrained(model, replay=replay, page_size=page, max_tokens=65536, max_requests=32)
        report = mirror_of(engine, server.trace, answers)
        assert report.wrong == []
        return report

    return check


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for the tests of one module, launched as the module's LAUNCH says."""
    log = tmp_path_factory.mktemp("server") / "log.txt"
    server = Server(model, log, **getattr(request.module, "LAUNCH", {}))
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Launch a model that must not start: (exit code, output)."""

    def run(model: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
        server = Server(model, tmp_path / "log.txt", arguments, env=env)
        return server.wait_exit(), server.output()

    return run
