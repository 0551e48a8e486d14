"""Memory of tensors on the CPU."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

_MARK = "second call"


def peak_tensor_bytes(function: Callable[[], Any]) -> int:
    """Run ``function``; return the largest number of bytes that its tensors had at one time."""
    return max(_live_bytes(function)[1])


def peak_of_second_call(make: Callable[[], Callable[[], Any]]) -> int:
    """Call ``make``, and its result twice; return the largest number of bytes of all tensors in the second call.

    Tensors of ``make`` and of the first call that still live count.
    """

    def run() -> None:
        function = make()
        function()
        with torch.profiler.record_function(_MARK):
            function()

    start, live = _live_bytes(run)
    return max(live[start:])


def _live_bytes(function: Callable[[], Any]) -> tuple[int, list[int]]:
    """Run ``function``; return the bytes of its tensors after each change, and the index of the change at the mark."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    mark = next((event.start_ns() for event in events if event.name() == _MARK), 0)
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    live = list(accumulate((event.nbytes() for event in changes), initial=0))  # negative if memory is freed
    return sum(event.start_ns() < mark for event in changes), live
