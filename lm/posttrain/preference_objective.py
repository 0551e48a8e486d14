"""The objective of direct preference optimization: the better answer of a pair becomes more likely than the other."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lm.common.errors import UserError
from lm.data.chat_template import EncodedExample, encode_dialog
from lm.data.dialogs import Message, PreferencePair
from lm.data.shuffle import shuffled_indices
from lm.distributed.process_group import all_reduce_mean, broadcast_from_rank0, get_rank, get_world_size
from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM
from lm.posttrain.config import PreferenceConfig
from lm.posttrain.log_probs import get_response_log_probs
from lm.posttrain.preference import compute_dpo_loss, compute_sequence_log_probs
from lm.posttrain.sft_objective import answer_prompts
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.metrics_file import format_row

_REFERENCE = "reference.jsonl"
_METADATA = ("accuracy", "margin", "chosen_reward", "rejected_reward")


class PairBatch(NamedTuple):
    """Pairs as rows: the first half holds the chosen answers, the second the rejected."""

    input_ids: Tensor
    """(2 · pairs, T) int64, padded on the right."""
    labels: Tensor
    """(2 · pairs, T) int64."""
    mask: Tensor
    """(2 · pairs, T) bool: the labels of the answer."""
    reference: Tensor
    """(2 · pairs,): log-probability of each answer under the reference model, in nats."""


class PreferenceOptimization:
    """The objective (:class:`lm.train.objective.Objective`) of DPO (Rafailov et al. 2023).

    The reference is ``model`` as it is given here. Its log-probabilities are computed once, and stored in ``out`` for a
    resumed training. Pairs with an answer beyond the model's context are left out. Raises UserError if none remains.
    """

    metric_names: Sequence[str] = ("valid_loss", "valid_accuracy", "valid_margin")
    is_higher_better = False
    is_prefetchable = False
    is_compilable = False
    tokens_per_step = 0

    def __init__(
        self,
        config: PreferenceConfig,
        model: TransformerLM,
        tokenizer: Tokenizer,
        train: Sequence[PreferencePair],
        valid: Sequence[PreferencePair],
        digests: dict[str, str],
        out: Path,
    ) -> None:
        self.config, self.model, self.tokenizer, self.digests, self.out = config, model, tokenizer, digests, out
        self.device = next(model.parameters()).device
        context_length = model.config.context_length
        encoded = [[encode_pair(tokenizer, pair) for pair in pairs] for pairs in (train, valid)]
        kept = [
            [pair for pair in pairs if max(len(example.ids) for example in pair) <= context_length + 1]
            for pairs in encoded
        ]
        self.left_out = len(encoded[0]) - len(kept[0])
        if not kept[0]:
            raise UserError(
                f"No pair of answers is within the model's context of {context_length} tokens; use a model with a "
                "longer context, or shorter answers."
            )
        self.train_count = len(kept[0])
        self.pairs = kept[0] + kept[1]
        self.rank, self.world_size = get_rank(), get_world_size()
        self.local_batch_size = config.train.batch_size // self.world_size
        self.micro_batch_size = self.local_batch_size // config.train.gradient_accumulation_steps
        self._reference: list[list[float]] = []  # of each pair: chosen, rejected
        self._sums: dict[str, Tensor] = {}  # of the metadata of the step

    def restore(self, previous: Path) -> None:
        """Read the reference model's log-probabilities, or compute them while the model has its first weights."""
        if not self._reference and any(previous.glob("step-*")):
            rows = _read_reference(previous / _REFERENCE, len(self.pairs)) if self.rank == 0 else None
            self._reference = broadcast_from_rank0(rows) or self._compute_reference()

    def _compute_reference(self) -> list[list[float]]:
        rows: list[list[float]] = []
        for start in range(0, len(self.pairs), self.micro_batch_size):
            indices = range(start, min(start + self.micro_batch_size, len(self.pairs)))
            with torch.no_grad():
                log_probs = self._log_probs(self.model, self._batch(indices))
            rows += log_probs.double().unflatten(0, (2, -1)).T.tolist()
        return rows

    def _write_reference(self) -> None:
        if self.rank == 0 and not (self.out / _REFERENCE).exists():
            content = "".join(format_row({"step": 0, "chosen": a, "rejected": b}) for a, b in self._reference)
            (self.out / _REFERENCE).write_text(content, encoding="utf-8")

    def _batch(self, indices: Sequence[int]) -> PairBatch:
        examples = [self.pairs[index][side] for side in (0, 1) for index in indices]
        length = max(len(example.ids) for example in examples)
        ids = torch.zeros(len(examples), length, dtype=torch.int64)
        mask = torch.zeros(len(examples), length, dtype=torch.bool)
        for row, example in enumerate(examples):
            ids[row, : len(example.ids)] = torch.tensor(example.ids)
            mask[row, : len(example.ids)] = torch.tensor(example.is_target)
        reference = [self._reference[index][side] for side in (0, 1) for index in indices] if self._reference else []
        parts = (ids[:, :-1], ids[:, 1:], mask[:, 1:], torch.tensor(reference, dtype=torch.float64))
        return PairBatch(*(part.to(self.device) for part in parts))

    def _log_probs(self, model: TransformerLM, batch: PairBatch) -> Tensor:
        log_probs = get_response_log_probs(model, batch.input_ids, batch.labels, return_token_entropy=False)
        return compute_sequence_log_probs(log_probs["log_probs"], batch.mask, self.config.is_length_normalized)

    def micro_batches(self, step: int) -> list[PairBatch]:
        """Return this rank's micro-batches of a step. Each epoch has all pairs in a new order."""
        self._reference = self._reference or self._compute_reference()
        self._write_reference()
        self._sums = {}
        first = step * self.config.train.batch_size + self.rank * self.local_batch_size
        indices = shuffled_indices(self.train_count, first, self.local_batch_size, self.config.train.seed).tolist()
        size = self.micro_batch_size
        return [self._batch(indices[start : start + size]) for start in range(0, len(indices), size)]

    def weight(self, micro_batch: PairBatch) -> Tensor:
        """Return the number of pairs."""
        return torch.tensor(len(micro_batch.reference) // 2, device=self.device)

    def loss_sum(self, model: TransformerLM, micro_batch: PairBatch) -> Tensor:
        """Return the sum of the losses of the pairs."""
        loss, metadata = self._losses(model, micro_batch)
        for name in _METADATA:
            self._sums[name] = self._sums.get(name, 0.0) + metadata[name].sum()
        self._sums["pairs"] = self._sums.get("pairs", 0.0) + self.weight(micro_batch)
        return loss.sum()

    def _losses(self, model: TransformerLM, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, rejected = self._log_probs(model, batch).chunk(2)
        reference_chosen, reference_rejected = batch.reference.to(chosen.dtype).chunk(2)
        return compute_dpo_loss(
            chosen, rejected, reference_chosen, reference_rejected, self.config.beta, self.config.label_smoothing
        )

    def step_metrics(self) -> dict[str, float]:
        """Return accuracy, margin and implicit rewards of the step's pairs on this rank."""
        return {name: float(self._sums[name] / self._sums["pairs"]) for name in _METADATA if name in self._sums}

    def evaluate(self, model: TransformerLM, is_final: bool) -> dict[str, float]:
        """Return loss, accuracy and margin of the held-out pairs: of ``eval_sequences`` pairs, at the end of all."""
        count = len(self.pairs) - self.train_count
        if not count:
            return {}
        used = count if is_final else min(count, self.config.train.eval_sequences)
        indices = [self.train_count + place * count // used for place in range(used)][self.rank :: self.world_size]
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        for start in range(0, len(indices), self.micro_batch_size):
            batch = self._batch(indices[start : start + self.micro_batch_size])
            loss, metadata = self._losses(model, batch)
            values = [loss.sum(), metadata["accuracy"].sum(), metadata["margin"].sum(), self.weight(batch)]
            sums += torch.stack([value.double() for value in values])
        *totals, pairs = all_reduce_mean(sums).tolist()
        return {name: total / pairs for name, total in zip(self.metric_names, totals, strict=True)}

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Answer the prompts of ``sample_prompts``."""
        return answer_prompts(model, self.tokenizer, self.config.train)


def encode_pair(tokenizer: Tokenizer, pair: PreferencePair) -> tuple[EncodedExample, EncodedExample]:
    """Return the chosen and the rejected dialog. Only the last answer is a target."""
    chosen, rejected = (
        encode_dialog(tokenizer, [*pair.prompt, Message(role="assistant", content=answer)])
        for answer in (pair.chosen, pair.rejected)
    )
    return chosen, rejected


def _read_reference(path: Path, count: int) -> list[list[float]]:
    """Return the log-probabilities of ``count`` pairs, or nothing if the file is not complete."""
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        values = [[float(row["chosen"]), float(row["rejected"])] for row in rows]
    except (ValueError, KeyError, TypeError):
        return []
    return values if len(values) == count else []
