"""Pruning: a trial watches the metrics of its training."""

import json
import threading
from pathlib import Path

import pytest

from lm.experiments.trial import TrialConfig
from lm.model.config import ModelConfig
from lm.train.config import TrainConfig
from tasks.runtime.output import Ref
from tasks.runtime.stage import new_attempt_name
from tasks.trial import _stopping
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


def counting(method, checks):  # type: ignore[no-untyped-def]
    """Return a method that releases a semaphore at each call."""

    def counted(self: threading.Event) -> bool:
        checks.release()
        return bool(method(self))

    return counted
