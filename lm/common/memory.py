"""The memory that the processes of this machine or container may use."""

import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")  # of cgroup version 2 and 1


def machine_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes of this machine's memory, or the limit of its container if that is lower.

    ``docker run --memory 4g`` gives 4 GiB on any machine. The limit is read from the files of cgroup version 2 or 1.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _LIMITS:
        with suppress(OSError, ValueError):  # "max" is no limit
            return min(memory, int((cgroup / name).read_text()))
    return memory
