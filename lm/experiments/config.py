"""Configuration of searches, scaling laws, mixtures, gates and budgets.

It imports no large library: the command line starts fast.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from lm.common.config import PYDANTIC_CONFIG, Config, bounded_field
from lm.common.errors import UserError

BudgetUnit = Literal["seconds", "flops", "tokens"]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*(s|secs?|seconds?|m|mins?|minutes?|h|hours?|d|days?)(?![a-z])\s*", re.IGNORECASE)
_PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([kMGBT]?)\s*(flops?|tokens?)", re.IGNORECASE)


@dataclass(frozen=True)
class SearchConfig(Config, section="search"):
    """A search for the point with the lowest loss, instead of all points of the grid."""

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


@dataclass(frozen=True)
class MixtureConfig(Config, section="mixture"):
    """Small trainings on different mixtures of the sources of ``data.mix``, and the weights that a law of their losses
    finds best. The weights in ``data.mix`` do not count."""

    runs: int = bounded_field(16, ge=1)
    """Number of trainings: one with each source's share of the tokens as its weight, one with equal weights, and others
    that fill the space of weights evenly. At least the number of sources plus four."""
    lengths: list[float] = field(default_factory=lambda: [1.0])
    """Parts of train.steps that the trainings take, in turn. With several, the law predicts longer trainings
    better."""
    refine_rounds: int = bounded_field(0, ge=0)
    """Number of rounds after these trainings: each trains on the weights that the law finds, once for each length, and
    fits the law again. It predicts best where it has trainings."""
    min_weight: float = bounded_field(0.02, ge=0, lt=1)
    """Lowest weight of a source, in the trainings and in the result."""
    target: dict[str, float] = field(default_factory=dict)
    """Weight of the bits per byte of each source's validation text in the mean to minimize, by source; 0 for those left
    out. Default: all the same."""
    target_tokens: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Tokens of the training that the weights are for. data.mix.NAME.max_epochs limits them there; the trainings
    of the sweep have no such limit. 0: as many as train.steps have."""
    check_seeds: int = bounded_field(0, ge=0)
    """Number of trainings of target_tokens with the weights found, as many in natural proportions, and as many with
    equal weights, each with another seed, to compare them with each other and with the law. 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.lengths or any(not 0 < length <= 1 for length in self.lengths) or 1 not in self.lengths:
            raise UserError(
                f"mixture.lengths is {self.lengths}; it must have parts of train.steps above 0, one of them 1."
            )
        if any(not 0 <= weight < math.inf for weight in self.target.values()) or (
            self.target and not sum(self.target.values())
        ):
            raise UserError(
                f"mixture.target is {self.target}; it must have weights of at least 0, one of them above 0."
            )


@dataclass(frozen=True)
class GateConfig(Config, section="gate"):
    """A variant of the training or the model against the baseline: at two sizes of model, with equal tokens, and the
    same seeds for both."""

    sizes: list[dict[str, Any]]
    """Options of the two sizes, such as model.d_model and train.steps. Only these differ between the baselines."""
    variant: dict[str, Any] = field(default_factory=dict)
    """Options of the variant, of the sections model and train. The command line reads them from --variant."""
    seeds: int = bounded_field(12, ge=3)
    """Number of seeds, from train.seed on. Each trains the baseline and the variant at both sizes. Twelve find a gain
    of twice the seeds' standard deviation in at least 80 % of cases."""
    max_seeds: int = bounded_field(24, ge=3)
    """Largest cost: the number of seeds after which an undecided variant is given up. A look at fewer seeds may spend
    its share of the allowed error, so that a later look at more seeds has some left."""
    lengths: list[float] = field(default_factory=lambda: [0.25, 0.5, 2.0])
    """Parts of the steps of more trainings of the baseline, one at each size. The law of its loss over compute is
    fitted to them; from three of them on, it has an irreducible loss."""
    least_speedup: float = bounded_field(1.05, gt=1, lt=math.inf)
    """Effective speed-up that a variant must have to be worth it. One that is shown to have less is rejected."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.sizes) != 2:
            raise UserError(f"gate.sizes has {len(self.sizes)} sizes; a gate compares at two.")
        if self.max_seeds < self.seeds:
            raise UserError(f"gate.max_seeds {self.max_seeds} must be at least gate.seeds {self.seeds}.")
        lengths = {float(length) for length in self.lengths}
        if not lengths or len(lengths) < len(self.lengths) or any(not 0 < x < math.inf or x == 1 for x in lengths):
            raise UserError(
                f"gate.lengths is {self.lengths}; it must have different parts of the steps above 0, without 1."
            )


@dataclass(frozen=True)
class RecordConfig(Config, section="record"):
    """A published result of a recipe: the mean validation loss of trainings that differ in the seed alone."""

    loss: float
    """Mean validation loss at the end, of the whole text, nats per token."""
    loss_error: float = bounded_field(0.0, ge=0, lt=math.inf)
    """Standard error of that mean."""
    text: str = ""
    """Digest of the tokens of the text, training and validation. Losses of other tokens do not compare."""
    made: str = ""
    """Date and machine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.loss < math.inf:
            raise UserError(f"record.loss is {self.loss}; it must be above 0 and finite.")


@dataclass(frozen=True)
class Budget:
    """How much time, FLOPs or tokens a training may take."""

    amount: float
    unit: BudgetUnit


def parse_budget(text: str) -> Budget:
    """Read a budget: a time such as 90s, 30m, 30 min or 1h30m; FLOPs such as 1e16flops; tokens such as 50Mtokens.

    Raises UserError for anything else, and for a budget of nothing.
    """
    text = text.strip()
    if text and not _TIME.sub("", text):
        seconds = sum(float(number) * _SECONDS[unit[0].lower()] for number, unit in _TIME.findall(text))
        if 0 < seconds < float("inf"):
            return Budget(seconds, "seconds")
    if match := _AMOUNT.fullmatch(text):
        number, prefix, name = match.groups()
        amount = float(number) * _PREFIXES[prefix if prefix in _PREFIXES else prefix.swapcase()]
        if 0 < amount < float("inf"):
            return Budget(amount, "flops" if name.lower().startswith("flop") else "tokens")
    raise UserError(
        f"budget is {text!r}; it must be a time such as 30m or 2h, FLOPs such as 1e16flops, or tokens such as "
        "50Mtokens."
    )
