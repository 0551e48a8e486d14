"""Trainings that fail: divergence, full disk, out of memory."""

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lm.checkpoint.training_checkpoint import load_model, newest_checkpoint
from lm.common.errors import DivergedError, UserError
from lm.data.batches import Batch
from lm.model.transformer import TransformerLM
from lm.train.skipped_steps import SkippedSteps
from tests.helpers.training import read_rows, small_trainer


@pytest.mark.parametrize("reads_each_step", [True, False])
@pytest.mark.parametrize("log_interval", [1, 100])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_diverged_loss_is_a_user_error_that_names_the_checkpoint(
    tmp_path: Path, log_interval: int, bad: float, reads_each_step: bool
) -> None:
    trainer = small_trainer(tmp_path, log_interval=log_interval, checkpoint_interval=4, sample_prompts=[])
    trainer.reads_each_step = reads_each_step
    loss_sum = trainer.loss_sum
    trainer.loss_sum = lambda micro_batch: loss_sum(micro_batch) * (bad if trainer.step >= 8 else 1.0)
    with pytest.raises(DivergedError, match=r"diverged.*max_lr.*step-0000008"):
        trainer.run()
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-0000008"
    assert all(tensor.isfinite().all() for tensor in load_model(newest).state_dict().values())
    assert all(math.isfinite(row["loss"]) for row in read_rows(tmp_path))


@pytest.mark.parametrize("reads_each_step", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_with_non_finite_loss_or_gradient_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optimizer: str, bad: str, reads_each_step: bool
) -> None:
    """The host skips the step, or on a GPU the optimizers do, without a wait of the host."""
    trainer = small_trainer(tmp_path, optimizer=optimizer)
    trainer.reads_each_step = reads_each_step
    loss_sum = trainer.loss_sum
    bad_steps = {5, 6, 12}
    states: dict[int, Any] = {}

    def make_non_finite(micro_batch: Batch) -> Tensor:
        states[trainer.step] = copy.deepcopy((trainer.model.state_dict(), [o.state_dict() for o in trainer.optimizers]))
        loss = loss_sum(micro_batch)
        if trainer.step not in bad_steps:
            return loss
        if bad == "gradient":
            loss.register_hook(lambda gradient: gradient * math.nan)
        return loss * (math.inf if bad == "loss" else 1.0)

    trainer.loss_sum = make_non_finite
    with caplog.at_level(logging.WARNING, "lm.train.skipped_steps"):
        result = trainer.run()
    assert result["steps"] == 20 and result["skipped_steps"] == 3
    messages = [record.getMessage() for record in caplog.records if record.name == "lm.train.skipped_steps"]
    assert all(message.endswith("steps skipped: 1.") for message in messages)
    # Without a read in each step, it reads for a line of the log, an evaluation, and a line and a checkpoint.
    read_at = [6, 7, 13] if reads_each_step else [6, 8, 15]
    assert [message.partition(":")[0] for message in messages] == [f"Step {step}" for step in read_at]
    for step in bad_steps:
        (before, optimizers_before), (after, optimizers_after) = states[step], states[step + 1]
        assert all(torch.equal(before[name], after[name]) for name in before)
        for state_before, state_after in zip(optimizers_before, optimizers_after, strict=True):
            for state in (*state_before["state"].values(), *state_after["state"].values()):
                if not reads_each_step:
                    state.pop("t", None)  # of AdamW, which counts the step
            torch.testing.assert_close(state_before["state"], state_after["state"], rtol=0, atol=0)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, file: str) -> None:
    """A limit on the file size simulates a full disk. The writers of torch and safetensors reach it in native code."""
    resource = pytest.importorskip("resource", reason="needs limits of the operating system")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    trainer = small_trainer(tmp_path / "first")

    def fill(step: int) -> None:
        if step == 9:
            trainer.writer.wait()
            size = (tmp_path / "first" / "step-0000005" / file).stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, hard))

    try:
        with pytest.raises(
            UserError, match=r"step 10 cannot be saved in .*File too large.*resumes from .*step-000000[58]"
        ):
            trainer.run(fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "first").glob(".step-*")), "no temporary files fill the disk"
    second = small_trainer(tmp_path / "second")
    assert second.resume(tmp_path / "first")
    second.run()


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    trainer = small_trainer(tmp_path)
    trainer.step = 1  # as if resumed, so that samples.jsonl is not deleted
    with pytest.raises(UserError, match=r"samples\.jsonl cannot be written"):
        trainer.run()


def test_a_result_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "training.json").mkdir()
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        small_trainer(tmp_path, steps=1).run()


def test_a_row_of_skipped_steps_that_ended_before_a_read_is_noticed(tmp_path: Path) -> None:
    """The host reads the counts only now and then; the training has diverged nevertheless."""
    steps = SkippedSteps(torch.device("cpu"))
    for loss in (*[math.nan] * 5, 1.0):
        steps.check(torch.tensor(loss), torch.tensor(1.0))
    with pytest.raises(UserError, match="5 steps in a row were skipped: the training has diverged"):
        steps.read(6, tmp_path, lambda: None)


def test_diverged_before_any_checkpoint(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path)
    loss_sum = trainer.loss_sum
    trainer.loss_sum = lambda micro_batch: loss_sum(micro_batch) * math.nan
    with pytest.raises(UserError, match=r"diverged.*no checkpoint"):
        trainer.run()


def test_a_divergence_that_cannot_be_recorded_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "diverged.json").mkdir()
    trainer = small_trainer(tmp_path)
    loss_sum = trainer.loss_sum
    trainer.loss_sum = lambda micro_batch: loss_sum(micro_batch) * math.nan
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        trainer.run()


@pytest.mark.parametrize("where", ["step", "evaluation"])
def test_out_of_memory_later_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    trainer = small_trainer(tmp_path)
    loss_sum = trainer.objective.loss_sum

    def fail(model: TransformerLM, micro_batch: Batch) -> Tensor:
        is_failing = torch.is_grad_enabled() == (where == "step")
        return torch.empty(1 << 60) if is_failing else loss_sum(model, micro_batch)

    monkeypatch.setattr(trainer.objective, "loss_sum", fail)
    with pytest.raises(
        UserError, match=r"cpu is out of memory.*train\.gradient_accumulation_steps.*can't allocate memory"
    ):
        trainer.run()
