"""Threads in which kernels compute parts of an operation side by side."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch


@cache
def thread_pool() -> ThreadPoolExecutor:
    """Return the threads that compute beside the calling one."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1))


def run_in_threads(kernel: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> None:
    """Call ``kernel(*job)`` for each job: the first in this thread, the others beside it."""
    futures = [thread_pool().submit(kernel, *job) for job in jobs[1:]]
    try:
        kernel(*jobs[0])
    finally:  # also after an interrupt: the caller may free the memory that the others write to
        for future in futures:
            future.result()


def split_for_threads(count: int, min_size: int) -> list[tuple[int, int]]:
    """Return the (start, end) of a part of ``range(count)`` for each of torch's threads; fewer parts, so that they have
    at least ``min_size`` numbers."""
    return split_evenly(count, max(1, min(torch.get_num_threads(), count // min_size)))


def split_evenly(count: int, parts: int) -> list[tuple[int, int]]:
    """Return the (start, end) of parts of ``range(count)``."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return list(zip(bounds, bounds[1:], strict=False))
