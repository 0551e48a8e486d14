"""``torch.compile`` of the loss."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lm.train.compile
from lm.common.errors import UserError
from lm.data.batches import Batch
from lm.train.trainer import Trainer
from tests.helpers.training import small_trainer, weights_equal


@pytest.mark.parametrize("failure", ["at once", "after the backward pass", "none"])
def test_failing_compilation_warns_and_trains_without(
    tmp_path: Path, finished: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: str
) -> None:
    def fake_compile(loss: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        def compiled_loss(micro_batch: Batch) -> Tensor:
            if failure == "at once":
                raise RuntimeError("no C++ compiler\nsecond line")
            if failure == "after the backward pass":
                loss(micro_batch).backward()
                raise RuntimeError("no C++ compiler")
            return loss(micro_batch)

        return compiled_loss

    monkeypatch.setattr(torch, "compile", fake_compile)
    monkeypatch.setattr(lm.train.compile, "_MIN_FLOPS_TO_COMPILE", 0)
    with caplog.at_level(logging.WARNING, "lm.train"):
        trainer = small_trainer(tmp_path, compile=True)
    messages = [record.getMessage() for record in caplog.records]
    if failure == "none":
        assert messages == []
    else:
        assert len(messages) == 1 and messages[0].endswith("no C++ compiler")
    trainer.run()
    assert weights_equal(trainer.model, finished.model)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory.\nsecond line"), None])
def test_out_of_memory_in_the_compiled_step_is_a_user_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    """The training would need the memory without torch.compile too."""

    def fail(micro_batch: Batch) -> Tensor:
        if error:
            raise error
        return torch.empty(1 << 60)  # raises the CPU's out-of-memory error

    monkeypatch.setattr(torch, "compile", lambda loss: fail)
    monkeypatch.setattr(lm.train.compile, "_MIN_FLOPS_TO_COMPILE", 0)
    advice = (
        r"out of memory with micro-batches of 2 sequences of 16 .*train\.gradient_accumulation_steps \(now 2\).*"
        r"activation_checkpointing.*batch_size \(now 4\)"
    )
    with pytest.raises(UserError, match=advice):
        small_trainer(tmp_path, compile=True, gradient_accumulation_steps=2)
    assert not caplog.records


def test_short_runs_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda loss: pytest.fail("compiled"))
    small_trainer(tmp_path, compile=True)
