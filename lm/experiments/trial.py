"""A trial: one training of a sweep, and its result."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lm.model.config import ModelConfig
from lm.train.config import TrainConfig

_SOURCE_METRIC = "valid_bits_per_byte/"  # before the name of a source
State = Literal["finished", "pruned", "diverged", "refused"]


@dataclass(frozen=True)
class TrialConfig:
    """Model, training and pruning limits of a trial."""

    model: ModelConfig
    train: TrainConfig
    limits: dict[str, float] = field(default_factory=dict)
    """Pruning: bits per byte of the validation text by step, above which the training stops. JSON has no numbers as
    keys."""
    title: str = ""
    """Names the point in messages."""
    mix: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """Weights of the sources, see :attr:`lm.text.config.DataConfig.mix_weights`; empty without a mixture."""

    @property
    def identity(self) -> dict[str, Any]:
        """Fields that enter the cache key. Those of trials from before there were mixtures have none."""
        fields = {"model": self.model.identity, "train": self.train.identity, "limits": self.limits}
        return fields | ({"mix": self.mix} if self.mix else {})


@dataclass(frozen=True)
class TrialResult:
    """The end of a trial: its state, losses and curve."""

    state: State
    """finished: all steps. pruned: stopped because others were better. diverged: see :func:`make_result`. refused: it
    cannot be trained, such as with a context longer than the text, or with too little memory."""
    reason: str
    """Why it is not finished; empty if it is."""
    steps: int
    """Number of steps that were trained."""
    tokens: int
    """Number of tokens in these steps."""
    parameters: int
    flops: float
    """FLOPs of these tokens, of the matmuls forward and backward, with those of the head."""
    train_loss: float | None
    """Moving average of the training loss at the end, nats per token."""
    valid_loss: float | None
    """Loss on the validation text, nats per token: of the whole text if finished, else the last one measured."""
    valid_bits_per_byte: float | None
    curve: list[dict[str, Any]]
    """Rows of metrics by step."""
    source_bits_per_byte: dict[str, float] = field(default_factory=dict)
    """Bits per byte of the validation text of each source of a mixture, if the training is finished."""

    @property
    def has_validation(self) -> bool:
        """Whether the validation text was evaluated, with whatever result."""
        return any("valid_loss" in row for row in self.curve)

    @property
    def objective(self) -> float | None:
        """The loss to compare trials by: bits per byte, or without validation text the training loss."""
        loss = self.train_loss if self.valid_bits_per_byte is None else self.valid_bits_per_byte
        return None if self.state in ("diverged", "refused") else loss

    @property
    def eval_losses(self) -> dict[int, float]:
        """Bits per byte of the validation text by step: unlike the loss of a token, comparable between tokenizers."""
        rows = [(row["step"], row.get("valid_bits_per_byte")) for row in self.curve]
        return {step: loss for step, loss in rows if loss is not None}


def find_prune_step(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> int | None:
    """Return the first step at which the lowest bits per byte so far are above the limit of the step; None if none is.

    This is the rule of Optuna's MedianPruner if the limits are medians.
    """
    best = math.inf
    for row in rows:
        if (loss := row.get("valid_bits_per_byte")) is not None:
            best = min(best, loss)
            if best > limits.get(str(row["step"]), math.inf):
                return int(row["step"])
    return None


def make_result(
    config: TrialConfig,
    vocab_size: int,
    rows: Sequence[Mapping[str, Any]],
    training: Mapping[str, Any] | None,
    divergence: Mapping[str, Any] | None = None,
    refusal: str = "",
) -> TrialResult:
    """Return the result of a trial from its rows of metrics.

    ``training`` is the content of ``training.json`` of a finished training. ``divergence`` has the step and the reason
    if the trainer gave up. A finished training whose last loss is not finite counts as diverged too. ``refusal`` is why
    there can be no training.
    """
    from lm.model.flops import flops_per_token, parameter_count

    model = config.model if config.model.vocab_size else replace(config.model, vocab_size=vocab_size)
    state: State = "finished"
    reason = ""
    final = dict(training or {})
    steps = int(final["steps"]) if training else int(rows[-1]["step"]) if rows else 0
    if (pruned := find_prune_step(rows, config.limits)) is not None:
        state, steps, final = "pruned", pruned, {}
        reason = f"at step {pruned:,} the loss was above the median of earlier trials"
        rows = [row for row in rows if row["step"] <= pruned]
    elif divergence is not None:
        state, steps, reason, final = "diverged", int(divergence["step"]), str(divergence["reason"]), {}
    elif refusal:
        state, reason = "refused", refusal
    names = ("step", "loss", "smoothed_loss", "valid_loss", "valid_bits_per_byte")
    curve = [{name: row[name] for name in names if name in row} for row in rows]
    last = {name: value for row in curve for name, value in row.items() if value is not None}
    has_validation = any("valid_loss" in row for row in curve)
    if has_validation:  # a loss that is not finite is None in a file
        last |= {name: final[name] for name in ("valid_loss", "valid_bits_per_byte") if name in final}
    loss = last.get("valid_loss" if has_validation else "smoothed_loss")
    if state == "finished" and (loss is None or not math.isfinite(loss)):
        state, reason = "diverged", "the last loss is not finite"
    tokens = steps * config.train.batch_size * model.context_length
    return TrialResult(
        state=state,
        reason=reason,
        steps=steps,
        tokens=tokens,
        parameters=parameter_count(model)["total"],
        flops=float(tokens * flops_per_token(model)),
        train_loss=last.get("smoothed_loss"),
        valid_loss=last.get("valid_loss"),
        valid_bits_per_byte=last.get("valid_bits_per_byte"),
        curve=curve,
        source_bits_per_byte={
            name.removeprefix(_SOURCE_METRIC): float(value)
            for name, value in final.items()
            if name.startswith(_SOURCE_METRIC) and value is not None
        },
    )


def rank(results: Sequence[TrialResult]) -> list[int]:
    """Return the indices of the results, the best first: finished by loss, then pruned by loss, then the others by the
    steps that they got to. Equal ones keep their order."""

    def key(index: int) -> tuple[int, float]:
        result = results[index]
        if result.objective is None:
            return 2, -result.steps
        return int(result.state == "pruned"), result.objective

    return sorted(range(len(results)), key=key)


def from_json(content: Mapping[str, Any]) -> TrialResult:
    """Return a result from the content of ``trial.json``."""
    return TrialResult(**{name: content[name] for name in TrialResult.__dataclass_fields__ if name in content})
