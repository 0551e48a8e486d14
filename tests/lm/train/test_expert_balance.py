"""Training of a mixture of experts: balance, figures, resuming, and the same result in several processes."""

import json
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lm.checkpoint.training_checkpoint import load_model
from lm.common.execution import ParallelKind
from lm.model.config import ModelConfig, MoEConfig
from lm.model.functional import softmax
from lm.train.pretraining import Job
from lm.train.trainer import Trainer
from tests.helpers.ranks import run_ranks
from tests.helpers.recorder import Recorder
from tests.helpers.training import MODEL, read_rows, small_data, small_trainer, train_here, weights_equal, write_job

MOE = MoEConfig(4, 2, bias_update_rate=0.01, z_loss_weight=1e-3, num_dense_layers=1)
MIXTURE = replace(MODEL, num_layers=3, moe=MOE)
QUIET: dict[str, Any] = {"sample_prompts": [], "eval_interval": 1000, "checkpoint_interval": 1000}
Division = tuple[ParallelKind, float, int]  # its kind, the weight of the auxiliary loss, and micro-batches
DIVISIONS: list[Division] = [
    ("fsdp", 0.01, 1),
    ("ddp", 0.01, 1),
    ("ddp", 0.0, 2),
    ("zero1", 0.01, 1),
    ("zero2", 0.01, 1),
]
FIGURES = {"expert_load_max", "expert_load_entropy", "dead_experts", "aux_loss", "z_loss", "expert_loads"}


def layers_of(trainer: Trainer) -> Any:
    return trainer.model.layers


def biases(trainer: Trainer) -> Tensor:
    return torch.stack([layer.ffn.expert_bias for layer in layers_of(trainer)[1:]])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_overfits_one_repeated_sequence(tmp_path: Path, optimizer: str) -> None:
    data = small_data()
    data.train = np.tile(np.random.default_rng(1).permutation(257)[:16].astype(np.uint16), 6)
    data.valid = None
    settings: dict[str, Any] = {"steps": 120, "batch_size": 8, "weight_decay": 0.0, "log_interval": 100, **QUIET}
    small_trainer(tmp_path, data, replace(MIXTURE, d_model=48), optimizer=optimizer, **settings).run()
    rows = read_rows(tmp_path)
    assert rows[0]["loss"] > 4 and rows[-1]["loss"] < 0.05


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"activation_checkpointing": True}, ""),
        ({"precision": "bfloat16"}, ""),
        pytest.param({"compile": True}, "aot_eager", marks=pytest.mark.slow),
        pytest.param({"compile": True}, "inductor", marks=pytest.mark.long),  # half a minute of C++
    ],
)
def test_a_step_in_another_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], backend: str
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr("lm.distributed.plan._MIN_FLOPS_TO_COMPILE", 0)
    rows, model = [], replace(MIXTURE, num_layers=2)
    for name, form in (("plain", {}), ("other", options)):
        trainer = small_trainer(tmp_path / name, None, model, steps=3, log_interval=1, **form, **QUIET)
        trainer.run()
        assert trainer.parallel.is_compiled == ("compile" in form)
        rows.append(read_rows(tmp_path / name)[-1])
    assert rows[0].keys() >= FIGURES
    for figure in ("loss", "grad_norm", "aux_loss", "z_loss"):
        assert rows[1][figure] == pytest.approx(rows[0][figure], rel=0.02 if "precision" in options else 1e-4)


