"""The objective of supervised fine-tuning: next-token prediction on the answers of dialogs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.data.batches import shuffled_indices
from lm.data.chat_template import encode_dialog
from lm.data.dialogs import Dialog
from lm.data.packing import PackedRows, pack_examples
from lm.distributed.process_group import all_reduce_mean, get_rank, get_world_size
from lm.inference.completion import Completion
from lm.model.functional import IGNORE_INDEX
from lm.model.ops.segment_attention import make_segment_attention
from lm.model.transformer import TransformerLM
from lm.posttrain.rollout import answer_greedily
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig

PackedBatch = tuple[Tensor, Tensor, Tensor, Tensor]  # input_ids, labels, segment_ids, positions; each (B, T) int64


class SupervisedFineTuning:
    """The objective (:class:`lm.train.objective.Objective`) that learns the answers of dialogs.

    Dialogs are packed into rows of the context's length, without attention between dialogs. Each token of an answer has
    the same weight, in any micro-batch and process. Raises UserError if no dialog has an answer that fits.
    """

    metric_names: Sequence[str] = ("valid_loss",)
    is_higher_better = False
    is_prefetchable = True
    is_compilable = True

    def __init__(
        self,
        config: TrainConfig,
        model: TransformerLM,
        tokenizer: Tokenizer,
        train: Sequence[Dialog],
        valid: Sequence[Dialog],
        digests: dict[str, str],
    ) -> None:
        self.config, self.tokenizer, self.digests = config, tokenizer, digests
        self.device = next(model.parameters()).device
        context_length = model.config.context_length
        self.train, self.valid = (
            pack_examples([encode_dialog(tokenizer, dialog.messages) for dialog in dialogs], context_length)
            for dialogs in (train, valid)
        )
        if not len(self.train.input_ids):
            raise UserError(
                f"No dialog has an answer within the model's context of {context_length} tokens; use a model with a "
                "longer context, or shorter dialogs."
            )
        self.tokens_per_step = config.batch_size * context_length
        self.rank, self.world_size = get_rank(), get_world_size()
        self.local_batch_size = config.batch_size // self.world_size

    def micro_batches(self, step: int) -> list[PackedBatch]:
        """Return this rank's micro-batches of a step. Each epoch has all rows in a new order."""
        first = step * self.config.batch_size + self.rank * self.local_batch_size
        rows = shuffled_indices(len(self.train.input_ids), first, self.local_batch_size, self.config.seed)
        size = self.local_batch_size // self.config.gradient_accumulation_steps
        return [self._batch(self.train, rows[start : start + size]) for start in range(0, len(rows), size)]

    def _batch(self, rows: PackedRows, indices: Any) -> PackedBatch:
        arrays = (rows.input_ids, rows.labels, rows.segment_ids, rows.positions)
        input_ids, labels, segment_ids, positions = (
            torch.from_numpy(array[indices]).to(self.device) for array in arrays
        )
        return input_ids, labels, segment_ids, positions

    def weight(self, micro_batch: PackedBatch) -> Tensor:
        """Return the number of tokens of answers."""
        return (micro_batch[1] != IGNORE_INDEX).sum()

    def padding(self, micro_batch: PackedBatch) -> Tensor:
        """Return which tokens belong to no dialog, (B, T) bool."""
        return micro_batch[2] == 0

    def loss_sum(self, model: TransformerLM, micro_batch: PackedBatch) -> Tensor:
        """Return the sum of the cross-entropies (nats) of the tokens of answers."""
        input_ids, labels, segment_ids, positions = micro_batch
        attention = make_segment_attention(segment_ids)
        loss = model.loss(input_ids, labels, positions, [attention] * len(model.layers))
        return loss * self.weight(micro_batch)

    def step_metrics(self) -> dict[str, float]:
        """Return nothing: the loss says all."""
        return {}

    def restore(self, previous: Path, step: int) -> None:
        """Do nothing: the batches follow from seed and step."""

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
        batches = [self._batch(self.valid, rows[start : start + size]) for start in range(0, len(rows), size)]
        loss_sum, weight = 0.0, 0
        for batch in batches:
            loss_sum += float(self.loss_sum(model, batch))
            weight += int(self.weight(batch))
        sums = torch.tensor([loss_sum, weight], dtype=torch.float64)  # on the CPU: MPS has no float64
        loss_sum, weight = all_reduce_mean(sums).tolist()
        return {"valid_loss": loss_sum / weight}

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Answer the prompts of ``sample_prompts``."""
        return answer_prompts(model, self.tokenizer, self.config)


def answer_prompts(model: TransformerLM, tokenizer: Tokenizer, config: TrainConfig) -> list[Completion]:
    """Answer the prompts of ``config.sample_prompts`` with the most likely tokens, to show the training's progress."""
    rollouts = answer_greedily(model, tokenizer, config.sample_prompts, config.sample_tokens)
    return [
        Completion(config.sample_prompts[index], rollout.text, len(rollout.ids)) for index, rollout in rollouts.items()
    ]
