"""The training loop: it learns, it is repeatable, it resumes bit for bit, and it says what went wrong."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lm.train
from lm.checkpoint import load_model, newest_checkpoint, read_description, save_training
from lm.device import choose_device
from lm.errors import UserError
from lm.execution import Execution
from lm.metrics import read_metrics
from lm.model import ModelConfig, TransformerLM, cross_entropy
from lm.optim import lr_cosine_schedule
from lm.tokenizer import Tokenizer
from lm.train import TrainConfig, TrainData, Trainer

ROOT = Path(__file__).parents[1]
MODEL = ModelConfig(vocab_size=257, context_length=16, d_model=32, num_layers=1, num_heads=2, d_ff=64)
SETTINGS: dict[str, Any] = {
    "steps": 20,
    "batch_size": 4,
    "max_lr": 1e-2,
    "min_lr": 1e-3,
    "warmup_steps": 4,
    "eval_interval": 4,
    "eval_sequences": 5,
    "checkpoint_interval": 5,
    "sample_prompts": ["a"],
    "sample_tokens": 3,
}


def make_data(train: int = 2000, valid: int | None = 300) -> TrainData:
    """Random ids out of a few, so that there is something to learn: which ones."""
    draws = np.random.default_rng(0)
    tokens = [None if size is None else draws.integers(97, 107, size).astype(np.uint16) for size in (train, valid)]
    assert tokens[0] is not None
    tokenizer = Tokenizer({byte: bytes([byte]) for byte in range(256)}, [], ["<|endoftext|>"])
    return TrainData(tokens[0], tokens[1], tokenizer, bytes_per_token=1.5)


def make(out: Path, data: TrainData | None = None, model: ModelConfig = MODEL, **settings: Any) -> Trainer:
    """A trainer on one thread of the processor; ``settings`` of TrainConfig and of Execution."""
    execution = Execution(
        threads=1,
        device="cpu",
        compile=settings.pop("compile", False),
        log_interval=settings.pop("log_interval", 3),
    )
    return Trainer(TrainConfig(**{**SETTINGS, **settings}), model, data or make_data(), execution, out)


class Killed(Exception):
    """Stands for the end of the process."""


def killed_after(last: int) -> Callable[[int], None]:
    def progress(step: int) -> None:
        if step == last:
            raise Killed

    return progress


def start_and_kill(trainer: Trainer, last: int) -> None:
    with pytest.raises(Killed):
        trainer.run(killed_after(last))


def rows_of(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The rows without the one figure that is a matter of time."""
    rows = [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in rows]


