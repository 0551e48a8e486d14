"""The CPU cores that this process may use, and its control groups, in which Linux limits its CPU time and memory."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_cpus(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> int:
    """Return the number of CPU cores that this process may use, at least 1.

    Counts the cores of its affinity mask (``taskset``, cpusets), and at most the CPU quota of its control groups
    (containers, Slurm, systemd), of cgroup version 2 or 1, rounded up: ``docker run --cpus 2`` gives 2 on any machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for directory in cgroup_directories("cpu", cgroups, membership):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # of cgroup version 2 and 1
            with suppress(OSError, ValueError):  # "max 100000" is no quota
                quota, period = " ".join((directory / name).read_text() for name in names).split()
                if int(quota) > 0:  # -1 is no quota
                    cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def seconds_waiting_for_cores(tasks: Path = Path("/proc/self/task")) -> float:
    """Return for how long the threads of this process, added up, were ready to run while others held the cores.

    0 if the system does not say it, as outside Linux. Threads that have ended do not count.
    """
    nanoseconds = 0
    with suppress(OSError):
        for task in tasks.iterdir():
            with suppress(OSError, ValueError, IndexError):  # the thread has ended, or the kernel keeps no statistics
                nanoseconds += int((task / "schedstat").read_text().split()[1])
    return nanoseconds / 1e9


def cgroup_directories(controller: str, cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """Yield the directories with the limits of ``cpu`` or ``memory``: of this process's groups and all their parents.

    The lowest limit among them counts. Containers see their group as the root; Slurm and systemd make groups below it.
    Those of cgroup version 2 come first. A directory need not exist: a container may see the paths of its host.
    """
    paths = {"": "", controller: ""}  # version 2 has no controller in its line
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path.lstrip("/"))
    for name in ("", controller):
        group = cgroups / name / paths[name]
        yield from (path for path in (group, *group.parents) if path.is_relative_to(cgroups / name))
