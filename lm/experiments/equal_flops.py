"""Bits per byte at equal FLOPs: what text costs a model that is trained with one tokenizer or another.

A tokenizer with more bytes per token reads more text for the same FLOPs, but its head is larger, and each of its tokens
is harder to predict. A loss per token, or equal steps, cannot show which of these is more. So each tokenizer gets the
same architecture except for its vocabulary, and as many tokens as the budget pays for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from lm.common.errors import UserError
from lm.experiments.budget import MIN_STEPS, with_steps
from lm.experiments.paired_test import standard_error
from lm.experiments.trial import TrialResult
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token
from lm.train.config import TrainConfig


@dataclass(frozen=True)
class LossAtFlops:
    """The loss of the models that were trained with a tokenizer, one for each seed."""

    steps: int
    tokens: int
    """Tokens of these steps."""
    flops: float
    """FLOPs of a training: the budget, rounded to steps."""
    seeds: list[float]
    """Bits per byte of the held-out text by seed."""

    @property
    def bits_per_byte(self) -> float:
        """Mean of the seeds."""
        return fmean(self.seeds)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None with one seed."""
        return standard_error(self.seeds) if len(self.seeds) > 1 else None


def spend_flops(
    flops: float, model: ModelConfig, train: TrainConfig, vocab_size: int, name: str
) -> tuple[ModelConfig, TrainConfig]:
    """Return the model with a vocabulary of this size, and the training of as many steps as ``flops`` pay for.

    Raises UserError, with the ``name`` of the tokenizer, if they are too few.
    """
    model = replace(model, vocab_size=vocab_size)
    step = flops_per_token(model) * train.batch_size * model.context_length
    if (steps := round(flops / step)) < MIN_STEPS:
        raise UserError(
            f"{flops:.3g} FLOPs pay for {steps} steps of a model with the {vocab_size:,} ids of {name}, and a training "
            f"needs {MIN_STEPS}. Raise --train_flops to about {MIN_STEPS * step:.1e} or more, or compare smaller "
            "vocabularies."
        )
    return model, with_steps(train, steps)


def summarize_trials(results: Sequence[TrialResult], name: str) -> LossAtFlops:
    """Return the loss of the trials of a tokenizer. Raises UserError, with its ``name``, if one has no loss."""
    losses = [result.valid_bits_per_byte for result in results if result.state == "finished"]
    if failed := next((result for result in results if result.state != "finished"), None):
        raise UserError(
            f"The model with the tokenizer {name} has no loss, its training {failed.state}: {failed.reason}"
        )
    first = results[0]
    return LossAtFlops(first.steps, first.tokens, first.flops, [loss for loss in losses if loss is not None])
