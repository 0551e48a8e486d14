"""Configuration of searches and scaling laws. This module imports no large library: the command line starts fast."""

import math
from dataclasses import dataclass, field
from typing import Any

from lm.common.config import PYDANTIC_CONFIG, bounded_field, validate_fields
from lm.common.errors import UserError


@dataclass(frozen=True)
class SearchConfig:
    """A search for the point with the lowest loss, instead of all points of the grid."""

    __pydantic_config__ = PYDANTIC_CONFIG

    trials: int = bounded_field(20, ge=1)
    """Number of points to try, including those that are pruned, diverge or are not valid."""
    seed: int = bounded_field(0, ge=0, lt=1 << 32)
    """Seed of Optuna's sampler (TPE). The same seed and results give the same points."""
    prune: bool = True
    """Stop a training whose best validation loss is above the median of the finished trainings at the same step."""
    startup_trials: int = bounded_field(5, ge=1)
    """Finished trainings before the first may be pruned."""
    warmup_steps: int = bounded_field(0, ge=0)
    """Steps of each training before it may be pruned."""

    def __post_init__(self) -> None:
        validate_fields(self, "search")


@dataclass(frozen=True)
class LawConfig:
    """A scaling law fitted to the results of a sweep, and the training that checks its prediction."""

    __pydantic_config__ = PYDANTIC_CONFIG

    budget: str = "flops"
    """Option or variable that has the FLOPs of a training."""
    size: str = "model.d_model"
    """Option or variable that sets the size of the model."""
    check_budget: float = bounded_field(0.0, ge=0, lt=math.inf)
    """FLOPs of the training that checks the prediction. 0: no check."""
    check_sizes: list[Any] = field(default_factory=list)
    """Values of ``size`` for the check. The one whose parameters are nearest to the predicted best size is trained."""

    def __post_init__(self) -> None:
        if self.check_budget and not self.check_sizes:
            raise UserError("law.check_budget needs law.check_sizes: the sizes that the check may have.")
