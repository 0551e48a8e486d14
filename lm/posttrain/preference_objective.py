"""The objective of direct preference optimization: the better answer of a pair becomes more likely than the other."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lm.data.dialogs import PreferencePair
from lm.distributed.process_group import broadcast_from_rank0
from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM
from lm.posttrain.config import PreferenceConfig
from lm.posttrain.log_probs import get_response_log_probs
from lm.posttrain.masked import after_last
from lm.posttrain.pair_objective import PairBatch, PairObjective
from lm.posttrain.preference import compute_dpo_loss, compute_sequence_log_probs
from lm.posttrain.sft_objective import answer_prompts
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.metrics_file import append_rows

_REFERENCE = "reference.jsonl"


class PreferenceOptimization(PairObjective):
    """The objective of DPO (Rafailov et al. 2023).

    The reference is ``model`` as it is given here. Its log-probabilities are computed once, and stored in ``out`` for a
    resumed training. Pairs with an answer beyond the model's context are left out. Raises UserError if none remains.
    """

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
        # The last token is a label only.
        super().__init__(config.train, model, tokenizer, train, valid, digests, model.config.context_length + 1)
        self.config, self.model, self.out = config, model, out
        self._reference: list[list[float]] = []  # of each pair: chosen, rejected

    def restore(self, previous: Path, step: int) -> None:
        """Read the reference model's log-probabilities, or compute them while the model has its first weights."""
        if not self._reference and any(previous.glob("step-*")):
            rows = _read_reference(previous / _REFERENCE, len(self.pairs)) if self.rank == 0 else None
            self._reference = broadcast_from_rank0(rows) or self._compute_reference()

    def _compute_reference(self) -> list[list[float]]:
        rows: list[list[float]] = []
        for start in range(0, len(self.pairs), self.micro_batch_size):
            indices = range(start, min(start + self.micro_batch_size, len(self.pairs)))
            with torch.no_grad():
                log_probs = self._log_probs(self.model, self.make_batch(indices))
            rows += log_probs.unflatten(0, (2, -1)).T.tolist()
        return rows

    def _write_reference(self) -> None:
        if self.rank == 0 and not (self.out / _REFERENCE).exists():
            append_rows(self.out / _REFERENCE, ({"step": 0, "chosen": a, "rejected": b} for a, b in self._reference))

    def _log_probs(self, model: TransformerLM, batch: PairBatch) -> Tensor:
        scores = get_response_log_probs(model, batch.ids[:, :-1], batch.ids[:, 1:], return_token_entropy=False)
        return compute_sequence_log_probs(scores["log_probs"], batch.mask[:, 1:], self.config.is_length_normalized)

    def micro_batches(self, step: int) -> list[PairBatch]:
        """Return this rank's micro-batches of a step. Each epoch has all pairs in a new order."""
        self._reference = self._reference or self._compute_reference()
        self._write_reference()
        return super().micro_batches(step)

    def padding(self, micro_batch: PairBatch) -> Tensor:
        """Return which tokens are after the answer, (2 · pairs, T - 1) bool."""
        return after_last(micro_batch.mask[:, 1:])

    def losses(self, model: TransformerLM, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each pair, and the metadata of :func:`lm.posttrain.preference.compute_dpo_loss`."""
        chosen, rejected = self._log_probs(model, batch).chunk(2)
        rows = [self._reference[index] for index in batch.indices]
        reference_chosen, reference_rejected = torch.tensor(rows, dtype=torch.float64).to(chosen).unbind(-1)
        config = self.config
        return compute_dpo_loss(
            chosen, rejected, reference_chosen, reference_rejected, config.beta, config.label_smoothing
        )

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Answer the prompts of ``sample_prompts``."""
        return answer_prompts(model, self.tokenizer, self.train_config)


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
