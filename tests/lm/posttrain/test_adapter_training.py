"""Post-trainings of adapters: what is trained and saved, references, resumed trainings, and adapters on adapters."""

import json
import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lm.checkpoint.safe_load import read_tensors
from lm.checkpoint.training_checkpoint import load_model, save_training
from lm.common.errors import UserError
from lm.model.adapter import adapted_layers
from lm.model.config import AdapterConfig
from lm.posttrain.job import PosttrainJob
from lm.train.__main__ import main
from lm.train.tracking import read_metrics
from lm.train.trainer import Trainer
from tests.helpers.posttraining import chat_policy, write_posttrain_job
from tests.helpers.ranks import run_ranks
from tests.helpers.training import start_and_kill, train_here
from tests.lm.posttrain.test_posttrain_job import SETTINGS as PLAIN_SETTINGS
from tests.lm.posttrain.test_posttrain_job import results

KILLS = int(os.environ.get("TEXTMILL_KILLS", "2"))
ADAPTER = AdapterConfig(rank=2, alpha=8, dropout=0.1)
SETTINGS = PLAIN_SETTINGS | {"reinforce": {**PLAIN_SETTINGS["reinforce"], "kl_weight": 0.1}}
LAST = "step-0000006"


def write_adapter_job(directory: Path, method: str, adapter: AdapterConfig = ADAPTER, **config: Any) -> Path:
    path = write_posttrain_job(directory, method, SETTINGS[method], adapter, **config)
    if method == "reinforce":  # a reward that random responses get sometimes
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"rewards": {"length:1-7": 1.0}}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "nf4"])
def test_checkpoints_hold_the_adapter_alone(tmp_path: Path, method: str, dtype: Any) -> None:
    job = write_adapter_job(tmp_path, method, replace(ADAPTER, dtype=dtype))
    train_here(PosttrainJob.read(job))
    checkpoint = job.parent / LAST
    has_head = method in ("reward_model", "ppo")
    names = {"adapter.safetensors", "optimizer.pt", "checkpoint.json", *(["head.safetensors"] if has_head else [])}
    assert {path.name for path in checkpoint.iterdir()} == names
    weights = load_file(checkpoint / "adapter.safetensors")
    assert len(weights) == 2 * 2 * 7 and all(name[-6:] in ("lora_A", "lora_B") for name in weights)
    state = read_tensors(checkpoint / "optimizer.pt")["optimizers"]
    assert sum(len(optimizer["state"]) for optimizer in state) == len(weights) + 2 * has_head
    assert all(weight.any() for weight in weights.values()), "all matrices have learned"
    model, base = load_model(checkpoint), load_model(tmp_path / "model")
    assert model.state_dict().keys() == base.state_dict().keys()
    for name, weight in model.state_dict().items():
        is_adapted = f"{name.removesuffix('weight')}lora_A" in weights
        before = base.state_dict()[name].to(torch.bfloat16 if dtype == "bfloat16" else torch.float32).float()
        assert torch.equal(weight, before) != is_adapted
    load_model(checkpoint, has_scalar_head=True) if has_head else None


@pytest.mark.parametrize("method", SETTINGS)
def test_the_loaded_model_is_the_trained_one(tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers: list[Trainer] = []
    run = Trainer.run

    def record(trainer: Trainer, *arguments: Any) -> dict[str, Any]:
        trainers.append(trainer)
        return run(trainer, *arguments)

    monkeypatch.setattr(Trainer, "run", record)
    job = write_adapter_job(tmp_path, method)
    train_here(PosttrainJob.read(job))
    ids = torch.arange(40).view(2, 20)
    trained = trainers[0].model.eval()
    with torch.no_grad():
        torch.testing.assert_close(load_model(job.parent / LAST)(ids), trained(ids), atol=1e-5, rtol=1e-5)
    is_without_dropout = {layer.dropout for layer in adapted_layers(trained).values()} == {0.0}
    assert is_without_dropout == (method not in ("sft", "reward_model"))


@pytest.mark.parametrize(("method", "metric"), [("preference", "margin"), ("reinforce", "kl"), ("ppo", "kl")])
def test_the_reference_is_the_base(tmp_path: Path, method: str, metric: str) -> None:
    """The first update is at the reference, and the adapter off is the model of the job at any time."""
    job = write_adapter_job(tmp_path, method)
    train_here(PosttrainJob.read(job))
    rows = read_metrics(job.parent / "metrics.jsonl")
    assert rows[0][metric] == pytest.approx(0, abs=1e-6)
    assert abs(rows[-1][metric]) > 1e-5
    if method == "preference":
        return
    again = PosttrainJob.read(job)
    ids = torch.arange(40).view(2, 20)
    with ExitStack() as again.contexts, torch.no_grad():
        trainer = again.make_trainer(tmp_path / "other", torch.device("cpu"))
        assert trainer.resume(job.parent)
        objective: Any = trainer.objective
        assert torch.equal(objective.reference(ids), load_model(tmp_path / "model")(ids))
        assert not torch.equal(trainer.model(ids), objective.reference(ids))


class _Interrupted(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("method", SETTINGS)
def test_an_interrupted_training_ends_with_the_same_bytes(tmp_path: Path, method: str) -> None:
    whole, job = (write_adapter_job(tmp_path / name, method) for name in ("a", "b"))
    train_here(PosttrainJob.read(whole))

    def interrupt(step: int) -> None:
        if step == 3:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        train_here(PosttrainJob.read(job), interrupt)
    torch.manual_seed(99)
    train_here(PosttrainJob.read(job))
    assert len(read_metrics(job.parent / "metrics.jsonl")) == 6
    assert results(job) == results(whole)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", pytest.param("reinforce", marks=pytest.mark.long)])
def test_killed_again_and_again(tmp_path: Path, method: str) -> None:
    config: dict[str, Any] = {"steps": (20 if method == "reinforce" else 50) * KILLS, "checkpoint_interval": 3}
    whole, job = (write_adapter_job(tmp_path / name, method, **config) for name in ("a", "b"))
    train_here(PosttrainJob.read(whole))
    start_and_kill("tests.helpers.slow_training", job, KILLS)
    assert main([str(job)]) == 0
    assert results(job) == results(whole)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["auto", "zero1"])
def test_two_processes_train_the_adapter_of_one(tmp_path: Path, parallel: str) -> None:
    adapter = replace(ADAPTER, dropout=0.0)
    jobs = [
        write_adapter_job(tmp_path / name, "sft", adapter, gradient_accumulation_steps=steps)
        for name, steps in (("one", 2), ("two", 1))
    ]
    content = json.loads(jobs[1].read_text())
    content["execution"]["parallel"] = parallel
    jobs[1].write_text(json.dumps(content))
    train_here(PosttrainJob.read(jobs[0]))
    run_ranks("tests.helpers.rank_jobs", tmp_path, str(jobs[1]), world_size=2)
    weights, other = (load_model(job.parent / LAST).state_dict() for job in jobs)
    for name, tensor in weights.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=5e-4)


