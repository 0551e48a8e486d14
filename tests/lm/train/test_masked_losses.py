"""Masked targets: all other targets weigh the same, in any micro-batch and process."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lm.train.pretraining
from lm.data.batches import Batch, gather_batch
from lm.model.functional import IGNORE_INDEX
from lm.model.transformer import TransformerLM
from lm.train.pretraining import Pretraining
from lm.train.trainer import Trainer
from tests.helpers.ranks import rank_of_test, run_ranks
from tests.helpers.training import small_data, small_trainer

UNMASKED_TARGETS = [16, 1, 0, 5]  # of the 16 targets in each of four sequences


def masked_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(97, 107, (4, 17), generator=generator)
    x, y = ids[:, :-1], ids[:, 1:].clone()
    for row, count in zip(y, UNMASKED_TARGETS, strict=True):
        row[torch.randperm(16, generator=generator)[count:]] = IGNORE_INDEX
    return x, y


def masked_loss(model: TransformerLM, batch: Batch, reduction: str = "sum") -> Tensor:
    x, y = batch
    logits = model(x).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)


def step_results(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    """Return loss, norm and gradients of a training step with the plain loss."""
    trainer.loss_sum = partial(masked_loss, trainer.model)
    gradients: dict[str, Tensor] = {}
    for optimizer in trainer.optimizers:
        optimizer.step = lambda: gradients.update(  # type: ignore[method-assign, assignment]
            {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
        )
    parts = trainer.config.gradient_accumulation_steps
    loss, norm, _ = trainer.train_step(list(zip(*(tensor.chunk(parts) for tensor in batch), strict=True)), 1e-3)
    return {"loss": loss, "norm": norm, "gradients": gradients}


def reference(trainer: Trainer) -> dict[str, Any]:
    """Return loss, norm and gradients of the mean over the whole batch."""
    loss = masked_loss(trainer.model, masked_batch(), "mean")
    parameters = dict(trainer.model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    return {"loss": loss.detach(), "norm": norm, "gradients": dict(zip(parameters, gradients, strict=True))}


def settings(gradient_accumulation_steps: int) -> dict[str, Any]:
    return {"gradient_accumulation_steps": gradient_accumulation_steps, "max_grad_norm": 1e9}  # nothing is clipped


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 2, 4])
def test_micro_batches_weigh_by_their_tokens(tmp_path: Path, gradient_accumulation_steps: int) -> None:
    trainer = small_trainer(tmp_path, **settings(gradient_accumulation_steps))
    expected = reference(trainer)
    torch.testing.assert_close(step_results(trainer, masked_batch()), expected)


def main() -> None:
    """Be a rank of the next test."""
    with rank_of_test() as rank:
        x, y = (tensor[2 * rank : 2 * rank + 2] for tensor in masked_batch())
        for steps in (1, 2):
            trainer = small_trainer(Path(sys.argv[1]) / f"out-{steps}", **settings(steps))
            torch.save(step_results(trainer, (x, y)), Path(sys.argv[1]) / f"{steps}-{rank}.pt")


@pytest.mark.slow
def test_processes_weigh_by_their_tokens(tmp_path: Path) -> None:
    """Rank 0 has 17 unmasked targets, rank 1 has 5."""
    run_ranks(__name__, tmp_path, world_size=2)
    for steps in (1, 2):  # of gradient accumulation
        expected = reference(small_trainer(tmp_path / f"alone-{steps}", **settings(steps)))
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{steps}-{rank}.pt", weights_only=True), expected)


@pytest.mark.parametrize("gradient_accumulation_steps", [1, 4])
def test_evaluation_weighs_by_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gradient_accumulation_steps: int
) -> None:
    def gather_masked_batch(*arguments: Any) -> Batch:
        x, y = gather_batch(*arguments)
        return x, y.masked_fill(y % 4 != 0, IGNORE_INDEX)

    trainer = small_trainer(tmp_path, **settings(gradient_accumulation_steps))
    objective, valid = trainer.objective, small_data().valid
    assert isinstance(objective, Pretraining) and valid is not None
    starts = list(range(0, len(valid) - 16, 16))
    with torch.no_grad():
        expected = masked_loss(trainer.model, gather_masked_batch(valid, starts, 16, "cpu"), "mean")
    monkeypatch.setattr(lm.train.pretraining, "gather_batch", gather_masked_batch)
    monkeypatch.setattr(objective, "loss_sum", masked_loss)
    assert objective.validation_loss(trainer.model) == pytest.approx(float(expected), rel=1e-6)
