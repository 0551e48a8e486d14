"""Post-trainings from job files: killed at any time, the same command resumes to the same result."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from lm.checkpoint.training_checkpoint import load_model, save_training
from lm.common.errors import UserError
from lm.model.config import MoEConfig
from lm.model.transformer import TransformerLM
from lm.posttrain.job import PosttrainJob
from lm.train.__main__ import main
from lm.train.tracking import read_metrics
from lm.train.trainer import Trainer
from tests.helpers.posttraining import chat_policy, wide_policy, write_posttrain_job
from tests.helpers.ranks import run_ranks
from tests.helpers.training import start_and_kill, train_here

KILLS = int(os.environ.get("TEXTMILL_KILLS", "2"))
SETTINGS: dict[str, dict[str, Any]] = {
    "sft": {},
    "distill": {"max_new_tokens": 8, "beta": 0.5},
    "preference": {},
    "reward_model": {},
    "ppo": {"updates_per_epoch": 2, "epochs_per_rollout": 2, "max_new_tokens": 8},
    "reinforce": {"group_size": 2, "updates_per_epoch": 2, "max_new_tokens": 8, "importance_reweighting": "grpo"},
}

OWN_METRICS: dict[str, set[str]] = {
    "sft": set(),
    "distill": {"divergence", "reward", "entropy", "response_tokens"},
    "preference": {"margin", "accuracy", "chosen_reward", "rejected_reward"},
    "reward_model": {"margin", "accuracy", "chosen_reward", "rejected_reward"},
    "ppo": {"learned_reward", "reward", "kl", "value_loss", "entropy", "clip_fraction", "response_tokens"},
    "reinforce": {"reward", "entropy", "response_tokens"},
}


def results(job: Path) -> dict[str, bytes]:
    """Return the files that a resumed training must have like a whole one: weights, optimizer, samples, responses."""
    names = [*job.parent.glob("step-*/*.*"), *job.parent.glob("[rs]*.jsonl")]
    return {str(path.relative_to(job.parent)): path.read_bytes() for path in names}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", SETTINGS)
def test_a_method_trains_and_records_its_metrics(tmp_path: Path, method: str, precision: str) -> None:
    job = write_posttrain_job(tmp_path, method, SETTINGS[method], precision=precision)
    result = train_here(PosttrainJob.read(job))
    assert result["steps"] == 6 and (job.parent / result["best"]).is_dir()
    rows = read_metrics(job.parent / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {row["step"] for row in rows if any(name.startswith("valid_") for name in row)} == {3, 6}
    assert all(OWN_METRICS[method] <= row.keys() for row in rows)
    samples = read_metrics(job.parent / "samples.jsonl")
    assert [sample["prompt"] for sample in samples] == ["say a"] * (0 if method == "reward_model" else 2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("method", "settings", "metric"),
    [("preference", {}, "margin"), ("reinforce", {"group_size": 2, "max_new_tokens": 8, "kl_weight": 0.1}, "kl")],
)
def test_the_first_step_is_at_the_reference(
    tmp_path: Path, method: str, settings: dict[str, Any], metric: str, precision: str
) -> None:
    job = write_posttrain_job(tmp_path, method, settings, precision=precision, steps=2)
    train_here(PosttrainJob.read(job))
    assert read_metrics(job.parent / "metrics.jsonl")[0][metric] == pytest.approx(0, abs=1e-6)


class NoFloat64(TorchFunctionMode):
    """Refuses to make float64 tensors on a named device, as on MPS; without ``has_double`` also to convert to them."""

    def __init__(self, has_double: bool) -> None:
        super().__init__()
        self.has_double = has_double

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert kwargs.get("dtype") != torch.float64 or kwargs.get("device") is None
        assert self.has_double or func is not torch.Tensor.double
        return func(*args, **kwargs)


@pytest.mark.parametrize("method", SETTINGS)
def test_no_float64_on_the_device(tmp_path: Path, method: str) -> None:
    job = write_posttrain_job(tmp_path, method, SETTINGS[method], steps=2)
    with NoFloat64(has_double=method in ("ppo", "reinforce")):  # their advantages are computed on the CPU
        assert train_here(PosttrainJob.read(job))["steps"] == 2


def test_a_model_that_does_not_fit_memory_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("lm.train.frozen_base.load_model", fail)
    with pytest.raises(UserError, match=r"before the first step.*CUDA out of memory"):
        train_here(PosttrainJob.read(write_posttrain_job(tmp_path, "sft")))


def test_steps_without_good_responses_are_not_skipped(tmp_path: Path) -> None:
    settings = {"group_size": 2, "max_new_tokens": 4, "reward_threshold": 2.0}
    job = write_posttrain_job(tmp_path, "reinforce", settings)
    result = train_here(PosttrainJob.read(job))
    assert (result["steps"], result["skipped_steps"]) == (6, 0)
    assert all(row["loss"] == row["grad_norm"] == 0 for row in read_metrics(job.parent / "metrics.jsonl"))


def write_job_with_experts(directory: Path, method: str, moe: MoEConfig, **settings: Any) -> Path:
    job = write_posttrain_job(directory, method, settings, steps=2)
    save_training(directory / "model", TransformerLM(replace(chat_policy().config, moe=moe)), [], 0, {})
    return job


@pytest.mark.parametrize("method", SETTINGS)
def test_experts_compute_no_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    steps: list[tuple[Trainer, Any]] = []
    train_step = Trainer.train_step

    def record_step(trainer: Trainer, micro_batches: Any, *arguments: Any) -> Any:
        steps.append((trainer, micro_batches))
        return train_step(trainer, micro_batches, *arguments)

    monkeypatch.setattr(Trainer, "train_step", record_step)
    train_here(PosttrainJob.read(write_job_with_experts(tmp_path, method, MoEConfig(4, 2), **SETTINGS[method])))
    trainer, micro_batches = steps[-1]
    objective: Any = trainer.objective
    if method == "sft":
        tokens = sum(int((batch.segment_ids > 0).sum()) for batch in micro_batches)
    elif method in ("preference", "reward_model"):
        pairs = [objective.pairs[index] for batch in micro_batches for index in batch.indices]
        last = method == "preference"  # the last token is a label only
        tokens = sum(len(pair.prompt) + len(ids) - last for pair in pairs for ids in (pair.chosen, pair.rejected))
    else:
        tokens = sum(int(batch.mask.flip(-1).cummax(-1).values.sum()) for batch in micro_batches)
    assert trainer.balance is not None
    assert trainer.balance._step[:, 0].sum(-1).tolist() == [2 * tokens] * 2  # two blocks, two choices of each token


def test_a_capacity_of_experts_drops_no_token(tmp_path: Path) -> None:
    """Else the model of the first step would not be the reference."""
    moe = MoEConfig(num_experts=4, top_k=2, capacity_factor=0.5)
    job = write_job_with_experts(tmp_path, "preference", moe)
    train_here(PosttrainJob.read(job))
    first = read_metrics(job.parent / "metrics.jsonl")[0]
    assert first["margin"] == pytest.approx(0, abs=1e-6)
    assert "dropped_choices" not in first


def test_the_biases_of_experts_stay(tmp_path: Path) -> None:
    job = write_job_with_experts(tmp_path, "sft", MoEConfig(4, 2, bias_update_rate=0.1))
    train_here(PosttrainJob.read(job))
    buffers = dict(load_model(job.parent / "step-0000002").named_buffers())
    biases = [buffer for name, buffer in buffers.items() if name.endswith("expert_bias")]
    assert len(biases) == 2 and not any(bias.any() for bias in biases)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [name if name == "reinforce" else pytest.param(name, marks=pytest.mark.long) for name in SETTINGS],
)
def test_killed_again_and_again(tmp_path: Path, method: str) -> None:
    # So many that the training is not over before the last kill. Steps with rollouts take longer.
    config: dict[str, Any] = {
        "steps": (20 if method in ("distill", "reinforce", "ppo") else 50) * KILLS,
        "checkpoint_interval": 3,
    }
    whole, job = (write_posttrain_job(tmp_path / name, method, SETTINGS[method], **config) for name in ("a", "b"))
    train_here(PosttrainJob.read(whole))
    start_and_kill("tests.helpers.slow_training", job, KILLS)
    assert main([str(job)]) == 0
    assert results(job) == results(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["reinforce", *(pytest.param(name, marks=pytest.mark.long) for name in ("distill", "ppo"))]
)
def test_two_processes_learn_from_the_responses_of_one(tmp_path: Path, method: str) -> None:
    jobs = [
        write_posttrain_job(tmp_path / name, method, SETTINGS[method], gradient_accumulation_steps=steps)
        for name, steps in (("one", 2), ("two", 1))
    ]
    train_here(PosttrainJob.read(jobs[0]))
    run_ranks("tests.helpers.rank_jobs", tmp_path, str(jobs[1]), world_size=2)
    rows, other = (read_metrics(job.parent / "rollouts.jsonl") for job in jobs)
    assert [row["ids"] for row in rows if row["step"] == 1] == [row["ids"] for row in other if row["step"] == 1]
    for name in ("loss", "grad_norm", "reward", "response_tokens"):
        values, other_values = ([row[name] for row in read_metrics(job.parent / "metrics.jsonl")[:2]] for job in jobs)
        assert values == pytest.approx(other_values, rel=1e-3, abs=1e-4), name


def divide_by_tensor_parallelism(job: Path) -> None:
    content = json.loads(job.read_text())
    content["execution"] |= {"processes": 2, "tensor_parallel": 2}
    job.write_text(json.dumps(content))


@pytest.mark.slow
def test_two_processes_divide_the_model_in_fine_tuning(tmp_path: Path) -> None:
    jobs = [write_posttrain_job(tmp_path / name, "sft", {}) for name in ("one", "two")]
    for name in ("one", "two"):
        save_training(tmp_path / name / "model", wide_policy(), [], 0, {})
    divide_by_tensor_parallelism(jobs[1])
    train_here(PosttrainJob.read(jobs[0]))
    run_ranks("tests.helpers.rank_jobs", tmp_path, str(jobs[1]), world_size=2)
    for name in ("loss", "grad_norm", "valid_loss"):
        values, other = ([row.get(name, 0) for row in read_metrics(job.parent / "metrics.jsonl")] for job in jobs)
        assert len(values) == 6 and values == pytest.approx(other, rel=1e-3, abs=1e-4), name
    weights, other_weights = (load_model(job.parent / "step-0000006").state_dict() for job in jobs)
    for name, tensor in weights.items():
        torch.testing.assert_close(other_weights[name], tensor, rtol=0, atol=5e-4)


@pytest.mark.parametrize("method", ["distill", "preference", "reward_model", "reinforce", "ppo"])
def test_other_methods_refuse_to_divide_the_model(tmp_path: Path, method: str) -> None:
    job = write_posttrain_job(tmp_path, method, SETTINGS[method])
    divide_by_tensor_parallelism(job)
    with pytest.raises(UserError, match=f"tensor_parallel is 2, but {method} needs whole weights"):
        PosttrainJob.read(job).make_trainer(job.parent, torch.device("cpu"))


@pytest.mark.slow
def test_two_processes_divide_the_reference(tmp_path: Path) -> None:
    jobs = [
        write_posttrain_job(tmp_path / name, "preference", {}, gradient_accumulation_steps=steps)
        for name, steps in (("one", 2), ("two", 1))
    ]
    train_here(PosttrainJob.read(jobs[0]))
    run_ranks("tests.helpers.rank_jobs", tmp_path, str(jobs[1]), world_size=2)
    for name in ("reference.jsonl", "metrics.jsonl"):
        rows, other = (read_metrics(job.parent / name) for job in jobs)
        names = ("pair", "chosen", "rejected") if name == "reference.jsonl" else ("loss", "grad_norm", "valid_loss")
        values, other_values = ([row.get(name, 0) for row in part for name in names] for part in (rows, other))
        assert len(values) >= 18 and values == pytest.approx(other_values, rel=1e-3, abs=1e-4), name


def test_a_damaged_job_is_named(tmp_path: Path) -> None:
    job = write_posttrain_job(tmp_path, "sft")
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"train.jsonl is not a file of the stage dialogs"):
        train_here(PosttrainJob.read(job))
    job.write_text('{"method": "sft"}')
    with pytest.raises(UserError, match="is not the job of a training"):
        PosttrainJob.read(job)
