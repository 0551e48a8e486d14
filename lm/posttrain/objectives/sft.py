"""The objective of supervised fine-tuning: next-token prediction on the answers of dialogs.

Dimensions: B rows of a batch, T tokens of each, which is the context length.
"""

import logging
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.data.batches import shuffled_indices
from lm.data.chat_template import encode_dialog, encode_rows
from lm.data.dialogs import Dialog
from lm.data.packing import PackedRows, pack_examples
from lm.distributed.process_group import all_reduce_mean, get_data_rank, get_data_world_size
from lm.inference.completion import Completion
from lm.model.functional import IGNORE_INDEX
from lm.model.ops.causal_attention import make_segment_attention
from lm.model.transformer import TransformerLM
from lm.posttrain.job import ObjectiveInputs, PosttrainJob
from lm.posttrain.objectives.generation import answer_prompts
from lm.train.config import TrainConfig
from lm.train.objective import Objective

log = logging.getLogger(__name__)


class PackedBatch(NamedTuple):
    """Rows of dialogs side by side, (B, T) int64 each."""

    input_ids: Tensor
    labels: Tensor
    segment_ids: Tensor
    """Number of the dialog of each token; 0 for padding."""
    positions: Tensor
    """Position of each token in its dialog."""


class SupervisedFineTuning(Objective):
    """The objective that learns the answers of dialogs.

    Dialogs are packed into rows of the context's length, without attention between dialogs. Each token of an answer has
    the same weight, in any micro-batch and process. Raises UserError if no dialog has an answer that fits.
    """

    example_types = (Dialog,)
    metric_names = ("valid_loss",)
    is_higher_better = False
    is_evaluation_cheap = True
    is_prefetchable = True
    is_compilable = True

    def __init__(self, config: TrainConfig, inputs: ObjectiveInputs[Dialog]) -> None:
        self.config, self.tokenizer, self.digests = config, inputs.tokenizer, inputs.digests
        self.device = inputs.device
        context_length = inputs.model.config.context_length
        self.train, self.valid = (
            pack_examples(
                [
                    example
                    for _, example in encode_rows(dialogs, lambda one: encode_dialog(self.tokenizer, one.messages))
                ],
                context_length,
            )
            for dialogs in (inputs.train, inputs.valid)
        )
        if not len(self.train.input_ids):
            raise UserError(
                f"No dialog has an answer within the model's context of {context_length} tokens; use a model with a "
                "longer context, or shorter dialogs."
            )
        self.tokens_per_step = config.batch_size * context_length
        self.rank, self.world_size = get_data_rank(), get_data_world_size()
        self.local_batch_size = config.batch_size // self.world_size

    @classmethod
    def from_job(cls, job: PosttrainJob, inputs: ObjectiveInputs[Dialog]) -> Self:
        """Return the objective of a job. Logs how many dialogs are not used as they are."""
        objective = cls(job.config, inputs)
        for count, problem in (
            (objective.train.dropped, "have no answer within the model's context and are left out"),
            (objective.train.cut, "are longer than the model's context and are cut at their end"),
        ):
            if count and objective.rank == 0:
                log.warning("%d of %d dialogs %s.", count, len(inputs.train), problem)
        return objective

    def micro_batches(self, step: int) -> list[PackedBatch]:
        """Return this rank's micro-batches of a step. Each epoch has all rows in a new order."""
        first = step * self.config.batch_size + self.rank * self.local_batch_size
        rows = shuffled_indices(len(self.train.input_ids), first, self.local_batch_size, self.config.seed)
        size = self.local_batch_size // self.config.gradient_accumulation_steps
        return [self._batch(self.train, rows[start : start + size]) for start in range(0, len(rows), size)]

    def _batch(self, rows: PackedRows, indices: Any) -> PackedBatch:
        arrays = (rows.input_ids, rows.labels, rows.segment_ids, rows.positions)
        return PackedBatch(*(torch.from_numpy(array[indices]).to(self.device) for array in arrays))

    def weight(self, micro_batch: PackedBatch) -> Tensor:
        """Return the number of tokens of answers."""
        return (micro_batch.labels != IGNORE_INDEX).sum()

    def padding(self, micro_batch: PackedBatch) -> Tensor:
        """Return which tokens belong to no dialog, (B, T) bool."""
        return micro_batch.segment_ids == 0

    def loss_sum(self, model: TransformerLM, micro_batch: PackedBatch) -> Tensor:
        """Return the sum of the cross-entropies (nats) of the tokens of answers."""
        attention = make_segment_attention(micro_batch.segment_ids)
        loss = model.loss(
            micro_batch.input_ids, micro_batch.labels, micro_batch.positions, [attention] * len(model.layers)
        )
        return loss * self.weight(micro_batch)

    def evaluate(self, model: TransformerLM, is_final: bool) -> dict[str, float]:
        """Return the mean loss of the held-out answers, in nats per token.

        It is of ``eval_sequences`` rows, at the end of all.
        """
        count = len(self.valid.input_ids)
        if not count:
            return {}
        used = count if is_final else min(count, self.config.eval_sequences)
        rows = np.linspace(0, count - 1, used).round().astype(np.int64)[self.rank :: self.world_size]
        size = max(1, self.local_batch_size // self.config.gradient_accumulation_steps)
        sums = torch.zeros(2, dtype=torch.float64)  # on the CPU: MPS has no float64
        for start in range(0, len(rows), size):
            batch = self._batch(self.valid, rows[start : start + size])
            sums += sums.new_tensor([float(self.loss_sum(model, batch)), float(self.weight(batch))])
        loss_sum, weight = all_reduce_mean(sums).tolist()
        return {"valid_loss": loss_sum / weight}

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Answer the prompts of ``sample_prompts``."""
        return answer_prompts(model, self.tokenizer, self.config)