def weights_equal(a: TransformerLM, b: TransformerLM) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("step-*"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run of 20 steps that nothing interrupted; tests only read it."""
    trainer = make(tmp_path_factory.mktemp("finished"))
    trainer.run()
    return trainer


# Learning


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_overfits_one_repeated_sequence(tmp_path: Path, optimizer: str) -> None:
    data = make_data()
    data.train = np.tile(np.random.default_rng(1).permutation(257)[:16].astype(np.uint16), 6)
    data.valid = None
    settings: dict[str, Any] = {"steps": 100, "batch_size": 8, "weight_decay": 0.0, "min_lr": 1e-3}
    quiet: dict[str, Any] = {
        "eval_interval": 1000,
        "checkpoint_interval": 1000,
        "sample_prompts": [],
        "log_interval": 100,
    }
    make(tmp_path, data, optimizer=optimizer, **settings, **quiet).run()
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


def test_bfloat16_on_the_processor(tmp_path: Path, finished: Trainer) -> None:
    trainer = make(tmp_path, precision="bfloat16")
    trainer.run()
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    assert not weights_equal(trainer.model, finished.model), "it did compute in another precision"
    assert rows_of(tmp_path)[-1]["loss"] == pytest.approx(rows_of(finished.out)[-1]["loss"], abs=0.1)


# Resuming


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("last", [12, 14])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, finished: Trainer, optimizer: str, last: int) -> None:
    """Through a best checkpoint beside the interval's (12), and with rows past the checkpoint (14)."""
    straight = finished
    if optimizer == "muon":
        straight = make(tmp_path / "straight", optimizer=optimizer)
        straight.run()
    start_and_kill(make(tmp_path / "first", optimizer=optimizer), last)
    with (tmp_path / "first" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "lo')  # what a crash leaves
    second = make(tmp_path / "second", optimizer=optimizer)
    assert second.resume(tmp_path / "first")
    assert 10 <= second.step <= last
    result = second.run()
    assert weights_equal(second.model, straight.model)
    assert rows_of(second.out) == rows_of(straight.out)
    assert rows_of(second.out, "samples.jsonl") == rows_of(straight.out, "samples.jsonl")
    assert result == json.loads((straight.out / "training.json").read_text())


def test_killed_between_row_and_checkpoint_loses_and_doubles_no_row(
    tmp_path: Path, finished: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make(tmp_path / "first", checkpoint_interval=4)

    def save_and_die(directory: Path, *rest: Any) -> None:
        save_training(directory, *rest)
        if directory.name == "step-0000012":
            raise Killed

    monkeypatch.setattr(lm.train, "save_training", save_and_die)
    with pytest.raises(Killed):
        first.run()
    monkeypatch.undo()
    second = make(tmp_path / "second")
    assert second.resume(tmp_path / "first")
    assert second.step == 12
    second.run()
    assert rows_of(second.out) == rows_of(finished.out)
    assert rows_of(second.out, "samples.jsonl") == rows_of(finished.out, "samples.jsonl")


def test_resumes_twice(tmp_path: Path, finished: Trainer) -> None:
    for name, last in (("1", 7), ("2", 13)):
        trainer = make(tmp_path / name)
        if name == "2":
            assert trainer.resume(tmp_path / "1")
        start_and_kill(trainer, last)
    shutil.rmtree(tmp_path / "1")
    third = make(tmp_path / "3")
    assert third.resume(tmp_path / "2")
    third.run()
    assert weights_equal(third.model, finished.model)
    assert rows_of(third.out) == rows_of(finished.out)


def test_nothing_to_resume(tmp_path: Path, finished: Trainer) -> None:
    trainer = make(tmp_path / "out")
    assert not trainer.resume(tmp_path / "not there")
    start_and_kill(make(tmp_path / "early"), 3)
    assert not trainer.resume(tmp_path / "early"), "no checkpoint was reached"
    assert trainer.step == 0
    assert not (trainer.out / "metrics.jsonl").exists()
    trainer.run()
    assert weights_equal(trainer.model, finished.model)


def test_damaged_newest_checkpoint_falls_back(tmp_path: Path, finished: Trainer) -> None:
    first = make(tmp_path / "first")
    start_and_kill(first, 16)
    newest = newest_checkpoint(first.out)
    assert newest is not None
    weights = (newest / "model.safetensors").read_bytes()
    (newest / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    before = newest_checkpoint(first.out)
    assert before is not None and before < newest
    second = make(tmp_path / "second")
    assert second.resume(first.out)
    assert second.step == int(before.name[5:])
    second.run()
    assert weights_equal(second.model, finished.model)
    assert rows_of(second.out) == rows_of(finished.out)


def test_resume_of_another_optimizer_is_a_user_error(tmp_path: Path) -> None:
    start_and_kill(make(tmp_path / "first"), 6)
    with pytest.raises(UserError, match="optimizer"):
        make(tmp_path / "second", optimizer="muon").resume(tmp_path / "first")


SCRIPT = """
import sys, time
from pathlib import Path
from tests.test_train import make

def progress(step):
    print(step, flush=True)
    if step == 19:
        time.sleep(600)  # long before this it is killed

make(Path(sys.argv[1])).run(progress)
"""


def test_killed_process_resumes_to_the_same_weights(tmp_path: Path, finished: Trainer) -> None:
    """SIGKILL at a moment of the operating system's choosing."""
    out = tmp_path / "first"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if int(line) == 9:
                break
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    second = make(tmp_path / "second")
    assert second.resume(out)
    assert 5 <= second.step < 20
    second.run()
    assert weights_equal(second.model, finished.model)
    assert rows_of(second.out) == rows_of(finished.out)


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


def test_best_survives_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make(tmp_path / "first", keep_checkpoints=1)
    monkeypatch.setattr(first, "evaluate", lambda sequences=None: 0.5 if first.step == 4 else 1.0)
    start_and_kill(first, 16)
    second = make(tmp_path / "second", keep_checkpoints=1)
    monkeypatch.setattr(second, "evaluate", lambda sequences=None: 1.0)
    assert second.resume(first.out)
    shutil.rmtree(first.out)
    assert second.run()["best"] == "step-0000004"
    assert read_description(second.out / "step-0000004") is not None


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
    with pytest.raises(OSError, match="Input/output"):
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
        assert ("grad_norm" in row and "tokens_per_second" in row) == logged
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


# Mistakes and mishaps


@pytest.mark.parametrize("log_interval", [1, 100])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_diverged_loss_is_a_user_error_that_names_the_checkpoint(tmp_path: Path, log_interval: int, bad: float) -> None:
    trainer = make(tmp_path, log_interval=log_interval, checkpoint_interval=4, sample_prompts=[])
    loss = trainer.loss
    trainer.loss = lambda x, y: loss(x, y) * (bad if trainer.step >= 8 else 1.0)
    with pytest.raises(UserError, match=r"diverged.*max_lr.*step-0000008"):
        trainer.run()
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-0000008"
    assert all(tensor.isfinite().all() for tensor in load_model(newest).state_dict().values())
    assert all(math.isfinite(row["loss"]) for row in rows_of(tmp_path))


def test_diverged_before_any_checkpoint(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    loss = trainer.loss
    trainer.loss = lambda x, y: loss(x, y) * math.nan
    with pytest.raises(UserError, match=r"diverged.*no checkpoint"):
        trainer.run()


@pytest.mark.parametrize(("sizes", "what"), [((16, 300), "training text"), ((2000, 16), "validation text")])
def test_text_shorter_than_the_context_is_a_user_error(tmp_path: Path, sizes: tuple[int, int], what: str) -> None:
    with pytest.raises(UserError, match=f"{what} has 16 tokens.*context of 16"):
        make(tmp_path, make_data(*sizes))


def test_shortest_text_that_trains(tmp_path: Path) -> None:
    make(tmp_path, make_data(17, 17), steps=2).run()


def test_model_of_another_tokenizer_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size is 300.*257"):
        make(tmp_path, model=ModelConfig(**{**vars(MODEL), "vocab_size": 300}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_absent_device_is_a_user_error() -> None:
    for device in ("cuda", "cuda:1"):
        with pytest.raises(UserError, match=f"{device}.*cannot be used; this machine has cpu"):
            choose_device(device)


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda", "mps")
    for device in ("gpu", "", "CPU", "tpu:0"):
        with pytest.raises(UserError, match="cannot be used; this machine has"):
            choose_device(device)


@pytest.mark.parametrize("fails", ["at once", "after the gradients", "not"])
def test_compile_that_fails_warns_and_changes_nothing(
    tmp_path: Path, finished: Trainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    def compile_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def compiled(x: Tensor, y: Tensor) -> Tensor:
            if fails == "at once":
                raise RuntimeError("no C++ compiler\nand a long story")
            if fails == "after the gradients":
                loss(x, y).backward()
                raise RuntimeError("no C++ compiler")
            return loss(x, y)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_loss)
    monkeypatch.setattr(lm.train, "_COMPILE_FLOPS", 0)
    with caplog.at_level(logging.WARNING, "lm.train"):
        trainer = make(tmp_path, compile=True)
    messages = [record.getMessage() for record in caplog.records]
    if fails == "not":
        assert messages == []
    else:
        assert len(messages) == 1 and messages[0].endswith("no C++ compiler")
    trainer.run()
    assert weights_equal(trainer.model, finished.model)


def test_short_runs_are_not_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda loss: pytest.fail("compiled"))
    make(tmp_path, compile=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"steps": 0},
        {"batch_size": 0},
        {"eval_interval": 0},
        {"eval_sequences": 0},
        {"checkpoint_interval": -1},
        {"keep_checkpoints": 0},
        {"min_lr": -1e-4},
        {"min_lr": 2.0},
        {"min_lr": math.nan},
        {"max_lr": math.nan},
        {"warmup_steps": -1},
        {"weight_decay": -0.1},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": math.nan},
        {"sample_tokens": -1},
        {"optimizer": "adam"},
        {"precision": "float16"},
    ],
    ids=str,
)
def test_bad_config_is_a_user_error(bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"train.{next(iter(bad))}"):
        TrainConfig(**bad)


WITHOUT_PREFECT = """
import importlib, pkgutil, sys
from pathlib import Path

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"prefect", "tasks", "flows"}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocked())
import lm
for module in pkgutil.walk_packages(lm.__path__, "lm."):
    importlib.import_module(module.name)
from tests.test_train import make
make(Path(sys.argv[1]), steps=2).run()
"""


def test_lm_trains_without_prefect(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PREFECT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 2
