"""The objective of direct preference optimization: the better answer of a pair becomes more likely than the other."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lm.common.errors import translate_write_errors
from lm.data.dialogs import PreferencePair
from lm.distributed.process_group import all_gather, broadcast_from_rank0
from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM
from lm.posttrain.config import PreferenceConfig
from lm.posttrain.log_probs import get_response_log_probs
from lm.posttrain.masked import after_last
from lm.posttrain.pair_objective import PairBatch, PairObjective
from lm.posttrain.preference import compute_dpo_loss, compute_sequence_log_probs
from lm.posttrain.sft_objective import answer_prompts
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.tracking import iterate_metrics, write_metrics

_REFERENCE = "reference.jsonl"


class PreferenceOptimization(PairObjective):
    """The objective of DPO (Rafailov et al. 2023).

    The reference is ``model`` as it is given here. Its log-probabilities of the pairs that the training uses are
    computed once, and stored in ``out`` for a resumed training. Pairs with an answer beyond the model's context are
    left out. Raises UserError if none remains.
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
        self._reference: dict[int, list[float]] = {}  # by index of the pair: chosen, rejected
        self._is_stored = False

    def restore(self, previous: Path, step: int) -> None:
        """Read the reference model's log-probabilities, and compute missing ones: the model has its first weights."""
        if step > 0:
            stored = _read_reference(previous / _REFERENCE) if self.rank == 0 else None
            self._reference = broadcast_from_rank0(stored)
            self._compute_missing_reference()

    def _compute_missing_reference(self) -> None:
        """Compute the log-probabilities that the training lacks: each rank a part, for all ranks.

        A resumed training may lack some because it has more steps than before.
        """
        missing = [index for index in self.used_indices() if index not in self._reference]
        size = self.micro_batch_size
        batches = [missing[start : start + size] for start in range(0, len(missing), size)]
        computed: dict[int, list[float]] = {}
        for indices in batches[self.rank :: self.world_size]:
            with torch.no_grad():
                log_probs = self._log_probs(self.model, self.make_batch(indices))
            computed |= zip(indices, log_probs.unflatten(0, (2, -1)).T.tolist(), strict=True)
        gathered = {index: row for part in all_gather(computed) for index, row in part.items()}
        self._reference |= {index: gathered[index] for index in missing}

    def _write_reference(self) -> None:
        if self.rank == 0:
            path, items = self.out / _REFERENCE, self._reference.items()
            with translate_write_errors(path):
                write_metrics(path, ({"step": 0, "pair": i, "chosen": a, "rejected": b} for i, (a, b) in items))

    def _log_probs(self, model: TransformerLM, batch: PairBatch) -> Tensor:
        scores = get_response_log_probs(model, batch.ids[:, :-1], batch.ids[:, 1:], return_token_entropy=False)
        return compute_sequence_log_probs(scores["log_probs"], batch.mask[:, 1:], self.config.is_length_normalized)

    def micro_batches(self, step: int) -> list[PairBatch]:
        """Return this rank's micro-batches of a step. Each epoch has all pairs in a new order."""
        if not self._is_stored:  # in the first call
            if not self._reference:
                self._compute_missing_reference()
            self._write_reference()
            self._is_stored = True
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


def _read_reference(path: Path) -> dict[int, list[float]]:
    """Return the log-probabilities by index of the pair, or nothing if a row is not one of them."""
    try:
        return {int(row["pair"]): [float(row["chosen"]), float(row["rejected"])] for row in iterate_metrics(path)}
    except (ValueError, KeyError, TypeError):
        return {}
