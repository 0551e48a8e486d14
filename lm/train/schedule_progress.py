"""How far a training is in its schedule, and what is due after a step."""

import time
from typing import Literal

from lm.common.execution import Execution
from lm.distributed.process_group import broadcast_from_rank0
from lm.train.config import TrainConfig

Due = Literal["evaluate", "validate", "log", "save"]


class ScheduleProgress:
    """Counts the steps of the schedule: those of the training, and with ``max_seconds`` also those that pass with the
    time. All ranks see the same time, that of rank 0."""

    def __init__(self, config: TrainConfig, execution: Execution, curve_points: int) -> None:
        """``curve_points``: validations for the curve, at least; evaluations count too."""
        self.config, self._log_interval = config, execution.log_interval
        self._curve_interval = config.steps // curve_points or 1
        self.seconds = 0.0
        """Time spent in the training so far; counted only with ``max_seconds``."""
        self._started: float | None = None  # when the training took its first batch, minus the seconds before

    def start_clock(self) -> None:
        """Start to count the time, at the first call."""
        self._started = self._started or time.perf_counter() - self.seconds

    def read_clock(self) -> None:
        """Update :attr:`seconds`. All ranks call this together."""
        if self.config.max_seconds and self._started is not None:
            self.seconds = broadcast_from_rank0(time.perf_counter() - self._started)

    def position(self, step: int) -> float:
        """Return how many of the schedule's steps are over after ``step`` steps of the training."""
        max_seconds = self.config.max_seconds
        return max(step, self.config.steps * self.seconds / max_seconds) if max_seconds else step

    def is_over(self, step: int) -> bool:
        """Return whether ``step`` was the last one."""
        return self.position(step) >= self.config.steps

    def is_in_average(self, step: int) -> bool:
        """Return whether the weights after ``step`` belong to the average of the last ones."""
        return self.position(step) > self.config.steps - self.config.average_steps

    def find_due(self, step: int, earlier: float) -> set[Due]:
        """Return what to do after ``step``. ``earlier``: the position before it."""
        is_last, position = self.is_over(step), self.position(step)

        def has_passed(interval: int) -> bool:
            return position // interval > earlier // interval

        due: set[Due] = set()
        if is_last or has_passed(self.config.eval_interval):
            due.add("evaluate")
        elif has_passed(self._curve_interval):
            due.add("validate")  # for the curve alone: the best checkpoint and the patience belong to the key
        if is_last or step == 1 or step % self._log_interval == 0:
            due.add("log")
        if has_passed(self.config.checkpoint_interval):
            due.add("save")
        return due
