"""The control groups of this process, in which Linux limits its CPU time and memory."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


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
