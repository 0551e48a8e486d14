"""Throughput of a training: time per step, tokens per second, model FLOPs utilization."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lm.hardware.cpu import seconds_waiting_for_cores


@dataclass(frozen=True)
class Throughput:
    """Measurements of the steps since the last measurement."""

    seconds_per_step: float
    """Without evaluations, samples and checkpoints."""
    tokens_per_second: float
    mfu: float | None
    """Model FLOPs utilization: fraction of the device's peak FLOPs per second, 0 to 1. None if the peak is unknown."""
    total_seconds_per_step: float
    """Since the start of this process, with evaluations, samples and checkpoints."""
    waiting: float
    """Mean number of threads that were ready to run while other programs held the cores."""


class StepTimer:
    """Measures the steps of a training that starts at ``step``."""

    def __init__(
        self, step: int, tokens_per_step: int, flops_per_step: float, peak_flops_per_second: float | None
    ) -> None:
        self._tokens_per_step, self._flops_per_step = tokens_per_step, flops_per_step
        self._peak_flops_per_second = peak_flops_per_second
        self._first_step = self._last_step = step
        self._start_time = self._last_time = time.perf_counter()
        self._last_clock, self._last_waited = self._start_time, seconds_waiting_for_cores()

    def measure(self, step: int) -> Throughput:
        """Measure the steps up to ``step``. The caller has waited for the device, which runs asynchronously."""
        now = time.perf_counter()
        seconds = (now - self._last_time) / (step - self._last_step)
        total_seconds = (now - self._start_time) / (step - self._first_step)
        self._last_time, self._last_step = now, step
        peak, waited = self._peak_flops_per_second, seconds_waiting_for_cores()
        mfu = self._flops_per_step / seconds / peak if peak else None
        waiting = max(0.0, waited - self._last_waited) / (now - self._last_clock)  # threads that ended do not count
        self._last_clock, self._last_waited = now, waited
        return Throughput(seconds, self._tokens_per_step / seconds, mfu, total_seconds, waiting)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count the time of the ``with`` block in ``seconds_per_step``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._last_time += time.perf_counter() - started