def test_losses_are_those_of_the_papers(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, None, replace(MIXTURE, num_layers=2), gradient_accumulation_steps=2)
    layer, balance = layers_of(trainer)[1], trainer.balance
    assert balance is not None
    balance.start_step()
    inputs: list[Tensor] = []
    layer.ffn.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    expected = []
    for micro_batch in trainer.objective.micro_batches(0):
        balance.start_micro_batch(None)
        trainer.loss_sum(micro_batch)
        loss = balance.loss(2)
        logits = inputs.pop().flatten(0, 1) @ layer.ffn.router.weight.T
        shares = torch.zeros(4)
        for expert in softmax(logits).argsort(-1, descending=True)[:, :2].flatten().tolist():
            shares[expert] += 1 / (2 * len(logits))
        aux_loss = 4 * (shares * softmax(logits).mean(0)).sum()
        z_loss = logits.exp().sum(-1).log().square().mean()
        torch.testing.assert_close(loss, (MOE.aux_loss_weight * aux_loss + MOE.z_loss_weight * z_loss) / 2)
        expected.append((float(aux_loss.detach()), float(z_loss.detach()), shares))
    metrics = balance.metrics()
    mean_shares = (expected[0][2] + expected[1][2]) / 2
    assert metrics["aux_loss"] == pytest.approx((expected[0][0] + expected[1][0]) / 2, rel=1e-5)
    assert metrics["z_loss"] == pytest.approx((expected[0][1] + expected[1][1]) / 2, rel=1e-4)
    entropy = -(mean_shares * mean_shares.log()).sum() / math.log(4)
    assert metrics["expert_load_entropy"] == pytest.approx(float(entropy), rel=1e-5)
    assert metrics["expert_loads"][0] == pytest.approx((4 * mean_shares).tolist(), abs=1e-3)
    assert metrics["expert_load_max"] == pytest.approx(float(4 * mean_shares.max()))
    before = biases(trainer)
    balance.update_biases(torch.tensor(True))
    assert torch.equal(biases(trainer), before), "a skipped step"
    balance.update_biases(torch.tensor(False))
    torch.testing.assert_close(moved := biases(trainer), before + 0.01 * (0.25 - mean_shares).sign())
    balance.freeze_biases()
    balance.update_biases(torch.tensor(False))
    assert torch.equal(biases(trainer), moved)


def test_dropped_choices_and_dead_experts_are_counted(tmp_path: Path) -> None:
    rows = []
    for has_checkpointing in (False, True):
        model = replace(MIXTURE, num_layers=2, moe=replace(MOE, capacity_factor=1.0))
        out, options = tmp_path / str(has_checkpointing), {"activation_checkpointing": has_checkpointing}
        trainer = small_trainer(out, None, model, steps=3, log_interval=1, **options, **QUIET)
        layers_of(trainer)[1].ffn.expert_bias[3] = -9.0
        trainer.run()
        rows.append(read_rows(out))
    for row, other in zip(*rows, strict=True):
        [loads] = row["expert_loads"]
        assert row["dead_experts"] == 1 and loads[3] == 0
        assert row["dropped_choices"] == pytest.approx(sum(max(0.0, load - 1) for load in loads) / 4, abs=1e-3)
        assert row["dropped_choices"] > 0 and other["loss"] == pytest.approx(row["loss"], rel=1e-5)


def test_the_reported_loss_is_the_cross_entropy(tmp_path: Path) -> None:
    losses = []
    for weight in (0.0, 100.0):
        moe = replace(MOE, aux_loss_weight=weight)
        small_trainer(tmp_path / str(weight), None, replace(MIXTURE, moe=moe), steps=1, **QUIET).run()
        losses.append(read_rows(tmp_path / str(weight))[0]["loss"])
    assert losses[0] == losses[1]


def make_unbalanced(out: Path, steps: int, lr: float, **options: Any) -> Trainer:
    """Return a trainer with a block of experts whose balance losses are off, except for ``options``."""
    off: dict[str, Any] = {"aux_loss_weight": 0.0, "z_loss_weight": 0.0, "bias_update_rate": 0.0}
    model = replace(MIXTURE, num_layers=2, moe=replace(MOE, **(off | options)))
    rates = {"max_lr": lr, "min_lr": lr / 10}
    return small_trainer(out, None, model, steps=steps, batch_size=16, log_interval=1, **rates, **QUIET)


def highest_loads(trainer: Trainer) -> list[float]:
    trainer.run()
    return [row["expert_load_max"] for row in read_rows(trainer.out)]


def test_the_auxiliary_loss_balances_a_router(tmp_path: Path) -> None:
    loads = []
    for weight in (0.1, 0.0):
        trainer = make_unbalanced(tmp_path / str(weight), 60, 1e-2, aux_loss_weight=weight)
        with torch.no_grad():  # prefers expert 0
            layers_of(trainer)[1].ffn.router.weight *= torch.tensor([3.0, 0.1, 0.1, 0.1])[:, None]
        loads.append(np.mean(highest_loads(trainer)[-10:]))
    assert loads[0] < loads[1] - 0.4