@pytest.mark.parametrize(
    ("setting", "value", "whose"),
    [
        ("parallel", "zero2", "post-training"),
        ("parallel", "fsdp", "post-training"),
        ("tensor_parallel", 2, "a training with an adapter"),
    ],
)
def test_divided_weights_are_refused(tmp_path: Path, setting: str, value: Any, whose: str) -> None:
    job = PosttrainJob.read(write_adapter_job(tmp_path, "sft"))
    job.execution = replace(job.execution, **{setting: value})
    with pytest.raises(UserError, match=f"execution.{setting} is {value}, but {whose} needs whole"):
        job.make_trainer(tmp_path / "out", torch.device("cpu"))


def test_an_adapter_on_an_adapter(tmp_path: Path) -> None:
    """The base of the second is the first fused, which is found through both."""
    first = write_adapter_job(tmp_path / "first", "sft")
    train_here(PosttrainJob.read(first))
    second = write_adapter_job(tmp_path / "second", "preference", replace(ADAPTER, rank=3))
    job = PosttrainJob.read(second)
    job.model = str(first.parent / LAST)
    job.write(second)
    train_here(PosttrainJob.read(second))
    base, model = load_model(first.parent / LAST), load_model(second.parent / LAST)
    assert not torch.equal(base.layers[0].attn.q_proj.weight, model.layers[0].attn.q_proj.weight)  # type: ignore
    assert torch.equal(base.head_weight, model.head_weight)
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    again = load_model(moved / "second" / "out" / LAST)
    assert torch.equal(again.layers[0].attn.q_proj.weight, model.layers[0].attn.q_proj.weight)  # type: ignore


def test_another_base_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / "first"
    job = write_adapter_job(directory, "sft")
    train_here(PosttrainJob.read(job))
    checkpoint = job.parent / LAST
    (directory / "model").rename(directory / "kept")
    with pytest.raises(UserError, match=r"the checkpoint of its base, .*model, is missing or damaged"):
        load_model(checkpoint)
    save_training(directory / "model", chat_policy(seed=5), [], 0, {})
    with pytest.raises(UserError, match=r"the checkpoint of its base, .*model, is another model"):
        load_model(checkpoint)
    shutil.copytree(directory / "kept", tmp_path / "rerun" / "model")
    load_model(checkpoint)  # beside the place that is named: its stage ran again
    (job.parent / "base.json").unlink()
    with pytest.raises(UserError, match=r"base.json cannot be read"):
        load_model(checkpoint)


def test_other_adapters_do_not_resume(tmp_path: Path) -> None:
    job = write_adapter_job(tmp_path, "sft")
    train_here(PosttrainJob.read(job))
    for adapter, name in ((replace(ADAPTER, alpha=3), "alpha"), (AdapterConfig(), "alpha")):
        other = PosttrainJob.read(job)
        other.adapter = adapter
        trainer = other.make_trainer(job.parent, torch.device("cpu"))
        with pytest.raises(UserError, match=f"was made with adapter {name} 8"):
            trainer.resume(job.parent)


def test_a_job_without_the_field_trains_all_weights(tmp_path: Path) -> None:
    job = write_posttrain_job(tmp_path, "sft")
    content = json.loads(job.read_text())
    del content["adapter"]
    job.write_text(json.dumps(content))
    train_here(PosttrainJob.read(job))
    assert (job.parent / LAST / "model.safetensors").exists() and not (job.parent / "base.json").exists()
