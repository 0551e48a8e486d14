"""Pretraining: batches and evaluation."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.checkpoint.training_checkpoint import load_model
from lm.common.errors import UserError
from lm.common.execution import Execution
from lm.data.batches import Batch
from lm.model.functional import cross_entropy
from lm.model.transformer import TransformerLM
from lm.train.pretraining import Job, make_trainer
from lm.train.trainer import Trainer
from tests.helpers.llamas import assert_same_weights
from tests.helpers.training import (
    MODEL,
    read_rows,
    small_data,
    small_trainer,
    train_config,
    train_here,
    validation_loss,
    write_job,
)


def test_micro_batches_add_up_to_the_batch(tmp_path: Path, finished: Trainer) -> None:
    trainer = small_trainer(tmp_path, gradient_accumulation_steps=4)
    sizes: set[int] = set()
    loss_sum = trainer.loss_sum

    def record_size(micro_batch: Batch) -> Tensor:
        sizes.add(len(micro_batch[0]))
        return loss_sum(micro_batch)

    trainer.loss_sum = record_size
    trainer.run()
    assert sizes == {1}
    for row, expected in zip(read_rows(tmp_path), read_rows(finished.out), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)


def test_an_epoch_has_all_windows(tmp_path: Path) -> None:
    data = small_data(train=5 * 16 + 1)
    trainer = small_trainer(tmp_path, data, data_order="shuffled_epochs", batch_size=5)
    epochs = [{tuple(row) for row in trainer.objective.micro_batches(step)[0][0].tolist()} for step in range(3)]
    windows = {tuple(row) for row in data.train[: 5 * 16].reshape(5, 16).tolist()}
    assert epochs == [windows] * 3
    trainer.run()
    assert read_rows(tmp_path)[-1]["loss"] < read_rows(tmp_path)[0]["loss"]


def test_evaluation_is_the_mean_over_whole_windows(finished: Trainer) -> None:
    valid, model = small_data().valid, finished.model
    assert valid is not None
    losses: list[float] = []
    with torch.no_grad():
        for first in range(0, 300, 16):
            window = torch.tensor(valid[first : first + 17].astype(np.int64))
            if len(window) == 17:
                losses.append(float(cross_entropy(model(window[None, :-1]), window[None, 1:])))
    assert len(losses) == 18
    assert validation_loss(finished) == pytest.approx(sum(losses) / 18, rel=1e-5)
    assert validation_loss(finished, 18) == validation_loss(finished, 10**9) == validation_loss(finished)
    assert validation_loss(finished, 1) == pytest.approx(losses[0], rel=1e-5)
    assert validation_loss(finished, 2) == pytest.approx((losses[0] + losses[17]) / 2, rel=1e-5)
    last = read_rows(finished.out)[-1]
    assert last["valid_loss"] == validation_loss(finished, finished.config.eval_sequences)


@pytest.mark.parametrize("size", [17, 32, 33])
def test_evaluation_of_short_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    trainer = small_trainer(tmp_path, small_data(valid=size))
    sequences: list[int] = []
    loss_sum = trainer.objective.loss_sum

    def record(model: TransformerLM, micro_batch: Batch) -> Tensor:
        sequences.append(len(micro_batch[0]))
        return loss_sum(model, micro_batch)

    monkeypatch.setattr(trainer.objective, "loss_sum", record)
    assert validation_loss(trainer) > 0
    assert sum(sequences) == (2 if size == 33 else 1)


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    losses = [validation_loss(small_trainer(tmp_path, batch_size=batch_size), 7) for batch_size in (1, 3, 7, 100)]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.parametrize(("sizes", "name"), [((16, 300), "training text"), ((2000, 16), "validation text")])
def test_text_shorter_than_the_context_is_a_user_error(tmp_path: Path, sizes: tuple[int, int], name: str) -> None:
    with pytest.raises(UserError, match=f"{name} has 16 tokens.*context of 16"):
        small_trainer(tmp_path, small_data(*sizes))


def test_shortest_text_that_trains(tmp_path: Path) -> None:
    small_trainer(tmp_path, small_data(17, 17), steps=2).run()


def test_another_vocab_size_than_the_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size is 300.*257"):
        small_trainer(tmp_path, model=replace(MODEL, vocab_size=300))


def test_a_job_continues_from_a_checkpoint(tmp_path: Path) -> None:
    """The first loss is that of the model before; without its checkpoint it is that of a new model."""
    jobs = [write_job(tmp_path / name, steps=6) for name in ("first", "new", "second")]
    train_here(Job.read(jobs[0]))
    start = jobs[0].parent / "step-0000006"
    job = Job.read(jobs[2])
    job.start, job.digests = "../../first/out/step-0000006", {**job.digests, "start": "s"}
    job.write(jobs[2])
    train_here(Job.read(jobs[2]))
    train_here(Job.read(jobs[1]))
    trainer = Job.read(jobs[2]).make_trainer(tmp_path / "other", torch.device("cpu"))
    assert_same_weights(trainer.model, load_model(start))
    [(x, y)] = trainer.objective.micro_batches(0)
    with torch.no_grad():
        expected = cross_entropy(load_model(start)(x), y).item()
    losses = [read_rows(path.parent)[0]["loss"] for path in jobs]
    assert losses[2] == pytest.approx(expected, abs=1e-5)
    assert losses[1] == losses[0] > expected + 0.5


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path / "first", steps=1)
    trainer.run()
    wider = replace(MODEL, d_ff=96)
    start = tmp_path / "first" / "step-0000001"
    with pytest.raises(UserError, match=r"does not fit the model: layers\.0\.ffn\.w1\.weight is \(64, 32\)"):
        make_trainer(train_config(), wider, small_data(), Execution(device="cpu"), tmp_path, start=start)


def test_a_model_that_does_not_fit_memory_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"builds the whole model in float32.*smaller model"):
        small_trainer(tmp_path, model=replace(MODEL, d_ff=1 << 42), check_memory=False)
