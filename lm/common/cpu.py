"""The CPU cores that this process may use."""

import math
import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_TASKS = Path("/proc/self/task")


def available_cpus(cgroup: Path = _CGROUP) -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    Counts the cores of its affinity mask (``taskset``, cpusets), and at most the CPU quota of its container, which is
    read from the files of cgroup version 2 or 1 and rounded up: ``docker run --cpus 2`` gives 2 on any machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(cgroup)
    return min(cores, math.ceil(quota)) if quota else cores


def seconds_waiting_for_cores(tasks: Path = _TASKS) -> float:
    """Return for how long the threads of this process, added up, were ready to run while others held the cores.

    0 if the system does not say it, as outside Linux. Threads that have ended do not count.
    """
    nanoseconds = 0
    with suppress(OSError):
        for task in tasks.iterdir():
            with suppress(OSError, ValueError, IndexError):  # the thread has ended, or the kernel keeps no statistics
                nanoseconds += int((task / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def _cpu_quota(cgroup: Path) -> float:
    """Return the CPU quota in cores; 0 without a quota."""
    with suppress(OSError, ValueError):  # cgroup version 2; "max 100000" is no quota
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(0.0, int(quota) / int(period))
    with suppress(OSError, ValueError):  # cgroup version 1; -1 is no quota
        quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(0.0, int(quota) / int(period))
    return 0.0
