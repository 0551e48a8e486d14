"""The interface between the training loop and a training method: pretraining, fine-tuning, reinforcement learning."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM

MicroBatch = Any  # each objective has its own type


class Objective(Protocol):
    """The data, the loss and the evaluation of a training.

    A step minimizes the sum of :meth:`loss_sum` over the sum of :meth:`weight`, over all micro-batches of all ranks.
    """

    digests: dict[str, str]
    """Checksums of the input by name. A checkpoint with other checksums is refused."""
    tokens_per_step: int
    """Training tokens per step, over all ranks."""
    metric_names: Sequence[str]
    """Names of the metrics that :meth:`evaluate` returns."""
    is_prefetchable: bool
    """Whether a thread may load the next step's micro-batches during a step: they do not depend on the weights."""

    def micro_batches(self, step: int) -> Sequence[MicroBatch]:
        """Return this rank's ``gradient_accumulation_steps`` micro-batches of a step; the first step is 0.

        The result must depend on seed, step and weights alone, so that a resumed training repeats it.
        """

    def weight(self, micro_batch: MicroBatch) -> Tensor:
        """Return the weight of a micro-batch, e.g. its number of targets; a scalar."""

    def loss_sum(self, model: TransformerLM, micro_batch: MicroBatch) -> Tensor:
        """Return the sum of the losses of a micro-batch, a scalar with a gradient. ``torch.compile`` must accept it."""

    def evaluate(self, model: TransformerLM, is_final: bool) -> dict[str, float]:
        """Return the metrics, the same on all ranks; empty without validation data.

        During the training, ``valid_loss`` selects the best checkpoint. The final evaluation is of the finished model.
        """

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Generate text to show the progress of the training. Only rank 0 calls this."""
