"""What a training writes: ``metrics.jsonl``, and metrics for trackers (wandb, trackio, tensorboard, mlflow)."""

import logging
import math
import sys
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.train.throughput import Throughput
from lm.train.tracking import (
    Tracker,
    format_row,
    iterate_metrics,
    log_step,
    read_metrics,
    step_reporter,
    write_metrics,
)
from tests.helpers.recorder import Recorder
from tests.helpers.training import read_rows, small_trainer, without_times


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_modules_get_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, module := Recorder(name))
    small_trainer(tmp_path / "run", trackers=[name], log_interval=1).run()
    settings, *logged, last = module.calls
    assert settings["project"] == "textmill" and settings["name"] == "run"
    assert settings["config"]["train"]["steps"] == 20 and settings["config"]["model"]["d_model"] == 32
    assert last == "finished"
    rows = [{"step": step, **metrics} for step, metrics in logged]
    assert [without_times(row) for row in rows] == read_rows(tmp_path / "run")
    assert all("seconds" in row and "at" not in row for row in rows), "a tracker has dates of its own"


def test_mlflow_gets_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to make its tables
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    small_trainer(tmp_path / "run", trackers=["mlflow"]).run()
    (run,) = mlflow.search_runs(experiment_names=["textmill"], output_format="list")
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert (run.data.params["train.steps"], run.data.params["model.d_model"]) == ("20", "32")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for name in ("loss", "valid_loss", "seconds"):
        logged = mlflow.MlflowClient().get_metric_history(run.info.run_id, name)
        assert [(point.step, point.value) for point in logged] == [
            (row["step"], row[name]) for row in rows if name in row
        ]


def test_a_row_has_the_date_and_the_seconds_since_the_start(tmp_path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    tracker = Tracker(tmp_path, [], {}, step=0)
    for step in (1, 2):
        tracker.add({"step": step})
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert before <= datetime.fromisoformat(first["at"]) <= datetime.fromisoformat(second["at"]) <= datetime.now(UTC)
    assert 0 <= first["seconds"] <= second["seconds"] < 60


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"step": 5, "seconds": 50.0}, {"step": 10, "seconds": 100.0}], 120),
        ([{"step": 10, "loss": 1.0}], 0),
        ([{"step": 10, "seconds": None}], 0),
        ([], 0),
    ],
    ids=["resumed", "rows of an earlier version", "not finite", "none"],
)
def test_seconds_go_on_after_an_interruption(tmp_path: Path, rows: list[dict[str, Any]], expected: int) -> None:
    """At step 12 of a training whose last row is of step 10."""
    write_metrics(path := tmp_path / "metrics.jsonl", rows)
    Tracker(tmp_path, [], {}, step=12).add({"step": 13})
    assert expected <= read_metrics(path)[-1]["seconds"] < expected + 30


def test_tensorboard_gets_every_row(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    small_trainer(tmp_path, trackers=["tensorboard"]).run()
    board = events.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rows = [row for row in read_rows(tmp_path) if "loss" in row]
    assert [event.step for event in board.Scalars("loss")] == [row["step"] for row in rows]
    assert [event.value for event in board.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])
    assert "valid_loss" in board.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"execution\.trackers names wandb.*pip install wandb"):
        small_trainer(tmp_path, trackers=["wandb"]).run()


def test_a_tracker_that_does_not_start_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    monkeypatch.setattr(module, "init", lambda **settings: 1 / 0)
    with pytest.raises(UserError, match=r"execution\.trackers names wandb, but it does not start: division"):
        small_trainer(tmp_path, trackers=["wandb"]).run()


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_a_tracker_that_fails_later_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    monkeypatch.setattr(module, fails, lambda *args, **kwargs: 1 / 0)
    assert small_trainer(tmp_path, trackers=["wandb"]).run()["steps"] == 20
    assert caplog.text.count("wandb failed and gets no more metrics") == 1


def test_a_tensorboard_that_fails_later_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard", reason="needs tensorboard", exc_type=ImportError)
    monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar", lambda *arguments: 1 / 0)
    assert small_trainer(tmp_path, trackers=["tensorboard"]).run()["steps"] == 20
    assert caplog.text.count("tensorboard failed and gets no more metrics: division by zero") == 1


