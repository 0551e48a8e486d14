"""The objective of direct preference optimization: the better answer of a pair becomes more likely than the other."""

from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from lm.common.errors import translate_write_errors
from lm.data.batches import shuffled_indices
from lm.data.dialogs import PreferencePair
from lm.distributed.process_group import all_gather, call_on_rank0
from lm.inference.completion import Completion
from lm.model.adapter import adapter_off
from lm.model.transformer import TransformerLM
from lm.posttrain.config import DPOConfig
from lm.posttrain.job import ObjectiveInputs, PosttrainJob
from lm.posttrain.losses.dpo import compute_dpo_loss, score_responses
from lm.posttrain.losses.log_probs import after_last
from lm.posttrain.objectives.generation import answer_prompts
from lm.posttrain.objectives.pairs import PairBatch, PairObjective
from lm.train.tracking import iterate_metrics, write_metrics

_REFERENCE = "reference.jsonl"


class DPO(PairObjective):
    """The objective of DPO (Rafailov et al. 2023).

    The reference is ``model`` as it is given here. Its log-probabilities of the pairs that the training uses are
    computed once, and stored in ``out`` for a resumed training. Pairs with an answer beyond the model's context are
    left out. Raises UserError if none remains.
    """

    def __init__(self, config: DPOConfig, inputs: ObjectiveInputs[PreferencePair]) -> None:
        # The last token is a label only.
        super().__init__(config.train, inputs, inputs.model.config.context_length + 1)
        self.config, self.model, self.out = config, inputs.model, inputs.out
        self._reference: dict[int, list[float]] = {}  # by index of the pair: chosen, rejected
        self._is_stored = False

    @classmethod
    def from_job(cls, job: PosttrainJob, inputs: ObjectiveInputs[PreferencePair]) -> Self:
        """Return the objective of a job."""
        return cls(DPOConfig(train=job.config, **job.settings), inputs)

    def restore(self, previous: Path, step: int) -> None:
        """Read the reference model's log-probabilities, and compute missing ones: the model has its first weights."""

        def read() -> dict[int, list[float]]:
            rows = iterate_metrics(previous / _REFERENCE)
            try:
                return {int(row["pair"]): [float(row["chosen"]), float(row["rejected"])] for row in rows}
            except (ValueError, KeyError, TypeError):  # a row is not of this file: all are computed again
                return {}

        if step > 0:
            self._reference = call_on_rank0(read)
            self._compute_missing_reference()

    def _compute_missing_reference(self) -> None:
        """Compute the log-probabilities that the training lacks: each rank a share, for all ranks.

        They are those of the pairs that the steps use, in their order, and of all held-out pairs. A resumed training
        may lack some because it has more steps than before.
        """
        config, count, size = self.train_config, self.train_count, self.micro_batch_size
        used = shuffled_indices(count, 0, min(count, config.steps * config.batch_size), config.seed).tolist()
        missing = [index for index in (*used, *range(count, len(self.pairs))) if index not in self._reference]
        batches = [missing[start : start + size] for start in range(0, len(missing), size)]
        computed: dict[int, list[float]] = {}
        for indices in batches[self.rank :: self.world_size]:
            with torch.no_grad(), adapter_off(self.model):
                log_probs_B = self._log_probs(self.model, self.make_batch(indices))
            computed |= zip(indices, log_probs_B.unflatten(0, (2, -1)).T.tolist(), strict=True)
        gathered = {index: row for part in all_gather(computed) for index, row in part.items()}
        self._reference |= {index: gathered[index] for index in missing}

    def _log_probs(self, model: TransformerLM, batch: PairBatch) -> Tensor:
        return score_responses(model, batch.ids, batch.mask, self.config.is_length_normalized)

    def micro_batches(self, step: int) -> list[PairBatch]:
        """Return this rank's micro-batches of a step. Each epoch has all pairs in a new order."""
        if not self._is_stored:  # in the first call
            if not self._reference:
                self._compute_missing_reference()
            if self.rank == 0:
                path, items = self.out / _REFERENCE, self._reference.items()
                with translate_write_errors(path):
                    write_metrics(path, ({"step": 0, "pair": i, "chosen": a, "rejected": b} for i, (a, b) in items))
            self._is_stored = True
        return super().micro_batches(step)

    def padding(self, micro_batch: PairBatch) -> Tensor:
        """Return which tokens are after the answer, (B, T - 1) bool."""
        return after_last(micro_batch.mask[:, 1:])

    def losses(self, model: TransformerLM, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each pair, and the metadata of :func:`lm.posttrain.losses.dpo.compute_dpo_loss`."""
        chosen_P, rejected_P = self._log_probs(model, batch).chunk(2)
        rows = [self._reference[index] for index in batch.indices]
        reference_chosen_P, reference_rejected_P = torch.tensor(rows, dtype=torch.float64).to(chosen_P).unbind(-1)
        beta, label_smoothing = self.config.beta, self.config.label_smoothing
        return compute_dpo_loss(chosen_P, rejected_P, reference_chosen_P, reference_rejected_P, beta, label_smoothing)

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Answer the prompts of ``sample_prompts``."""
        return answer_prompts(model, self.tokenizer, self.train_config)
