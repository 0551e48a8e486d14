"""Validations between the evaluations of ``eval_interval``: they draw the curve and change no output."""

from dataclasses import replace
from pathlib import Path

import pytest

from lm.model.config import ModelConfig, MoEConfig
from lm.train.tracking import read_metrics
from tests.helpers.training import MODEL, small_trainer

MIXTURE = replace(MODEL, moe=MoEConfig(4, 2, bias_update_rate=0.01, z_loss_weight=1e-3))


def train(out: Path, model: ModelConfig, count: int) -> tuple[dict[str, bytes], dict[int, float]]:
    """Return the files that are content, and the validation losses by step."""
    trainer = small_trainer(out, None, model, min_validations=count, eval_interval=15, patience=5)
    trainer.run()
    files = [path for path in out.rglob("*") if path.is_file() and path.name not in ("metrics.jsonl", "loss.png")]
    losses = {row["step"]: row["valid_loss"] for row in read_metrics(out / "metrics.jsonl") if "valid_loss" in row}
    return {str(path.relative_to(out)): path.read_bytes() for path in files}, losses


@pytest.mark.parametrize("model", [MODEL, MIXTURE], ids=["dense", "experts"])
def test_the_number_of_validations_changes_no_output(tmp_path: Path, model: ModelConfig) -> None:
    few_files, few_losses = train(tmp_path / "few", model, count=1)
    files, losses = train(tmp_path / "many", model, count=10)
    assert files == few_files and {"samples.jsonl", "training.json", "step-0000020/checkpoint.json"} <= files.keys()
    assert [*few_losses] == [15, 20] and [*losses] == [2, 4, 6, 8, 10, 12, 14, 15, 16, 18, 20]
    assert few_losses.items() <= losses.items()


def test_a_short_training_is_validated_at_each_step(tmp_path: Path) -> None:
    assert [*train(tmp_path, MODEL, count=1000)[1]] == [*range(1, 21)]
