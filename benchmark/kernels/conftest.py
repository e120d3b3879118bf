"""What the kernel benchmarks share: each case runs as the reference and as the fast version at every CPU level.

The ratio to the reference is that of two rows of one table, so measured in one run. Threads are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import sgl_kernel_ext
from sglang_ced.kernels import registry

VERSIONS = ["reference", *sgl_kernel_ext.supported_cpu_capabilities()]


@pytest.fixture(params=VERSIONS)
def compare(request: pytest.FixtureRequest, benchmark) -> Iterator[Callable[..., None]]:
    """compare(group, reference, fast, *args, macs=0, nbytes=0): time one of the two, whichever turn it is."""
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
            benchmark.extra_info |= {"GMAC/s": macs / seconds / 1e9, "GB/s": nbytes / seconds / 1e9}

    yield run
    sgl_kernel_ext.force_cpu_capability(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A table's rows come one after another, so that both versions meet the same state of the machine."""
    items.sort(key=lambda item: item.name.split("[")[0])
