"""The training loop: learning, repeatability, evaluation and the files it writes."""

import json
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lm.checkpoint.training_checkpoint import load_model, newest_checkpoint, read_description
from lm.common.errors import Stopped, UserError
from lm.model.config import MoEConfig
from lm.optim.schedules import lr_cosine_schedule
from lm.train.throughput import StepTimer
from lm.train.tracking import read_metrics
from lm.train.trainer import Trainer
from tests.helpers.reference_model import MODEL_VARIANTS
from tests.helpers.training import MODEL, ROOT, read_rows, small_data, small_trainer, validation_loss, weights_equal


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("step-*"))


def set_validation_losses(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, losses: Iterable[float]) -> None:
    """Make evaluations return ``losses``, one after the other, and 1.0 after them."""
    remaining = iter(losses)
    monkeypatch.setattr(trainer.objective, "validation_loss", lambda model, sequences=None: next(remaining, 1.0))


class NoReads(TorchDispatchMode):
    """Refuses to copy a value to the host, for which the host would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_does_not_wait_for_a_gpu(tmp_path: Path, optimizer: str) -> None:
    trainer = small_trainer(tmp_path, optimizer=optimizer, gradient_accumulation_steps=2)
    micro_batches = trainer.objective.micro_batches(0)
    with pytest.raises(AssertionError), NoReads():
        trainer.train_step(micro_batches, 0.01)
    trainer.reads_each_step = False
    with NoReads():
        loss, _, _ = trainer.train_step(micro_batches, 0.01)
    assert math.isfinite(loss)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("moe", [None, MoEConfig(4, 2, bias_update_rate=0.01)])
def test_a_step_on_a_gpu_does_not_wait(tmp_path: Path, optimizer: str, moe: MoEConfig | None) -> None:
    trainer = small_trainer(
        tmp_path, model=replace(MODEL, moe=moe), device="cuda", optimizer=optimizer, precision="bfloat16"
    )
    micro_batches = trainer.objective.micro_batches(0)
    trainer.train_step(micro_batches, 0.01)  # the first one compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, _, _ = trainer.train_step(micro_batches, 0.01)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(loss)


# Learning


@pytest.mark.parametrize(
    ("optimizer", "variant"),
    [
        ("adamw", {}),
        ("muon", {}),
        *(pytest.param("adamw", variant, marks=pytest.mark.slow) for variant in MODEL_VARIANTS if variant),
    ],
    ids=str,
)
def test_overfits_one_repeated_sequence(tmp_path: Path, optimizer: str, variant: dict[str, Any]) -> None:
    data = small_data()
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
    small_trainer(tmp_path, data, model, optimizer=optimizer, **settings, **quiet).run()
    rows = read_rows(tmp_path)
    assert rows[0]["loss"] > 4
    assert rows[-1]["loss"] < 0.05


def test_loss_falls(finished: Trainer) -> None:
    rows = read_rows(finished.out)
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    valid = [row["valid_loss"] for row in rows if "valid_loss" in row]
    assert valid[-1] < valid[0] - 0.3
    assert valid[-1] > math.log(10) - 0.1, "not below the entropy of ten equally likely ids"


def test_same_seed_same_run(tmp_path: Path, finished: Trainer) -> None:
    torch.manual_seed(123)
    again = small_trainer(tmp_path / "again")
    again.run()
    assert weights_equal(again.model, finished.model)
    assert read_rows(again.out) == read_rows(finished.out)
    other = small_trainer(tmp_path / "other", steps=1, seed=1)
    other.run()
    assert read_rows(other.out)[0]["loss"] != read_rows(finished.out)[0]["loss"]


def test_execution_settings_change_no_weights(tmp_path: Path, finished: Trainer) -> None:
    other = small_trainer(tmp_path, log_interval=1000)
    other.run()
    assert weights_equal(other.model, finished.model)


def test_learning_rate_follows_the_schedule(tmp_path: Path) -> None:
    small_trainer(tmp_path, log_interval=1, sample_prompts=[]).run()
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 21))
    assert [row["lr"] for row in rows] == [lr_cosine_schedule(step, 1e-2, 1e-3, 4, 20) for step in range(1, 21)]
    assert rows[-1]["lr"] == 1e-3


def test_warm_up_stable_decay(tmp_path: Path) -> None:
    small_trainer(tmp_path, log_interval=1, sample_prompts=[], schedule="wsd", decay_fraction=0.25).run()
    rates = [row["lr"] for row in read_rows(tmp_path)]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])
    assert rates[3:15] == [1e-2] * 12
    assert rates[15:] == pytest.approx([8.2e-3, 6.4e-3, 4.6e-3, 2.8e-3, 1e-3])


def test_recomputing_changes_no_weights(tmp_path: Path, finished: Trainer) -> None:
    trainer = small_trainer(tmp_path, activation_checkpointing=True)
    trainer.run()
    assert weights_equal(trainer.model, finished.model)


def test_patience_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small_trainer(tmp_path, patience=2, eval_interval=3)
    set_validation_losses(monkeypatch, trainer, [3.0, 2.0, 2.5, 1.5, 1.6, 1.7])
    result = trainer.run()
    assert (result["steps"], result["best"], result["last"]) == (18, "step-0000012", "step-0000018")


def test_bfloat16_on_the_cpu(tmp_path: Path, finished: Trainer) -> None:
    trainer = small_trainer(tmp_path, precision="bfloat16")
    trainer.run()
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert not weights_equal(trainer.model, finished.model), "computed in another precision"
    assert read_rows(tmp_path)[-1]["loss"] == pytest.approx(read_rows(finished.out)[-1]["loss"], abs=0.1)


# Files


def test_best_and_last_checkpoints_are_kept_and_named(finished: Trainer) -> None:
    result = json.loads((finished.out / "training.json").read_text())
    assert result["last"] == "step-0000020"
    assert result["steps"] == 20 and result["tokens"] == 20 * 4 * 16
    for name in (result["last"], result["best"]):
        assert read_description(finished.out / name) is not None
    assert weights_equal(load_model(finished.out / result["last"]), finished.model)
    rows = [row for row in read_rows(finished.out) if "valid_loss" in row]
    best = min(rows, key=lambda row: row["valid_loss"])
    assert result["best"] == f"step-{best['step']:07d}"
    assert result["valid_loss"] == validation_loss(finished), "on the whole text"
    assert result["valid_bits_per_byte"] == pytest.approx(result["valid_loss"] / math.log(2) / 1.5)


def test_old_checkpoints_are_deleted_except_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small_trainer(tmp_path, eval_interval=3, checkpoint_interval=2, keep_checkpoints=2)
    set_validation_losses(monkeypatch, trainer, [5.0, 1.0, 4.0, 3.0, 2.0, 2.0, 2.0])  # best at step 6
    seen: dict[int, list[str]] = {}

    def look(step: int) -> None:
        trainer.writer.wait()
        seen[step] = checkpoints(tmp_path)

    result = trainer.run(look)
    assert seen[5] == ["step-0000003", "step-0000004"]
    assert seen[10] == ["step-0000006", "step-0000008", "step-0000010"]
    assert checkpoints(tmp_path) == ["step-0000006", "step-0000018", "step-0000020"]
    assert (result["best"], result["last"]) == ("step-0000006", "step-0000020")
    description = read_description(tmp_path / result["last"])
    assert description is not None and description["best"]["step"] == 6


def test_a_step_is_saved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_steps: list[int] = []
    trainer = small_trainer(tmp_path, eval_interval=5)
    save = trainer.save

    def save_and_record() -> None:
        saved_steps.append(trainer.step)
        save()

    monkeypatch.setattr(trainer, "save", save_and_record)
    trainer.run()
    assert saved_steps == [5, 10, 15, 20]


def test_failed_replacement_restores_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = small_trainer(tmp_path, steps=1)
    trainer.run()
    replace = Path.replace

    def fail(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            assert newest_checkpoint(tmp_path) is None and list(tmp_path.glob(".step-*.old")), "moved aside"
            raise OSError("Input/output error")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match="Input/output"):
        trainer.save()
        trainer.writer.wait()
    assert read_description(tmp_path / "step-0000001") is not None
    assert not list(tmp_path.glob(".step-*")), "no temporary files"


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
    samples = read_rows(finished.out, "samples.jsonl")
    assert [row["step"] for row in samples] == [4, 8, 12, 16, 20]
    assert all(row.keys() == {"step", "prompt", "text"} and row["prompt"] == "a" for row in samples)


def test_mfu_counts_the_devices_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []

    def make_timer(step: int, tokens_per_step: int, flops_per_step: float, peak: float | None) -> StepTimer:
        peaks.append(peak)
        return StepTimer(step, tokens_per_step, flops_per_step, peak)

    monkeypatch.setattr("lm.train.trainer.peak_flops", lambda device, dtype: 1e9)
    monkeypatch.setattr("lm.train.trainer.StepTimer", make_timer)
    trainer = small_trainer(tmp_path, steps=1)
    trainer.world_size = 2
    trainer.run()
    assert peaks == [2e9]


def test_the_log_says_that_other_programs_hold_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    waited = iter(range(1000))  # a second more at each call
    monkeypatch.setattr("lm.train.throughput.seconds_waiting_for_cores", lambda: float(next(waited)))
    monkeypatch.setattr("lm.train.trainer.peak_flops", lambda device, dtype: None)
    small_trainer(tmp_path, steps=3, log_interval=1, sample_prompts=[]).run()
    assert caplog.text.count("Steps take longer: other programs use the CPU") == 1
    assert "tokens/s" in caplog.text and "MFU" not in caplog.text


def test_files_have_no_nan_and_no_infinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no best loss before the first evaluation, and a validation loss may be infinite."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    trainer = small_trainer(tmp_path, eval_interval=10, sample_prompts=[])
    set_validation_losses(monkeypatch, trainer, [math.nan, math.inf, math.nan])
    best: list[Any] = []

    def read_best(step: int) -> None:
        trainer.writer.wait()
        if step in (5, 10):
            best.append(json.loads((tmp_path / f"step-{step:07d}" / "checkpoint.json").read_text())["best"])

    trainer.run(read_best)
    assert best == [{"step": 0, "valid_loss": None}] * 2
    for path in (*tmp_path.glob("step-*/checkpoint.json"), tmp_path / "training.json"):
        json.loads(path.read_text(), parse_constant=refuse)
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert [row["valid_loss"] for row in read_rows(tmp_path) if "valid_loss" in row] == [None, None]
    assert json.loads((tmp_path / "training.json").read_text())["best"] == "step-0000020"


def test_a_run_resumed_before_the_first_evaluation_has_a_best_checkpoint(tmp_path: Path) -> None:
    first, stopping = small_trainer(tmp_path, eval_interval=10), threading.Event()
    with pytest.raises(Stopped):
        first.run(lambda step: stopping.set() if step == 4 else None, stopping)
    second = small_trainer(tmp_path, eval_interval=10)
    assert second.resume(tmp_path) and second.best == {"step": 0, "valid_loss": None}
    assert second.run()["best"] in ("step-0000010", "step-0000020")
    assert second.best["valid_loss"] > 0


def test_the_newest_checkpoints_are_kept_past_ten_million_steps(tmp_path: Path) -> None:
    """As text, step-10000000 comes before step-9999998."""
    first = 9_999_996
    settings: dict[str, Any] = {"eval_interval": 10**9, "checkpoint_interval": 2, "keep_checkpoints": 2}
    trainer = small_trainer(tmp_path, small_data(valid=None), steps=first + 8, **settings)
    trainer.step = first
    trainer.run()
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-10000002", "step-10000004"}
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-10000004"
    again = small_trainer(tmp_path, steps=first + 9)
    assert again.resume(tmp_path) and again.step == 10_000_004


def test_loss_plot_is_a_png(finished: Trainer) -> None:
    assert (finished.out / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    names = {path.name for path in finished.out.iterdir()} - set(checkpoints(finished.out))
    assert names == {"metrics.jsonl", "samples.jsonl", "loss.png", "training.json"}, "and no other files"


def test_without_validation_text(tmp_path: Path, finished: Trainer) -> None:
    trainer = small_trainer(tmp_path, small_data(valid=None))
    result = trainer.run()
    assert result["best"] == result["last"] == "step-0000020"
    assert result["valid_loss"] is None and result["valid_bits_per_byte"] is None
    assert checkpoints(tmp_path) == ["step-0000015", "step-0000020"]
    assert not any("valid_loss" in row for row in read_rows(tmp_path))
    assert weights_equal(trainer.model, finished.model), "evaluation does not change the weights"
    with pytest.raises(UserError, match="no validation text"):
        validation_loss(trainer)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_embedding_lr_scale(tmp_path: Path, optimizer: str, scale: float) -> None:
    trainer = small_trainer(tmp_path, optimizer=optimizer, embedding_lr_scale=scale, warmup_steps=0, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step(trainer.objective.micro_batches(0), 1e-3)
    moved = {name: (p.detach() - before[name]).abs().max().item() for name, p in trainer.model.named_parameters()}
    # AdamW's first update has the size of the learning rate.
    assert moved["token_embeddings.weight"] == pytest.approx(scale * 1e-3, rel=1e-2)
    assert moved["lm_head.weight"] == pytest.approx(1e-3, rel=1e-2)


WITHOUT_EXTRAS = """
import importlib, pkgutil, sys
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"prefect", "tasks", "flows", "textmill"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
sys.modules["triton"] = None
import lm
for module in pkgutil.walk_packages(lm.__path__, "lm."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
import torch
from lm.common.errors import UserError
from lm.model import FlashAttentionTriton
try:
    FlashAttentionTriton.apply(*torch.zeros(3, 1, 8, 16), True)
except UserError as error:
    print(error)
from tests.helpers.training import small_trainer
small_trainer(Path(sys.argv[1]), steps=2).run()
"""


@pytest.mark.slow
def test_lm_trains_without_prefect_and_triton(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "textmill[triton]" in result.stdout
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 2
