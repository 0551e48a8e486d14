"""The memory that the processes of this machine or container may use."""

import os
from contextlib import suppress
from pathlib import Path

from lm.hardware.cgroup import CGROUPS, MEMBERSHIP, cgroup_directories

_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of cgroup version 2 and 1


def machine_memory(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the bytes of this machine's memory, or the lowest limit of this process's control groups if lower.

    ``docker run --memory 4g`` gives 4 GiB on any machine. Slurm and systemd limit memory in the same way.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for directory in cgroup_directories("memory", cgroups, membership):
        for name in _LIMITS:
            with suppress(OSError, ValueError):  # "max" is no limit
                memory = min(memory, int((directory / name).read_text()))
    return memory