def test_the_bias_balances_a_router_that_does_not_learn(tmp_path: Path) -> None:
    trainer = make_unbalanced(tmp_path, 60, 0.0, bias_update_rate=0.02)
    layers_of(trainer)[1].ffn.expert_bias[0] = 0.6  # every token chooses expert 0
    loads = highest_loads(trainer)
    assert loads[0] == 2.0 and np.mean(loads[-10:]) < 1.3


def test_a_resumed_training_has_the_same_biases_and_rows(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"checkpoint_interval": 5, "keep_checkpoints": 9, "log_interval": 2}
    whole = small_trainer(tmp_path / "whole", None, MIXTURE, **settings)
    whole.run()
    first = small_trainer(tmp_path / "parts", None, MIXTURE, **settings)
    stop = threading.Event()
    with pytest.raises(Exception, match="stopped after step 7"):
        first.run(lambda step: stop.set() if step == 6 else None, stop)
    second = small_trainer(tmp_path / "parts", None, MIXTURE, **settings)
    assert second.resume(tmp_path / "parts")
    second.run()
    assert biases(whole).abs().sum() > 0
    assert weights_equal(second.model, whole.model)
    assert read_rows(tmp_path / "parts") == read_rows(tmp_path / "whole")
    assert weights_equal(load_model(tmp_path / "parts" / "step-0000020"), whole.model)


@pytest.fixture(scope="module")
def of_two_processes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Division], Path]:
    """The output of a training in two processes, for each of DIVISIONS."""
    directory = tmp_path_factory.mktemp("two")
    jobs = {
        division: write_job(directory / str(number), 2, *mixture_and_kind(division), **options_of(division))
        for number, division in enumerate(DIVISIONS)
    }
    run_ranks("tests.helpers.rank_jobs", directory, *map(str, jobs.values()), world_size=2)
    return lambda division: jobs[division].parent


def mixture_and_kind(division: Division) -> tuple[ModelConfig, ParallelKind]:
    kind, aux_loss_weight, _ = division
    return replace(MIXTURE, moe=replace(MOE, aux_loss_weight=aux_loss_weight)), kind


def options_of(division: Division) -> dict[str, Any]:
    return {
        "steps": 6,
        "max_lr": 1e-3,
        "min_lr": 1e-4,
        "gradient_accumulation_steps": division[2],
        "optimizer": "muon",
        "eval_interval": 3,
        "sample_prompts": ["a"],
    }


@pytest.mark.slow
@pytest.mark.parametrize("division", DIVISIONS)
def test_two_processes_train_as_one(
    tmp_path: Path, of_two_processes: Callable[[Division], Path], division: Division
) -> None:
    """Weights, biases and figures, with samples and a checkpoint in parts.

    The auxiliary loss depends on how the sequences of a step are divided into micro-batches, which is another with
    more processes. The bias and the z-loss do not.
    """
    job = write_job(tmp_path, model=mixture_and_kind(division)[0], **options_of(division))
    train_here(Job.read(job))
    one, two = job.parent, of_two_processes(division)
    rows, expected = read_rows(two), read_rows(one)
    for name in ("loss", "grad_norm", "valid_loss", "z_loss", "expert_load_max"):
        values = [row[name] for row in rows if name in row]
        assert values == pytest.approx([row[name] for row in expected if name in row], rel=1e-4), name
    weights = load_model(one / "step-0000006").state_dict()
    for name, tensor in load_model(two / "step-0000006").state_dict().items():
        if name.endswith("expert_bias"):
            assert torch.equal(tensor, weights[name]) and tensor.any()
        # AdamW divides gradients near 0 by their size, so that their rounding counts.
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-3)


def test_figures_are_json_and_lists_stay_out_of_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    small_trainer(tmp_path, None, MIXTURE, steps=2, log_interval=1, trackers=["wandb"], **QUIET).run()
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert np.array(row["expert_loads"]).shape == (2, 4)
    tracked = [call[1] for call in module.calls if isinstance(call, tuple)]
    assert len(tracked) > 1 and all({"aux_loss", "dead_experts"} <= metrics.keys() for metrics in tracked[:2])
    assert not any(isinstance(value, list) for metrics in tracked for value in metrics.values())
