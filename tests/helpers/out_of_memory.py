"""``python -m tests.helpers.out_of_memory JOB`` trains as ``lm.train``, but rank 1 runs out of memory in a step."""

import itertools
import os

import torch
from torch import Tensor

from lm.data.batches import Batch
from lm.model.transformer import TransformerLM
from lm.train.__main__ import run_as_program
from lm.train.pretraining import Pretraining

FAILING_RANK = 1
FAILING_STEP = 7


def main() -> None:
    loss_sum, steps = Pretraining.loss_sum, itertools.count(1)

    def fail_later(self: Pretraining, model: TransformerLM, micro_batch: Batch) -> Tensor:
        if torch.is_grad_enabled() and next(steps) == FAILING_STEP:
            return torch.empty(1 << 60)
        return loss_sum(self, model, micro_batch)

    if int(os.environ["RANK"]) == FAILING_RANK:
        Pretraining.loss_sum = fail_later  # type: ignore[method-assign]
    run_as_program()


if __name__ == "__main__":
    main()
