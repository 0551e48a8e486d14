"""Training that cannot go well says why; devices, compilation, and training without Prefect."""

import copy
import json
import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lm.trainer
from lm.checkpoint import load_model, newest_checkpoint
from lm.device import choose_device
from lm.errors import UserError
from lm.model import ModelConfig
from lm.recipe import TrainConfig
from lm.trainer import Trainer
from tests.training import MODEL, ROOT, make, make_data, rows_of, weights_equal


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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, optimizer: str, bad: str
) -> None:
    trainer = make(tmp_path, optimizer=optimizer)
    loss = trainer.loss
    poisoned = {5, 6, 12}
    states: dict[int, Any] = {}

    def poison(x: Tensor, y: Tensor) -> Tensor:
        states[trainer.step] = copy.deepcopy((trainer.model.state_dict(), [o.state_dict() for o in trainer.optimizers]))
        found = loss(x, y)
        if trainer.step not in poisoned:
            return found
        if bad == "gradient":
            found.register_hook(lambda gradient: gradient * math.nan)
        return found * (math.inf if bad == "loss" else 1.0)

    trainer.loss = poison
    with caplog.at_level(logging.WARNING, "lm.trainer"):
        result = trainer.run()
    assert result["steps"] == 20 and result["skipped_steps"] == 3
    assert sum("is skipped" in record.getMessage() for record in caplog.records) == 3
    for step in poisoned:
        (before, before_states), (after, after_states) = states[step], states[step + 1]
        assert all(torch.equal(before[name], after[name]) for name in before)
        for one, other in zip(before_states, after_states, strict=True):
            torch.testing.assert_close(one["state"], other["state"], rtol=0, atol=0)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, file: str) -> None:
    """A limit to the size of files stands for the disk: the writers meet it in their own machine code."""
    resource = pytest.importorskip("resource", reason="needs limits of the operating system")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(step: int) -> None:
        if step == 9:
            size = (tmp_path / "first" / "step-0000005" / file).stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, hard))

    try:
        with pytest.raises(
            UserError, match=r"step 10 cannot be saved in .*File too large.*goes on from .*step-000000[58]"
        ):
            make(tmp_path / "first").run(fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "first").glob(".step-*")), "the disk is not left fuller"
    second = make(tmp_path / "second")
    assert second.resume(tmp_path / "first")
    second.run()


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").mkdir()
    trainer = make(tmp_path)
    trainer.step = 1  # as if resumed, so that the files of another attempt stay
    with pytest.raises(UserError, match=r"samples\.jsonl cannot be written"):
        trainer.run()


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
    monkeypatch.setattr(lm.trainer, "_COMPILE_FLOPS", 0)
    with caplog.at_level(logging.WARNING, "lm.trainer"):
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
        {"batch_size": 6, "micro_batches": 4},
        {"patience": 0},
        {"decay_fraction": 1.5},
        {"schedule": "linear"},
        {"data_order": "sorted"},
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
from tests.training import make
make(Path(sys.argv[1]), steps=2).run()
"""


def test_lm_trains_without_prefect(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_PREFECT, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 2
