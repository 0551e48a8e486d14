"""The memory that the processes of this machine or container may use, and the allocator of the C library."""

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

from lm.hardware.cpu import CGROUPS, MEMBERSHIP, cgroup_directories


def machine_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the bytes of this machine's memory, or the lowest limit of this process's control groups if lower.

    ``docker run --memory 4g`` gives 4 GiB on any machine. Slurm and systemd limit memory in the same way.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for directory in cgroup_directories("memory", cgroups, membership):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of cgroup version 2 and 1
            with suppress(OSError, ValueError):  # "max" is no limit
                memory = min(memory, int((directory / name).read_text()))
    return memory


def free_memory(meminfo: Path = Path("/proc/meminfo"), statm: Path = Path("/proc/self/statm")) -> int:
    """Return the bytes that this process may still take: of :func:`machine_memory`, without what it has already.

    On Linux at most what the system calls available, because other programs need memory too.
    """
    limit, page_bytes = machine_memory(), os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError):
        limit -= int(statm.read_text().split()[1]) * page_bytes
    with suppress(OSError, ValueError):
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                limit = min(limit, int(rest.split()[0]) * 1024)
    return max(0, limit)


def keep_freed_memory() -> None:
    """Have this process keep the memory of freed tensors for new ones, from now on.

    glibc maps and unmaps each block of more than 32 MB every time, such as the logits of a batch, and the system fills
    it with zeros page by page. A training on two cores took a fifth longer. Other C libraries are left as they are.
    """
    _set_allocator(mmap_max=0, trim_threshold=-1)  # never


def return_freed_memory() -> None:
    """Have this process return the memory of each freed tensor of a MiB or more to the system, from now on.

    What is kept for new tensors does not fit them all: a training of few bytes a weight needed a third more memory.
    """
    _set_allocator(mmap_threshold=1 << 20, mmap_max=1 << 16, trim_threshold=1 << 17)


def _set_allocator(**options: int) -> None:
    """Set options of glibc's mallopt by name. Other C libraries have none."""
    if platform.libc_ver()[0] == "glibc":
        numbers = {"trim_threshold": -1, "mmap_threshold": -3, "mmap_max": -4}  # in glibc's malloc.h
        libc = ctypes.CDLL(None)
        for name, value in options.items():
            libc.mallopt(numbers[name], value)


def release_free_memory() -> None:
    """Return the memory that this process has freed to the system, for what the next stage needs elsewhere.

    glibc keeps it for each thread, and Arrow's pool keeps its own.
    """
    import pyarrow as pa  # slow to import

    pa.default_memory_pool().release_unused()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
