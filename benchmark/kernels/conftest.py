"""What the kernel benchmarks share: each case runs as the reference and as the fast version at every CPU level.

The ratio to the reference is that of two rows of one table, so measured in one run. Threads are torch's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import sgl_kernel_ext
from sglang_ced.kernels import registry

sys.path.append(str(Path(__file__).parents[2]))  # pytest's importlib mode leaves the repository's root out

from benchmark.measure import multiply_rate, read_bandwidth

VERSIONS = ["reference", *sgl_kernel_ext.supported_cpu_capabilities()]


@pytest.fixture(scope="session")
def ceilings() -> dict[str, float]:
    """What this machine reaches: bytes per second of streaming reads, and float32 multiply-adds per second."""
    return {"bytes": read_bandwidth(), "macs": multiply_rate()}


@pytest.fixture(params=VERSIONS)
def compare(request: pytest.FixtureRequest, benchmark, ceilings: dict[str, float]) -> Iterator[Callable[..., None]]:
    """compare(group, reference, fast, *args, macs=0, nbytes=0): time one of the two, whichever turn it is.

    extra_info has the rates of what is known of the case, and each as a share of the ceiling. A product of 8-bit
    numbers may pass that of float32, and what a cache holds passes that of streaming.
    """
    version: str = request.param
    registry.activate("reference")
    if version != "reference":
        sgl_kernel_ext.force_cpu_capability(version)

    def run(group: str, reference: Callable, fast: Callable, *args: object, macs: int = 0, nbytes: int = 0) -> None:
        benchmark.group = group
        benchmark(reference if version == "reference" else fast, *args)
        benchmark.extra_info["threads"] = torch.get_num_threads()
        if benchmark.stats is not None:
            seconds = benchmark.stats.stats.min
            if macs:
                benchmark.extra_info["GFLOP/s"] = 2 * macs / seconds / 1e9
                benchmark.extra_info["share of float32 product"] = macs / seconds / ceilings["macs"]
            if nbytes:
                benchmark.extra_info["GB/s"] = nbytes / seconds / 1e9
                benchmark.extra_info["share of streaming read"] = nbytes / seconds / ceilings["bytes"]

    yield run
    sgl_kernel_ext.force_cpu_capability(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A table's rows come one after another, so that both versions meet the same state of the machine."""
    items.sort(key=lambda item: item.name.split("[")[0])
