"""Pretraining on a mixture of sources: batches of all ranks, and the losses of the sources."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lm.common.errors import UserError
from lm.data.mixed_batches import MixedSource
from lm.train.pretraining import Job, TrainData
from tests.helpers.training import MODEL, byte_tokenizer, read_rows, small_data, small_trainer, write_job

SOURCES = [MixedSource("letters", 3, None, 1500, 200, 1.5), MixedSource("digits", 1, 2, 500, 100, 2.5)]


def mixed_data(sources: list[MixedSource] = SOURCES) -> TrainData:
    """Return tokens of letters and, after them, of digits."""
    generator = np.random.default_rng(0)

    def draw(letters: int, digits: int) -> np.ndarray:
        parts = generator.integers(97, 107, letters), generator.integers(48, 58, digits)
        return np.concatenate(parts).astype(np.uint16)

    return TrainData(draw(1500, 500), draw(200, 100), byte_tokenizer(), 1.8, mix=sources)


def test_ranks_divide_a_batch_that_follows_the_weights(tmp_path: Path) -> None:
    objective = small_trainer(tmp_path, mixed_data(), batch_size=8, gradient_accumulation_steps=2).objective
    for step in (0, 5):
        whole = torch.cat([x for x, _ in objective.micro_batches(step)])
        assert (whole >= 97).all(dim=1).sum() == 6 and (whole < 58).all(dim=1).sum() == 2
        objective.local_batch_size = 4  # type: ignore[attr-defined]
        shares = []
        for objective.rank in range(2):  # type: ignore[attr-defined]
            shares += [x for x, _ in objective.micro_batches(step)]
        objective.rank, objective.local_batch_size = 0, 8  # type: ignore[attr-defined]
        assert torch.equal(torch.cat(shares), whole)


def test_each_source_has_a_loss_and_the_whole_is_their_mean(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, mixed_data(), steps=12)
    result = trainer.run()
    last = [row for row in read_rows(tmp_path) if "valid_loss" in row][-1]
    assert {"valid_loss/letters", "valid_loss/digits", "valid_bits_per_byte/digits"} <= last.keys()
    letters, digits = result["valid_loss/letters"], result["valid_loss/digits"]
    assert result["valid_loss"] == pytest.approx((12 * letters + 6 * digits) / 18)  # by windows of 16 tokens
    assert result["valid_bits_per_byte/digits"] == pytest.approx(digits / np.log(2) / 2.5)
    alone = replace(mixed_data(), valid=mixed_data().valid[200:], mix=())  # type: ignore[index]
    objective = small_trainer(tmp_path / "alone", alone).objective
    assert objective.validation_loss(trainer.model) == pytest.approx(digits)  # type: ignore[attr-defined]


def test_one_source_is_evaluated_as_a_text_without_a_name(tmp_path: Path) -> None:
    data = small_data()
    mixed = replace(data, mix=[MixedSource("all", None, None, 2000, 300, 1.5)])
    model = small_trainer(tmp_path / "model", data).model
    plain, named = (small_trainer(tmp_path / "x", part).objective.evaluate(model, True) for part in (data, mixed))
    assert named["valid_loss"] == named["valid_loss/all"] == plain["valid_loss"]
    assert named["valid_bits_per_byte/all"] == plain["valid_bits_per_byte"]


def test_validation_text_shorter_than_the_context_is_named(tmp_path: Path) -> None:
    short = [SOURCES[0], replace(SOURCES[1], valid_tokens=MODEL.context_length)]
    with pytest.raises(UserError, match=r"validation text of data\.mix\.digits has 16 tokens, too few"):
        small_trainer(tmp_path, mixed_data(short))


def test_a_job_keeps_its_sources_and_checks_their_size(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    job = Job.read(path)
    job.mix = [MixedSource("all", None, None, 2000, 300, 1.5)]
    job.write(path)
    assert Job.read(path).mix == job.mix
    job.mix = [MixedSource("all", None, None, 1999, 300, 1.5)]
    job.write(path)
    with (
        pytest.raises(UserError, match=r"hold 2,000 tokens, and the sources of the job 1,999"),
        Job.read(path).prepare() as run,
    ):
        run()
