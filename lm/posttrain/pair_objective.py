"""The part of an objective on pairs of answers that does not depend on its loss."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.data.batches import shuffled_indices
from lm.data.chat_template import EncodedExample, encode_chat_prompt, encode_dialog
from lm.data.dialogs import Message, PreferencePair
from lm.distributed.process_group import all_reduce_mean, get_rank, get_world_size
from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig


class PairBatch(NamedTuple):
    """Pairs as rows: the first half holds the chosen answers, the second the rejected."""

    indices: list[int]
    """Indices of the pairs."""
    ids: Tensor
    """(2 · pairs, T) int64, padded on the right."""
    mask: Tensor
    """(2 · pairs, T) bool: the tokens of the answer."""


class PairObjective(ABC):
    """An objective (:class:`lm.train.objective.Objective`) whose loss is a sum over pairs of answers.

    Pairs with a dialog of more than ``max_tokens`` tokens are left out. Raises UserError if none remains.
    """

    metric_names: Sequence[str] = ("valid_loss", "valid_accuracy", "valid_margin")
    is_higher_better = False
    is_prefetchable = False
    is_compilable = False
    tokens_per_step = 0

    def __init__(
        self,
        train_config: TrainConfig,
        model: TransformerLM,
        tokenizer: Tokenizer,
        train: Sequence[PreferencePair],
        valid: Sequence[PreferencePair],
        digests: dict[str, str],
        max_tokens: int,
    ) -> None:
        self.train_config, self.tokenizer, self.digests = train_config, tokenizer, digests
        self.device = next(model.parameters()).device
        encoded = [[encode_pair(tokenizer, pair) for pair in pairs] for pairs in (train, valid)]
        kept = [
            [pair for pair in pairs if max(len(example.ids) for example in pair) <= max_tokens] for pairs in encoded
        ]
        self.left_out = len(encoded[0]) - len(kept[0])
        if not kept[0]:
            raise UserError(
                f"No pair of answers is within the model's context of {model.config.context_length} tokens; use a "
                "model with a longer context, or shorter answers."
            )
        self.train_count = len(kept[0])
        self.pairs = kept[0] + kept[1]
        self.rank, self.world_size = get_rank(), get_world_size()
        self.local_batch_size = train_config.batch_size // self.world_size
        self.micro_batch_size = self.local_batch_size // train_config.gradient_accumulation_steps
        self._sums: dict[str, Tensor] = {}  # of the metadata of the step

    @abstractmethod
    def losses(self, model: TransformerLM, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each pair (pairs,), and metrics of each pair: ``accuracy``, ``margin`` and others."""

    def make_batch(self, indices: Sequence[int]) -> PairBatch:
        """Return the pairs with these indices."""
        examples = [self.pairs[index][side] for side in (0, 1) for index in indices]
        length = max(len(example.ids) for example in examples)
        ids = torch.zeros(len(examples), length, dtype=torch.int64)
        mask = torch.zeros(len(examples), length, dtype=torch.bool)
        for row, example in enumerate(examples):
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
            mask[row, : len(example.ids)] = torch.tensor(example.is_target)
        return PairBatch(list(indices), ids.to(self.device), mask.to(self.device))

    def micro_batches(self, step: int) -> list[PairBatch]:
        """Return this rank's micro-batches of a step. Each epoch has all pairs in a new order."""
        self._sums = {}
        config, size = self.train_config, self.micro_batch_size
        first = step * config.batch_size + self.rank * self.local_batch_size
        indices = shuffled_indices(self.train_count, first, self.local_batch_size, config.seed).tolist()
        return [self.make_batch(indices[start : start + size]) for start in range(0, len(indices), size)]

    def used_indices(self) -> list[int]:
        """Return the indices of the pairs that the steps use, in their order, and of all held-out pairs."""
        config, count = self.train_config, self.train_count
        used = shuffled_indices(count, 0, min(count, config.steps * config.batch_size), config.seed)
        return [*used.tolist(), *range(count, len(self.pairs))]

    def weight(self, micro_batch: PairBatch) -> Tensor:
        """Return the number of pairs."""
        return torch.tensor(len(micro_batch.indices), device=self.device)

    @abstractmethod
    def padding(self, micro_batch: PairBatch) -> Tensor:
        """See :class:`lm.train.objective.Objective`."""

    def loss_sum(self, model: TransformerLM, micro_batch: PairBatch) -> Tensor:
        """Return the sum of the losses of the pairs."""
        loss, metrics = self.losses(model, micro_batch)
        for name, values in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + values.sum()
        self._sums["pairs"] = self._sums.get("pairs", 0.0) + self.weight(micro_batch)
        return loss.sum()

    def step_metrics(self) -> dict[str, float]:
        """Return the mean metrics of the step's pairs on this rank."""
        return {name: float(value / self._sums["pairs"]) for name, value in self._sums.items() if name != "pairs"}

    @abstractmethod
    def restore(self, previous: Path, step: int) -> None:
        """See :class:`lm.train.objective.Objective`."""

    def evaluate(self, model: TransformerLM, is_final: bool) -> dict[str, float]:
        """Return loss, accuracy and margin of the held-out pairs: of ``eval_sequences`` pairs, at the end of all."""
        count = len(self.pairs) - self.train_count
        if not count:
            return {}
        used = count if is_final else min(count, self.train_config.eval_sequences)
        indices = [self.train_count + place * count // used for place in range(used)][self.rank :: self.world_size]
        sums = torch.zeros(4, dtype=torch.float64)  # on the CPU: MPS has no float64
        for start in range(0, len(indices), self.micro_batch_size):
            batch = self.make_batch(indices[start : start + self.micro_batch_size])
            loss, metrics = self.losses(model, batch)
            values = [loss.sum(), metrics["accuracy"].sum(), metrics["margin"].sum(), self.weight(batch)]
            sums += sums.new_tensor([float(value) for value in values])
        *totals, pairs = all_reduce_mean(sums).tolist()
        return {name: total / pairs for name, total in zip(self.metric_names, totals, strict=True)}

    @abstractmethod
    def sample(self, model: TransformerLM) -> list[Completion]:
        """See :class:`lm.train.objective.Objective`."""


def encode_pair(tokenizer: Tokenizer, pair: PreferencePair) -> tuple[EncodedExample, EncodedExample]:
    """Return the chosen and the rejected dialog. Only the last answer is a target."""
    prompt_length = len(encode_chat_prompt(tokenizer, pair.prompt))
    dialogs = []
    for answer in (pair.chosen, pair.rejected):
        ids = encode_dialog(tokenizer, [*pair.prompt, Message(role="assistant", content=answer)]).ids
        dialogs.append(EncodedExample(ids, [place >= prompt_length for place in range(len(ids))]))
    return dialogs[0], dialogs[1]