def test_trackers_are_finished_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module := Recorder("wandb"))
    trainer = small_trainer(tmp_path, trackers=["wandb"])
    loss_sum = trainer.loss_sum
    trainer.loss_sum = lambda micro_batch: loss_sum(micro_batch) * math.nan
    with pytest.raises(UserError, match="diverged"):
        trainer.run()
    assert module.calls[-1] == "finished"


def test_a_missing_file_has_no_metrics(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_truncated_last_line_is_skipped(tmp_path: Path) -> None:
    """A crash can cut the file at any byte. The complete lines before it are read."""
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": n, "loss": 1.5 / n, "note": "ü\x85\r\u2028"} for n in range(1, 4)]
    text = "".join(map(format_row, rows))
    path.write_text(text, encoding="utf-8")
    assert read_metrics(path) == rows
    for cut in range(len(text)):
        path.write_text(text[:cut], encoding="utf-8")
        complete = text[:cut].count("\n")
        # A line that lacks only its line feed is complete.
        expected = rows[: complete + 1] if text[cut] == "\n" else rows[:complete]
        assert read_metrics(path) == expected, cut


def test_a_line_truncated_within_a_character_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes('{"step": 1}\n{"note": "ü'.encode()[:-1])
    assert read_metrics(path) == [{"step": 1}]


def test_the_reporter_reports_complete_lines(tmp_path: Path) -> None:
    path, steps = tmp_path / "metrics.jsonl", list[int]()
    report = step_reporter(path, steps.append)
    report()
    assert steps == []
    for text, expected in [
        (format_row({"step": 1}), [1]),
        ("", []),
        (format_row({"step": 2}) + format_row({"step": 3}) + '{"step": ', [3]),
        ("4", []),
        ("}\n", [4]),
        ("damaged\n", []),
        (format_row({"step": 6}), [6]),
    ]:
        with path.open("a") as file:
            file.write(text)
        report()
        assert steps == expected, text
        steps.clear()
    write_metrics(path, [{"step": 1}, {"step": 2}])  # as a resumed training does
    report()
    assert steps == [2]


def test_the_reporter_reads_only_new_lines(tmp_path: Path) -> None:
    """Reading the whole file after each row would take quadratic time."""
    path, steps = tmp_path / "metrics.jsonl", list[int]()
    report = step_reporter(path, steps.append)
    path.write_text(format_row({"step": 1}))
    report()
    path.write_text("x" * path.stat().st_size + format_row({"step": 2}))
    report()
    assert steps == [1, 2]


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """A resumed reinforcement learning copies its responses, which may be more than the memory."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(format_row({"step": 1, "log_probs": [0.5] * 1000}) * 300)
    tracemalloc.start()
    write_metrics(path, (row for row in iterate_metrics(path) if row["step"] == 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < path.stat().st_size / 4
    assert len(read_metrics(path)) == 300


def test_the_line_of_a_step_fits_into_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """80 characters with the time before it, and 100 with the metrics of an objective."""
    fast = Throughput(0.1, 1_234_567.0, 0.384, 0.2, 0.0)
    slow = Throughput(0.1, 0.0, None, 0.02, 0.0)
    metrics = {"entropy": 1.234, "kl": 0.01234, "learned_reward": -1.234, "reward": 0.5123, "response_tokens": 123.4}
    with caplog.at_level(logging.INFO):
        log_step({"step": 12_000, "smoothed_loss": 10.6504}, 100_000, fast, {})
        log_step({"step": 1_200, "smoothed_loss": -0.0123}, 10_000, slow, metrics)
        log_step({"step": 12_000, "smoothed_loss": 10.6504}, 100_000, fast, {"expert_load_max": 1.234})
    pretraining, posttraining, experts = (record.getMessage() for record in caplog.records)
    assert pretraining == "step 12,000/100,000  loss 10.650  1.23M tokens/s  MFU 38 %  5 h left"
    expected = "step 1,200/10,000  loss -0.012  reward 0.512  learned reward -1.23  KL 0.0123  3 min left"
    assert posttraining == expected and "expert load 1.23" in experts
    assert [len(pretraining) <= 70, len(posttraining) <= 90, len(experts) <= 90] == [True] * 3
