"""The memory that this machine or container has."""

import os
import platform
from pathlib import Path

import numpy as np
import pytest

from lm.hardware.memory import free_memory, machine_memory, release_free_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MACHINE),
        ({"memory.max": "max\n"}, MACHINE),
        ({"memory.max": f"{4 << 20}\n"}, 4 << 20),
        ({"memory.max": f"{1 << 62}\n"}, MACHINE),
        ({"memory.max": "damaged"}, MACHINE),
        ({"memory/memory.limit_in_bytes": f"{3 << 20}\n"}, 3 << 20),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
    ],
)
def test_the_limit_of_a_container_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine_memory(tmp_path) == expected


@pytest.mark.parametrize(
    ("membership", "limits"),
    [
        ("0::/user.slice/run-3.scope\n", {"user.slice/run-3.scope/memory.max": 3, "user.slice/memory.max": 4}),
        ("0::/user.slice/run-3.scope\n", {"user.slice/run-3.scope/memory.max": 5, "user.slice/memory.max": 3}),
        ("9:cpu:/c\n4:memory:/slurm/job_7\n0::/\n", {"memory/slurm/job_7/memory.limit_in_bytes": 3, "memory.max": 8}),
        ("4:memory:/docker/of-the-host\n", {"memory/memory.limit_in_bytes": 3}),
    ],
)
def test_the_limit_of_the_own_group_and_its_parents_counts(
    tmp_path: Path, membership: str, limits: dict[str, int]
) -> None:
    (tmp_path / "membership").write_text(membership)
    for name, megabytes in limits.items():
        path = tmp_path / "cgroups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{megabytes << 20}\n")
    assert machine_memory(tmp_path / "cgroups", tmp_path / "membership") == 3 << 20


def test_free_memory_is_what_neither_this_process_nor_others_have(tmp_path: Path) -> None:
    meminfo, statm = tmp_path / "meminfo", tmp_path / "statm"
    total, page_bytes = machine_memory(), os.sysconf("SC_PAGE_SIZE")
    assert free_memory(meminfo, statm) == total, "files that are not there"
    statm.write_text("900 3 1 1 0 1 0")
    assert free_memory(meminfo, statm) == total - 3 * page_bytes
    meminfo.write_text("MemTotal: 99 kB\nMemFree: 5 kB\nMemAvailable:     7 kB\nBuffers: 1 kB\n")
    assert free_memory(meminfo, statm) == 7 * 1024
    statm.write_text(f"900 {total} 1")
    assert free_memory(meminfo, statm) == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")
def test_free_memory_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    release_free_memory()  # imports Arrow, which needs memory
    arrays = [np.ones(8000) for _ in range(1000)]  # 64 kB each: none is mapped alone
    last, before = arrays.pop(), resident()  # the last one keeps the end of the heap
    del arrays
    release_free_memory()
    assert resident() < before - 40_000_000 and last[0] == 1
