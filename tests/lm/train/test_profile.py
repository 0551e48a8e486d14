"""The profile of a training: its phases add up to the step, and its memory is the predicted one."""

import gzip
import json
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.common.errors import Stopped, UserError
from lm.common.phases import PHASES, observe_phases, phase
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token
from lm.train.pretraining import Job
from lm.train.profile import PROFILE_FILE, TRACE_FILE, PhaseClock, Profile, ProfileJob, profile_training
from lm.train.training_memory import TrainingMemory
from tests.helpers.ranks import run_ranks
from tests.helpers.training import small_trainer, weights_equal, write_job

CPU = torch.device("cpu")
MODEL = ModelConfig(vocab_size=257, context_length=64, d_model=64, num_layers=2, num_heads=4, d_ff=176)
SETTINGS: dict[str, Any] = {"batch_size": 16, "gradient_accumulation_steps": 2}


def measure(out: Path, steps: int = 3, **settings: Any) -> Profile:
    def make_trainer() -> Any:
        return small_trainer(out, model=MODEL, **SETTINGS | settings)

    return profile_training(make_trainer, CPU, steps, out, threading.Event())


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Profile]:
    out = tmp_path_factory.mktemp("profile")
    return out, measure(out)


def check_phases(profile: dict[str, Any]) -> None:
    """The clock around a step and the clocks of its phases are independent of each other."""
    total = sum(profile["phases"].values())
    assert 0.8 * profile["seconds_per_step"] <= total <= profile["seconds_per_step"]
    assert profile["phases"].keys() == set(PHASES)


def check_memory(measured: TrainingMemory, predicted: TrainingMemory) -> None:
    for name, value in asdict(predicted).items():
        assert getattr(measured, name) == pytest.approx(value, rel=0.1), name


def test_the_phases_add_up_to_the_step(profile: tuple[Path, Profile]) -> None:
    check_phases(asdict(profile[1]))
    phases = profile[1].phases
    assert all(phases[name] > 0 for name in ("data", "forward", "backward", "optimizer"))
    assert phases["communication"] < phases["backward"], "one process waits for no other"


@pytest.mark.parametrize(
    "settings", [{"optimizer": "muon", "precision": "bfloat16"}, {"activation_checkpointing": True}]
)
def test_the_measured_memory_is_the_predicted_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    profile = measure(tmp_path, 1, **settings)
    check_memory(profile.memory.measured, profile.predicted_memory)
    check_phases(asdict(profile))


def test_the_memory_of_a_step(profile: tuple[Path, Profile]) -> None:
    memory = profile[1].memory
    check_memory(memory.measured, profile[1].predicted_memory)
    assert max(size for _, size in memory.curve) == memory.measured.peak
    assert memory.curve[0][1] == pytest.approx(memory.measured.weights + memory.measured.optimizer_state, rel=0.02)
    assert memory.curve[-1][1] == pytest.approx(memory.curve[0][1], rel=0.02), "the step frees what it takes"
    names = [name for name, _, _ in memory.phases if name != "communication"]
    assert names == ["forward", "forward", "backward", "forward", "backward", "optimizer"], "the weights, two parts"


def test_the_figures(profile: tuple[Path, Profile]) -> None:
    out, result = profile
    assert json.loads((out / PROFILE_FILE).read_text()) == json.loads(json.dumps(asdict(result)))
    assert result.flops_per_step == 16 * 64 * flops_per_token(MODEL)
    peak = result.peak_flops
    assert result.mfu == (peak and pytest.approx(result.flops_per_step / result.plain_seconds_per_step / peak))
    assert result.micro_batch == 8 and result.largest_micro_batch > 8
    own_time = sum(operation.seconds for operation in result.operations)
    assert 0.5 * result.traced_seconds_per_step < own_time <= result.traced_seconds_per_step
    assert result.operations == sorted(result.operations, key=lambda operation: -operation.seconds)
    with gzip.open(out / TRACE_FILE, "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert {"data", "forward", "backward", "optimizer"} < names


@pytest.mark.parametrize(
    ("kind", "tensor_parallel"), [pytest.param("ddp", 1, marks=pytest.mark.long), ("fsdp", 1), ("none", 2)]
)
@pytest.mark.slow
def test_two_processes(tmp_path: Path, kind: Any, tensor_parallel: int) -> None:
    path = write_job(tmp_path, 2, MODEL, kind, tensor_parallel, **SETTINGS)
    ProfileJob.of(Job.read(path), 3).write(path)
    run_ranks("tests.helpers.rank_jobs", tmp_path, str(path), world_size=2)
    profile = json.loads((path.parent / PROFILE_FILE).read_text())
    check_phases(profile)
    assert profile["phases"]["communication"] > 0.005 * profile["seconds_per_step"]
    parallel, micro_batch = (kind, 4) if tensor_parallel == 1 else ("none, tensor_parallel 2", 8)
    assert (profile["processes"], profile["parallel"], profile["micro_batch"]) == (2, parallel, micro_batch)
    measured, predicted = profile["memory"]["measured"], profile["predicted_memory"]
    for name in ("weights", "optimizer_state", "activations"):
        assert measured[name] == pytest.approx(predicted[name], rel=0.1), name


def test_the_clock_counts_a_phase_without_the_phases_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100
    monkeypatch.setattr("lm.train.profile.time.perf_counter", lambda: now)
    clock = PhaseClock(CPU)
    with observe_phases(clock.measure), phase("backward"):
        now += 1
        with phase("communication"), phase("communication"):
            now += 10
        now += 100
    assert clock.seconds["communication"] == 10 and clock.seconds["backward"] == 101
    now += 1000
    with phase("forward"):
        now += 1
    assert clock.seconds["forward"] == 0, "nothing observes"


def test_a_profiled_step_is_an_ordinary_step(tmp_path: Path) -> None:
    """Two steps for the memory, then one, three plain, three measured and two traced."""
    made = []

    def make_trainer() -> Any:
        made.append(small_trainer(tmp_path / "profile", model=MODEL, **SETTINGS))
        return made[-1]

    profile_training(make_trainer, CPU, 3, tmp_path / "profile", threading.Event())
    expected = small_trainer(tmp_path / "expected", model=MODEL, **SETTINGS)
    for step in range(11):
        expected.train_step(expected.objective.micro_batches(step), expected.config.lr(step + 1))
    assert made[0].step == 11 and weights_equal(made[0].model, expected.model)


def test_it_stops_and_refuses(tmp_path: Path) -> None:
    stop_event = threading.Event()
    stop_event.set()
    with pytest.raises(Stopped):
        profile_training(lambda: small_trainer(tmp_path), CPU, 1, tmp_path, stop_event)
    with pytest.raises(UserError, match="on cpu and cuda, not on mps"):
        profile_training(lambda: small_trainer(tmp_path), torch.device("mps"), 1, tmp_path, stop_event)


def test_a_profile_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / PROFILE_FILE).mkdir()
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        measure(tmp_path, steps=1)
    with pytest.raises(UserError, match="cannot be written: Is a directory"):
        Job.read(write_job(tmp_path / "job")).write(tmp_path)
