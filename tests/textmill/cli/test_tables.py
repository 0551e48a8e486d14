"""What commands print when they end."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks.runtime.run_context import Attempt
from tasks.runtime.stage import stage
from tests.helpers.roots import materialize, run_context
from textmill.cli.tables import format_summary

CONFIG = {"data": {"train": ["demo:1"]}, "train": {"steps": 1}}


@stage("train")
def train(out: Attempt, trackers: list[str]) -> None:
    (out.directory / "training.json").write_text(json.dumps({"best": "step-0000001"}))
    out.records = ["metrics.jsonl", *(f"{tracker}/events" for tracker in trackers)]
    for name in out.records:
        (out.directory / name).parent.mkdir(exist_ok=True)
        (out.directory / name).write_text("")


@stage("evaluate")
def evaluate(out: Attempt, models: dict[str, dict[str, Any]]) -> None:
    out.figures = models


def summary(root: Path, trackers: list[str]) -> list[str]:
    run = run_context(root)
    stages = {"train": {"key": materialize(train, run, trackers).key, "state": "made", "seconds": 1.0}}
    return format_summary({"root": run.root, "name": "test", "stages": stages, "config": CONFIG}).splitlines()


def test_the_end_of_a_run_names_the_files_with_its_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "my root"
    lines = summary(root, ["tensorboard"])
    files = lines[: lines.index("Try next:")]
    assert max(map(len, files)) <= 80 and not any(re.search("[0-9a-f]{16}", line) for line in files)
    (metrics,) = (line.split(maxsplit=1)[1] for line in lines if line.startswith("  metrics "))
    (command,) = (line.split(maxsplit=1)[1] for line in lines if line.startswith("  curves "))
    assert command.startswith("tensorboard --logdir ")
    shown = subprocess.check_output(["sh", "-c", f"ls {metrics}; ls {command.split(maxsplit=2)[2]}"], text=True)
    assert re.fullmatch(r"my root/train/\w+/[\w-]+/metrics.jsonl\nevents\n", shown)
    assert not any("tensorboard" in line for line in summary(root, []))


def test_post_training_ends_with_a_table_of_the_models(tmp_path: Path) -> None:
    interval = {"accuracy_low": 0.25, "accuracy_high": 0.75, "response_tokens": 8.0}
    models = {
        "base": {"answer_loss": None, "accuracy": 0.0, "reward": 0.0} | interval,
        "reinforce": {"answer_loss": 4.1639, "accuracy": 0.5, "reward": 0.5} | interval,
        "sft": {"answer_loss": 1.0},
    }
    run = run_context(tmp_path)
    stages = {"evaluate": {"key": materialize(evaluate, run, models).key, "state": "made", "seconds": 1.0}}
    text = format_summary({"root": run.root, "name": "test", "stages": stages, "config": CONFIG})
    rows = [line.split() for line in text.splitlines()]
    assert ["base", "–", "0.0", "%", "[25.0,", "75.0]", "0.000"] in rows
    assert ["reinforce", "4.164", "50.0", "%", "[25.0,", "75.0]", "0.500"] in rows
    assert ["sft", "1.000", "–", "–"] in rows
    assert "response" not in text and all(len(line) <= 80 for line in text.splitlines() if "/" not in line)
