"""The training loop: it learns, it is repeatable, it evaluates, and it writes what it should."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.checkpoint import load_model, newest_checkpoint, read_description
from lm.errors import UserError
from lm.metrics import read_metrics
from lm.model import cross_entropy
from lm.optim import lr_cosine_schedule
from lm.trainer import Trainer
from tests.test_model import VARIANTS
from tests.training import MODEL, make, make_data, rows_of, weights_equal


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("step-*"))


# Learning


@pytest.mark.parametrize(
    ("optimizer", "variant"), [*(("adamw", variant) for variant in VARIANTS), ("muon", {})], ids=str
)
def test_overfits_one_repeated_sequence(tmp_path: Path, optimizer: str, variant: dict[str, Any]) -> None:
    data = make_data()
    data.train = np.tile(np.random.default_rng(1).permutation(257)[:16].astype(np.uint16), 6)
    data.valid = None
    model = replace(MODEL, **{"d_model": 48, **variant})
    settings: dict[str, Any] = {"steps": 120, "batch_size": 8, "weight_decay": 0.0, "min_lr": 1e-3}
    quiet: dict[str, Any] = {
        "eval_interval": 1000,
        "checkpoint_interval": 1000,
        "sample_prompts": [],
        "log_interval": 100,
    }
    make(tmp_path, data, model, optimizer=optimizer, **settings, **quiet).run()
    rows = rows_of(tmp_path)
    assert rows[0]["loss"] > 4
    assert rows[-1]["loss"] < 0.05


def test_loss_falls(finished: Trainer) -> None:
    rows = rows_of(finished.out)
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    valid = [row["valid_loss"] for row in rows if "valid_loss" in row]
    assert valid[-1] < valid[0] - 0.3
    assert valid[-1] > math.log(10) - 0.1, "no better than the ten random ids allow"


def test_same_seed_same_run_another_seed_another(tmp_path: Path, finished: Trainer) -> None:
    torch.manual_seed(123)
    again = make(tmp_path / "again")
    again.run()
    assert weights_equal(again.model, finished.model)
    assert rows_of(again.out) == rows_of(finished.out)
    other = make(tmp_path / "other", steps=1, seed=1)
    other.run()
    assert rows_of(other.out)[0]["loss"] != rows_of(finished.out)[0]["loss"]


def test_execution_settings_change_no_weights(tmp_path: Path, finished: Trainer) -> None:
    other = make(tmp_path, log_interval=1000)
    other.run()
    assert weights_equal(other.model, finished.model)


def test_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    make(tmp_path, log_interval=1, sample_prompts=[]).run()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["lr"] for row in rows] == [lr_cosine_schedule(step, 1e-2, 1e-3, 4, 20) for step in range(1, 21)]
    assert rows[-1]["lr"] == 1e-3


def test_warm_up_stable_decay(tmp_path: Path) -> None:
    make(tmp_path, log_interval=1, sample_prompts=[], schedule="wsd", decay_fraction=0.25).run()
    rates = [row["lr"] for row in rows_of(tmp_path)]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])
    assert rates[3:15] == [1e-2] * 12
    assert rates[15:] == pytest.approx([8.2e-3, 6.4e-3, 4.6e-3, 2.8e-3, 1e-3])


def test_micro_batches_add_up_to_the_batch(tmp_path: Path, finished: Trainer) -> None:
    trainer = make(tmp_path, micro_batches=4)
    sizes: set[int] = set()
    loss = trainer.loss
    trainer.loss = lambda x, y: sizes.add(len(x)) or loss(x, y)  # type: ignore[func-returns-value]
    trainer.run()
    assert sizes == {1}
    for ours, theirs in zip(rows_of(tmp_path), rows_of(finished.out), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


def test_recomputing_changes_no_weights(tmp_path: Path, finished: Trainer) -> None:
    trainer = make(tmp_path, recompute=True)
    trainer.run()
    assert weights_equal(trainer.model, finished.model)


def test_whole_epochs_are_trained_on(tmp_path: Path, finished: Trainer) -> None:
    trainer = make(tmp_path, make_data(train=5 * 16 + 1), data_order="epochs", batch_size=5)
    seen = [{tuple(row) for row in trainer._batch(step)[0].tolist()} for step in range(3)]
    whole = {tuple(row) for row in trainer.data.train[: 5 * 16].reshape(5, 16).tolist()}
    assert seen == [whole] * 3
    trainer.run()
    assert rows_of(tmp_path)[-1]["loss"] < rows_of(tmp_path)[0]["loss"]


def test_patience_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, patience=2, eval_interval=3)
    losses = iter([3.0, 2.0, 2.5, 1.5, 1.6, 1.7, 1.0])
    monkeypatch.setattr(trainer, "evaluate", lambda sequences=None: next(losses))
    result = trainer.run()
    assert (result["steps"], result["best"], result["last"]) == (18, "step-0000012", "step-0000018")


def test_bfloat16_on_the_processor(tmp_path: Path, finished: Trainer) -> None:
    trainer = make(tmp_path, precision="bfloat16")
    trainer.run()
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert not weights_equal(trainer.model, finished.model), "it did compute in another precision"
    assert rows_of(tmp_path)[-1]["loss"] == pytest.approx(rows_of(finished.out)[-1]["loss"], abs=0.1)


# Files


def test_best_and_last_checkpoints_are_kept_and_named(finished: Trainer) -> None:
    result = json.loads((finished.out / "training.json").read_text())
    assert result["last"] == "step-0000020"
    assert result["steps"] == 20 and result["tokens"] == 20 * 4 * 16
    for name in (result["last"], result["best"]):
        assert read_description(finished.out / name) is not None
    assert weights_equal(load_model(finished.out / result["last"]), finished.model)
    rows = [row for row in rows_of(finished.out) if "valid_loss" in row]
    best = min(rows, key=lambda row: row["valid_loss"])
    assert result["best"] == f"step-{best['step']:07d}"
    assert result["valid_loss"] == finished.evaluate(), "over the whole text"
    assert result["valid_bits_per_byte"] == pytest.approx(result["valid_loss"] / math.log(2) / 1.5)


def test_older_checkpoints_go_but_the_best_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, eval_interval=3, checkpoint_interval=2, keep_checkpoints=2)
    losses = iter([5.0, 1.0, 4.0, 3.0, 2.0, 2.0, 2.0])  # best at step 6
    monkeypatch.setattr(trainer, "evaluate", lambda sequences=None: next(losses, 1.0))
    seen: dict[int, list[str]] = {}
    result = trainer.run(lambda step: seen.update({step: checkpoints(tmp_path)}))
    assert seen[5] == ["step-0000003", "step-0000004"]
    assert seen[10] == ["step-0000006", "step-0000008", "step-0000010"]
    assert checkpoints(tmp_path) == ["step-0000006", "step-0000018", "step-0000020"]
    assert (result["best"], result["last"]) == ("step-0000006", "step-0000020")
    description = read_description(tmp_path / result["last"])
    assert description is not None and description["best"]["step"] == 6


def test_a_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    trainer = make(tmp_path, eval_interval=5)
    save = trainer._save

    def save_and_count() -> None:
        saved.append(trainer.step)
        save()

    monkeypatch.setattr(trainer, "_save", save_and_count)
    trainer.run()
    assert saved == [5, 10, 15, 20]


def test_failed_replacement_puts_the_older_checkpoint_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, steps=1)
    trainer.run()
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            assert newest_checkpoint(tmp_path) is None and list(tmp_path.glob(".step-*.old")), "whole, aside"
            raise OSError("Input/output error")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match="Input/output"):
        trainer._save()
    assert read_description(tmp_path / "step-0000001") is not None
    assert not list(tmp_path.glob(".step-*")), "nothing else is left"


def test_rows_are_well_formed(finished: Trainer) -> None:
    text = (finished.out / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    rows = [json.loads(line) for line in text.splitlines()]
    assert rows == read_metrics(finished.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 3, 4, 6, 8, 9, 12, 15, 16, 18, 20]
    for row in rows:
        assert {"step", "loss", "lr"} <= row.keys()
        logged = row["step"] % 3 == 0 or row["step"] in (1, 20)
        assert ("grad_norm" in row and "tokens_per_second" in row and "smoothed_loss" in row) == logged
        validated = row["step"] % 4 == 0
        assert ("valid_loss" in row and "valid_bits_per_byte" in row) == validated
        if validated:
            assert row["valid_bits_per_byte"] == pytest.approx(row["valid_loss"] / math.log(2) / 1.5)
    samples = rows_of(finished.out, "samples.jsonl")
    assert [row["step"] for row in samples] == [4, 8, 12, 16, 20]
    assert all(row.keys() == {"step", "prompt", "text"} and row["prompt"] == "a" for row in samples)


def test_loss_plot_is_a_png(finished: Trainer) -> None:
    assert (finished.out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    names = {path.name for path in finished.out.iterdir()} - set(checkpoints(finished.out))
    assert names == {"metrics.jsonl", "samples.jsonl", "loss.png", "training.json"}, "and nothing else is left"


def test_without_validation_text(tmp_path: Path, finished: Trainer) -> None:
    trainer = make(tmp_path, make_data(valid=None))
    result = trainer.run()
    assert result["best"] == result["last"] == "step-0000020"
    assert result["valid_loss"] is None and result["valid_bits_per_byte"] is None
    assert checkpoints(tmp_path) == ["step-0000015", "step-0000020"]
    assert not any("valid_loss" in row for row in rows_of(tmp_path))
    assert weights_equal(trainer.model, finished.model), "validation has no say in the training"
    with pytest.raises(UserError, match="no validation text"):
        trainer.evaluate()


# Evaluation


def test_evaluation_is_the_mean_over_whole_windows(finished: Trainer) -> None:
    valid, model = finished.data.valid, finished.model
    assert valid is not None
    losses: list[float] = []
    with torch.no_grad():
        for first in range(0, 300, 16):
            window = torch.tensor(valid[first : first + 17].astype(np.int64))
            if len(window) == 17:
                losses.append(float(cross_entropy(model(window[None, :-1]), window[None, 1:])))
    assert len(losses) == 18
    assert finished.evaluate() == pytest.approx(sum(losses) / 18, rel=1e-5)
    assert finished.evaluate(18) == finished.evaluate(10**9) == finished.evaluate()
    assert finished.evaluate(1) == pytest.approx(losses[0], rel=1e-5)
    assert finished.evaluate(2) == pytest.approx((losses[0] + losses[17]) / 2, rel=1e-5)
    last = rows_of(finished.out)[-1]
    assert last["valid_loss"] == finished.evaluate(finished.config.eval_sequences)


@pytest.mark.parametrize("size", [17, 32, 33])
def test_evaluation_at_the_edges(tmp_path: Path, size: int) -> None:
    trainer = make(tmp_path, make_data(valid=size))
    chosen: list[Tensor] = []
    plain = trainer._plain_loss

    def record(x: Tensor, y: Tensor) -> Tensor:
        chosen.append(x)
        return plain(x, y)

    trainer._plain_loss = record  # type: ignore[method-assign]
    assert trainer.evaluate() > 0
    assert sum(len(x) for x in chosen) == (2 if size == 33 else 1)


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    found = [make(tmp_path, batch_size=batch_size).evaluate(7) for batch_size in (1, 3, 7, 100)]
    assert found == pytest.approx([found[0]] * 4, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_the_embedding_learns_as_much_faster_as_the_config_says(tmp_path: Path, optimizer: str, scale: float) -> None:
    trainer = make(tmp_path, optimizer=optimizer, embedding_lr_scale=scale, warmup_steps=0, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer._train_step(*trainer._batch(0), 1e-3, is_asked=False)
    moved = {name: (p.detach() - before[name]).abs().max().item() for name, p in trainer.model.named_parameters()}
    assert moved["token_embeddings.weight"] == pytest.approx(scale * 1e-3, rel=1e-2)  # AdamW's first step is its rate
    assert moved["lm_head.weight"] == pytest.approx(1e-3, rel=1e-2)
