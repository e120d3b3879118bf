"""What the host allows: free memory, limits, huge pages."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")

_UNLIMITED = 1 << 60  # version 1 has no word for it and writes a number near 2**63


def free_bytes() -> int:
    """Bytes that can still be taken on this machine, within every limit of the control group of this process.

    Pages that only cache files count as free, as the kernel drops them first.
    """
    lines = (PROC / "meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for group in _memory_groups():
        limit = _limit(group)
        if limit is not None:
            free = min(free, max(0, limit - _used(group)))
    return free


def memory_limit() -> int | None:
    """The lowest memory limit, in bytes, of the control groups of this process; None = none."""
    return min((limit for group in _memory_groups() if (limit := _limit(group)) is not None), default=None)


def memlock_limit() -> int | None:
    """Bytes that a process may lock in memory (RLIMIT_MEMLOCK); None = any."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def huge_page_mode(shared: bool) -> str:
    """The kernel's word for huge pages in anonymous or in shared memory: always, madvise, advise, never ...; "absent"
    where it knows none."""
    try:
        words = (HUGE_PAGES / ("shmem_enabled" if shared else "enabled")).read_text()
    except OSError:
        return "absent"
    return words.partition("[")[2].partition("]")[0]


def _memory_groups() -> Iterator[Path]:
    """Folders of the memory control group of this process and of those around it, innermost first.

    In a container the path may be the host's, with only the container's own folder mounted; then that one counts.
    """
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root = CGROUPS / "memory"
        elif not controllers and (CGROUPS / "cgroup.controllers").exists():
            root = CGROUPS
        else:
            continue
        group = root / path.lstrip("/")
        if not group.is_dir():
            group = root
        yield group
        while group != root:
            group = group.parent
            yield group


def _limit(group: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(group / name)
        if text.isdigit() and int(text) < _UNLIMITED:
            return int(text)
    return None


def _used(group: Path) -> int:
    """Bytes used, without pages that only cache files."""
    used = next((int(text) for name in ("memory.current", "memory.usage_in_bytes") if (text := _read(group / name))), 0)
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    prefix = "total_" if "total_inactive_file" in stat else ""  # version 1: with the groups below
    return used - sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
