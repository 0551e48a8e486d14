"""Memory of tensors on the CPU."""

import gc
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch

_MARK = "call"
_CALLS = 8


def peak_tensor_bytes(function: Callable[[], Any]) -> int:
    """Run ``function``; return the largest number of bytes that its tensors had at one time."""
    return max(_live_bytes(function)[0])


def peak_of_later_calls(make: Callable[[], Callable[[], Any]]) -> int:
    """Call ``make``, and its result several times; return the largest number of bytes of all tensors in a later call.

    Tensors of ``make`` and of earlier calls that still live count. Of the later calls, the one with the lowest peak
    counts: gloo may hold a buffer for longer in the others.
    """

    def run() -> None:
        function = make()
        for _ in range(_CALLS):
            with torch.profiler.record_function(_MARK):
                function()

    live, starts = _live_bytes(run)
    return min(max(live[start:end]) for start, end in pairwise([*starts[1:], len(live)]))


def _live_bytes(function: Callable[[], Any]) -> tuple[list[int], list[int]]:
    """Run ``function``; return the bytes of its tensors after each change, and the indices of the changes at marks."""
    gc.collect()  # else what earlier calls left, hundreds of megabytes of their events too, is freed later or never
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns())
    live = list(accumulate((event.nbytes() for event in changes), initial=0))  # negative if memory is freed
    marks = sorted(event.start_ns() for event in events if event.name() == _MARK)
    return live, [sum(event.start_ns() < mark for event in changes) for mark in marks]
