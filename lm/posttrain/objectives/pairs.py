"""Pairs of answers, a chosen and a rejected one: the part of an objective that does not depend on its loss.

Dimensions: P pairs of a batch, B = 2 · P answers, T tokens of each dialog, padded on the right.
"""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.data.batches import shuffled_indices
from lm.data.chat_template import encode_answer, encode_rows
from lm.data.dialogs import Message, PreferencePair
from lm.distributed.process_group import all_reduce_mean, get_rank, get_world_size
from lm.model.transformer import TransformerLM
from lm.posttrain.job import ObjectiveInputs
from lm.posttrain.tokenization import pad_responses
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.objective import Objective

log = logging.getLogger(__name__)


class EncodedPair(NamedTuple):
    """A pair as token ids."""

    prompt: list[int]
    """The messages before the answer, and the token that starts the answer."""
    chosen: list[int]
    """The better answer and its end token."""
    rejected: list[int]

    @property
    def length(self) -> int:
        """Number of tokens of the longer dialog."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


class PairBatch(NamedTuple):
    """Pairs as rows: the first half holds the chosen answers, the second the rejected."""

    indices: list[int]
    """Indices of the pairs."""
    ids: Tensor
    """(B, T) int64, padded on the right."""
    mask: Tensor
    """(B, T) bool: the tokens of the answer."""


class PairObjective(Objective):
    """An objective whose loss is a sum over pairs of answers.

    Pairs with a dialog of more than ``max_tokens`` tokens are left out, with a warning. Raises UserError if none
    remains.
    """

    example_types = (PreferencePair,)
    metric_names = ("valid_loss", "valid_accuracy", "valid_margin")
    is_higher_better = False

    def __init__(self, train_config: TrainConfig, inputs: ObjectiveInputs[PreferencePair], max_tokens: int) -> None:
        self.train_config, self.tokenizer, self.digests = train_config, inputs.tokenizer, inputs.digests
        self.device, train = inputs.device, inputs.train
        self.rank, self.world_size = get_rank(), get_world_size()
        kept, kept_valid = (
            [
                encoded
                for _, encoded in encode_rows(pairs, lambda pair: encode_pair(self.tokenizer, pair))
                if encoded.length <= max_tokens
            ]
            for pairs in (train, inputs.valid)
        )
        if not kept:
            raise UserError(
                f"No pair of answers is within the model's context of {inputs.model.config.context_length} tokens; use "
                "a model with a longer context, or shorter answers."
            )
        self.train_count, self.left_out = len(kept), len(train) - len(kept)
        if self.left_out and self.rank == 0:
            message = "%d of %d pairs have an answer beyond the model's context and are left out."
            log.warning(message, self.left_out, len(train))
        self.pairs = kept + kept_valid
        self.local_batch_size = train_config.batch_size // self.world_size
        self.micro_batch_size = self.local_batch_size // train_config.gradient_accumulation_steps
        self._sums: dict[str, Tensor] = {}  # of the metadata of the step

    @abstractmethod
    def losses(self, model: TransformerLM, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each pair (P,), and metrics of each pair: ``accuracy``, ``margin`` and others."""

    def make_batch(self, indices: Sequence[int]) -> PairBatch:
        """Return the pairs with these indices."""
        pairs = [self.pairs[index] for index in indices]
        answers = [*((pair.prompt, pair.chosen) for pair in pairs), *((pair.prompt, pair.rejected) for pair in pairs)]
        ids_BT, mask_BT = pad_responses(answers)
        return PairBatch(list(indices), ids_BT.to(self.device), mask_BT.to(self.device))

    def micro_batches(self, step: int) -> list[PairBatch]:
        """Return this rank's micro-batches of a step. Each epoch has all pairs in a new order."""
        self._sums = {}
        config, size = self.train_config, self.micro_batch_size
        first = step * config.batch_size + self.rank * self.local_batch_size
        indices = shuffled_indices(self.train_count, first, self.local_batch_size, config.seed).tolist()
        return [self.make_batch(indices[start : start + size]) for start in range(0, len(indices), size)]

    def weight(self, micro_batch: PairBatch) -> Tensor:
        """Return the number of pairs."""
        return torch.tensor(len(micro_batch.indices), device=self.device)

    def loss_sum(self, model: TransformerLM, micro_batch: PairBatch) -> Tensor:
        """Return the sum of the losses of the pairs."""
        loss_P, metrics = self.losses(model, micro_batch)
        for name, values_P in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + values_P.sum()
        self._sums["pairs"] = self._sums.get("pairs", 0.0) + self.weight(micro_batch)
        return loss_P.sum()

    def step_metrics(self) -> dict[str, float]:
        """Return the mean metrics of the step's pairs on this rank."""
        return {name: float(value / self._sums["pairs"]) for name, value in self._sums.items() if name != "pairs"}

    def evaluate(self, model: TransformerLM, is_final: bool) -> dict[str, float]:
        """Return loss, accuracy and margin of the held-out pairs: of ``eval_sequences`` pairs, at the end of all."""
        count = len(self.pairs) - self.train_count
        if not count:
            return {}
        used = count if is_final else min(count, self.train_config.eval_sequences)
        indices = [self.train_count + number * count // used for number in range(used)][self.rank :: self.world_size]
        sums = torch.zeros(4, dtype=torch.float64)  # on the CPU: MPS has no float64
        for start in range(0, len(indices), self.micro_batch_size):
            batch = self.make_batch(indices[start : start + self.micro_batch_size])
            loss_P, metrics = self.losses(model, batch)
            values = [loss_P.sum(), metrics["accuracy"].sum(), metrics["margin"].sum(), self.weight(batch)]
            sums += sums.new_tensor([float(value) for value in values])
        *totals, pairs = all_reduce_mean(sums).tolist()
        return {name: total / pairs for name, total in zip(self.metric_names, totals, strict=True)}


def encode_pair(tokenizer: Tokenizer, pair: PreferencePair) -> EncodedPair:
    """Return a pair as token ids in the chat template."""
    dialogs = ([*pair.prompt, Message(role="assistant", content=answer)] for answer in (pair.chosen, pair.rejected))
    (prompt, chosen), (_, rejected) = (encode_answer(tokenizer, dialog) for dialog in dialogs)
    return EncodedPair(prompt, chosen, rejected)
