"""How much the benchmark measures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """How much is measured. ``groups`` are of one chunk each."""

    chunks: tuple[int, ...] = (100, 1_000, 10_000)
    groups: tuple[int, int] = (12, 48)
    """Of the runs on the object store without a delay."""
    checked_groups: int = 24
    checks: tuple[tuple[float, int], ...] = ((0.02, 4), (0.1, 4), (0.1, 16))
    """Delay in seconds, and threads, of the runs that are predicted."""
    max_checks: int = 4
    """The last one has the text of ``work_mb``."""
    work_mb: int = 40
    dask_groups: int = 32
    listed: int = 50_000
    """Chunks whose list is written, to measure the time of a chunk."""


QUICK = Sizes(
    chunks=(50, 150),
    groups=(6, 34),
    checked_groups=12,
    checks=((0.02, 4),),
    max_checks=1,
    work_mb=8,
    dask_groups=0,
    listed=20_000,
)
