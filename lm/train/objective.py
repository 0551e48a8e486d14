"""The interface between the training loop and a training method: pretraining, fine-tuning, reinforcement learning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM

MicroBatch = Any  # each objective has its own type


class Objective(Protocol):
    """The data, the loss and the evaluation of a training.

    A step minimizes the sum of :meth:`loss_sum` over the sum of :meth:`weight`, over all micro-batches of all ranks.
    If that weight is 0, the losses must be 0 too. Some attributes and methods have defaults.
    """

    digests: dict[str, str]
    """Checksums of the input by name. A checkpoint with other checksums is refused."""
    tokens_per_step: int = 0
    """Training tokens per step, over all ranks; 0 if the number differs between steps."""
    metric_names: Sequence[str]
    """Names of the metrics that :meth:`evaluate` returns. The first one selects the best checkpoint."""
    is_higher_better: bool
    """Whether the best checkpoint has the highest value of that metric, not the lowest."""
    is_evaluation_cheap: bool = False
    """Whether :meth:`evaluate` generates no text, so that the trainer may call it more often for the curve."""
    is_prefetchable: bool = False
    """Whether a thread may load the next step's micro-batches during a step: they do not depend on the weights."""
    is_compilable: bool = False
    """Whether ``torch.compile`` accepts :meth:`loss_sum`: shapes do not change, and it has no side effects."""

    def micro_batches(self, step: int) -> Sequence[MicroBatch]:
        """Return this rank's ``gradient_accumulation_steps`` micro-batches of a step; the first step is 0.

        The result must depend on seed, step and weights alone, so that a resumed training repeats it.
        """

    def weight(self, micro_batch: MicroBatch) -> Tensor:
        """Return the weight of a micro-batch, e.g. its number of targets; a scalar."""

    def padding(self, micro_batch: MicroBatch) -> Tensor | None:
        """Return which tokens are padding, (B, T) bool, or None if no token is. Experts do not compute it."""
        return None

    def loss_sum(self, model: TransformerLM, micro_batch: MicroBatch) -> Tensor:
        """Return the sum of the losses of a micro-batch, a scalar with a gradient."""

    def step_metrics(self) -> dict[str, float]:
        """Return metrics of the last step besides its loss, for its row in ``metrics.jsonl``. They may wait for the
        device."""
        return {}

    def restore(self, previous: Path, step: int) -> None:
        """Read what an unfinished training stored in the directory ``previous`` beside its checkpoints.

        ``step``: the number of steps that the checkpoint to resume from has made; 0 if there is none.
        """
        return

    def evaluate(self, model: TransformerLM, is_final: bool) -> dict[str, float]:
        """Return the metrics, the same on all ranks; empty without validation data.

        ``is_final``: the training is finished.
        """

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Generate text to show the progress of the training. Only rank 0 calls this."""
