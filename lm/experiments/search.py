"""Search by the library Optuna, with pruning by medians (Golovin et al. 2017, Google Vizier)."""

import logging
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from lm.common.errors import UserError
from lm.experiments.axes import Axis, Settings
from lm.experiments.config import SearchConfig
from lm.experiments.trial import TrialResult


class Search:
    """A search over axes, one trial after the other. The trials follow from the seed and the results alone.

    Raises UserError if Optuna is not installed.
    """

    def __init__(self, config: SearchConfig, axes: Sequence[Axis]) -> None:
        try:
            import optuna
        except ImportError as error:
            raise UserError(f"A search needs an extra: pip install 'textmill[sweep]' ({error}).") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        logging.getLogger("optuna").propagate = False
        self.config, self.axes, self._optuna = config, axes, optuna
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=config.seed))
        self._trial: Any = None
        self._finished: list[dict[int, float]] = []

    def ask(self) -> Settings:
        """Return the settings of the next trial."""
        self._trial = self._study.ask()
        return {name: value for axis in self.axes for name, value in self._suggest(axis).items()}

    def _suggest(self, axis: Axis) -> Settings:
        name, is_log = axis.names[0], axis.scale == "log"
        if axis.cases or axis.values or axis.num_values is not None:
            choices = axis.choices()
            return choices[self._trial.suggest_categorical(name, list(range(len(choices))))]
        if axis.is_whole:
            return {name: self._trial.suggest_int(name, axis.low, axis.high, log=is_log)}
        value = self._trial.suggest_float(name, axis.low, axis.high, log=is_log)
        return {name: min(max(float(f"{value:.6g}"), float(axis.low or 0)), float(axis.high or 0))}

    def limits(self) -> dict[str, float]:
        """Return the median bits per byte of the finished trainings by step, to prune the next one with."""
        if not self.config.prune or len(self._finished) < self.config.startup_trials:
            return {}
        steps = sorted({step for losses in self._finished for step in losses if step > self.config.warmup_steps})
        return {str(step): median(losses[step] for losses in self._finished if step in losses) for step in steps}

    def leave_out(self) -> None:
        """Add that the trial that was asked for has an invalid configuration."""
        self._study.tell(self._trial, math.inf)  # Optuna would learn nothing from a failure, and ask for it again

    def tell(self, result: TrialResult) -> None:
        """Add the result of the trial that was asked for."""
        for step, loss in result.eval_losses.items():
            self._trial.report(loss, step)
        if result.state == "pruned":
            self._study.tell(self._trial, state=self._optuna.trial.TrialState.PRUNED)
        elif result.objective is None:  # it diverged
            self._study.tell(self._trial, math.inf)
        else:
            self._study.tell(self._trial, result.objective)
            self._finished.append(result.eval_losses)
