"""What the host allows, read from files made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ced.engram_store import host

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host, "PROC", tmp_path / "proc")
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host, "HUGE_PAGES", tmp_path / "thp")
    write(tmp_path / "proc" / "meminfo", f"MemTotal: 9 kB\nMemAvailable:   {10 * GIB // 1024} kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_without_a_group_the_machine_counts(root: Path) -> None:
    assert host.free_bytes() == 10 * GIB
    assert host.memory_limit() is None


def test_version_2_counts_every_group_around_and_no_file_pages(root: Path) -> None:
    write(root / "proc" / "self" / "cgroup", "0::/outer/inner\n")
    write(root / "cgroup" / "cgroup.controllers", "memory\n")
    outer = root / "cgroup" / "outer"
    write(outer / "memory.max", f"{4 * GIB}\n")
    write(outer / "memory.current", f"{3 * GIB}\n")
    write(outer / "memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file {GIB}\n")
    write(outer / "inner" / "memory.max", "max\n")
    assert host.memory_limit() == 4 * GIB
    assert host.free_bytes() == 3 * GIB


def test_version_1_counts_the_groups_below(root: Path) -> None:
    write(root / "proc" / "self" / "cgroup", "4:cpu,memory:/a\n0::/\n")
    group = root / "cgroup" / "memory" / "a"
    write(group / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{2 * GIB}\n")
    write(group / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n")
    write(root / "cgroup" / "memory" / "memory.limit_in_bytes", f"{2**63 - 4096}\n")
    assert host.memory_limit() == 2 * GIB
    assert host.free_bytes() == GIB


def test_a_container_sees_its_own_folder_alone(root: Path) -> None:
    write(root / "proc" / "self" / "cgroup", "0::/system.slice/docker-1.scope\n")
    write(root / "cgroup" / "cgroup.controllers", "memory\n")
    write(root / "cgroup" / "memory.max", f"{GIB}\n")
    write(root / "cgroup" / "memory.current", "0\n")
    assert host.memory_limit() == GIB


def test_huge_page_modes(root: Path) -> None:
    assert host.huge_page_mode(shared=False) == "absent"
    write(root / "thp" / "enabled", "always [madvise] never\n")
    write(root / "thp" / "shmem_enabled", "always within_size advise [never] deny force\n")
    assert (host.huge_page_mode(shared=False), host.huge_page_mode(shared=True)) == ("madvise", "never")
