"""Trials: pruning by the metrics of the training, threads, and the key."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lm.common.errors import StorageError, UserError
from lm.experiments.trial import TrialConfig, TrialResult, from_json, rank
from lm.model.config import ModelConfig
from lm.train.config import TrainConfig
from tasks.runtime.execution import Execution
from tasks.runtime.output import Ref
from tasks.runtime.run_context import Attempt, RunContext
from tasks.runtime.stage import _identity, new_attempt_name
from tasks.train import train
from tasks.trial import _share_of_threads, _stopping, _without_curve_validations, trial
from tests.helpers.roots import run_context

REF = Ref("train", "0" * 64)


def test_a_training_is_stopped_by_its_own_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed attempt may have rows after its last checkpoint: the next attempt trains these steps again."""
    monkeypatch.setattr("tasks.trial._POLL_SECONDS", 0.01)
    checks = threading.Semaphore(0)
    outer, run = run_context(tmp_path), run_context(tmp_path)
    monkeypatch.setattr(type(outer.stopping), "is_set", counting(type(outer.stopping).is_set, checks))
    rows = [{"step": step, "valid_bits_per_byte": 9.0} for step in (2, 4)]

    def write(directory: Path, count: int) -> None:
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))

    def wait_for_checks() -> None:
        for _ in range(8):
            assert checks.acquire(timeout=30)

    write(run.store.create_attempt_directory(*REF, new_attempt_name()), 2)
    config = TrialConfig(ModelConfig(), TrainConfig(), {"4": 3.0})
    with _stopping(outer, run, REF, config):
        wait_for_checks()
        attempt = run.store.create_attempt_directory(*REF, "99991231T000000-00000000")
        write(attempt, 1)
        wait_for_checks()
        assert not run.stopping.is_set()
        write(attempt, 2)
        assert run.stopping.wait(30)


def test_validations_for_the_curve_alone_are_left_out() -> None:
    """Those at steps that are no multiple of eval_interval, and their rows if nothing else was logged."""
    logged, validated = {"smoothed_loss": 2.0}, {"valid_loss": 1.0, "valid_bits_per_byte": 0.5}
    rows = [{"step": 20, **logged, **validated}, {"step": 30, **validated}, {"step": 40, **validated}]
    rows += [{"step": 50, **logged}, {"step": 70, **validated}]
    config = TrainConfig(steps=70, warmup_steps=1, eval_interval=40)
    assert _without_curve_validations(rows, config) == [{"step": 20, **logged}, *rows[2:]]
    assert _without_curve_validations(rows, replace(config, max_seconds=1.0)) == rows


@pytest.mark.parametrize(("max_trainings", "threads"), [(1, 8), (2, 4), (3, 2), (0, 1)])
def test_trainings_at_once_share_the_cores_and_one_alone_has_all(
    monkeypatch: pytest.MonkeyPatch, max_trainings: int, threads: int
) -> None:
    for module in ("tasks.trial", "tasks.runtime.execution"):
        monkeypatch.setattr(f"{module}.available_cpus", lambda: 8)
    execution = Execution(max_trainings=max_trainings)
    assert _share_of_threads(execution).threads == 8, "a search, and the check of a law, train in the main thread"
    with ThreadPoolExecutor() as pool:
        assert pool.submit(_share_of_threads, execution).result().threads == threads
        assert pool.submit(_share_of_threads, replace(execution, threads=5)).result().threads == 5


@pytest.mark.parametrize("reason", ["The training text has 9 tokens, too few.", "The GPU has too little memory."])
def test_a_point_that_cannot_be_trained_is_a_result_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    content = run_trial(tmp_path, monkeypatch, UserError(reason))
    assert (content["state"], content["reason"], content["steps"], content["model"]) == ("refused", reason, 0, None)
    diverged = TrialResult("diverged", "", 0, 0, 1, 0.0, None, None, None, [])
    assert rank([from_json(content), diverged, replace(diverged, state="finished", train_loss=9.0)])[0] == 2
    assert from_json({**content, "steps": 5, "train_loss": 3.0}).objective is None, (
        "a loss before the refusal is no result"
    )


def test_a_failure_of_the_machine_ends_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="disk"):
        run_trial(tmp_path, monkeypatch, StorageError("disk"))


def run_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: UserError) -> dict[str, Any]:
    """Return ``trial.json`` of a trial whose training raises an error."""

    def fail(run: RunContext, arguments: dict[str, Any]) -> None:
        raise error

    monkeypatch.setattr(train, "look_up", lambda run, calls: [(REF, False)])
    monkeypatch.setattr(train, "materialize", fail)
    index: Any = SimpleNamespace(ref=REF, json=lambda name: {"vocab_size": 300})
    out = Attempt(run_context(tmp_path), ("trial", "0" * 64, ""), tmp_path, [], set(), "")
    trial.body(out, TrialConfig(ModelConfig(), TrainConfig()), index, [], [], index)
    content = json.loads((tmp_path / "trial.json").read_text())
    assert out.figures["state"] == content["state"]
    return dict(content)


def test_the_name_of_a_point_does_not_enter_the_key(tmp_path: Path) -> None:
    run = run_context(tmp_path)
    configs = [TrialConfig(ModelConfig(), TrainConfig(), {"4": 3.0}, title) for title in ("", "train.max_lr 0.1")]
    assert _identity(configs[0], run) == _identity(configs[1], run)
    assert _identity(configs[0], run) != _identity(replace(configs[0], limits={}), run)


def counting(method, checks):  # type: ignore[no-untyped-def]
    """Return a method that releases a semaphore at each call."""

    def counted(self: threading.Event) -> bool:
        checks.release()
        return bool(method(self))

    return counted
