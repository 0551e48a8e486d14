"""Records of runs: which runs leave one, and how it says that they ended."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.config import PipelineConfig
from flows.plan import Executor, cached_run
from lm.common.errors import UserError
from tasks.maintenance.gc import find_garbage
from tasks.runs.run_record import Recorder, make_run
from tasks.runtime.schemas import RunRecord, read_record
from tasks.runtime.store import Store
from tests.helpers.roots import letters, materialize

CONFIG = PipelineConfig()


def letter_stages(config: Any, executor: Executor) -> None:
    executor.finish(executor.call(letters, "x", 3))


def record_run(root: Path, config: PipelineConfig, number: int) -> dict[str, Any]:
    """Record a run as a flow does: after each stage, and at its end."""
    run = make_run(config, str(root), f"20260101-00000{number}-full-a")
    recorder = Recorder(run, config, None)
    recorder.add("letters", materialize(letters, run, "x", 3))
    recorder.save()
    assert read(root, run.name)["state"] == "running"
    return recorder.finish()


def read(root: Path, name: str) -> dict[str, Any]:
    record = read_record(RunRecord, Store(str(root)), "runs", f"{name}.json")
    assert record
    return record


def list_records(root: Path) -> dict[str, int]:
    """Return the files of records and reports, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in (root / "runs").iterdir()}


def test_a_cached_run_with_the_configuration_of_the_last_record_leaves_nothing(tmp_path: Path) -> None:
    first = record_run(tmp_path, CONFIG, 1)
    assert (first["state"], first["stages"]["letters"]["state"]) == ("finished", "made")
    before = list_records(tmp_path)
    for record in (cached_run(letter_stages, CONFIG, str(tmp_path), None), record_run(tmp_path, CONFIG, 2)):
        assert record
        assert (record["name"], record["report"]) == (first["name"], read(tmp_path, first["name"])["report"])
        assert record["stages"]["letters"]["state"] == "cached"
        assert list_records(tmp_path) == before
    assert not find_garbage(Store(str(tmp_path)))


@pytest.mark.parametrize(
    "other", [replace(CONFIG, name="other"), replace(CONFIG, execution=replace(CONFIG.execution, threads=3))]
)
def test_a_cached_run_with_another_configuration_leaves_one_record(tmp_path: Path, other: PipelineConfig) -> None:
    record_run(tmp_path, CONFIG, 1)
    count = 3 if other.name == CONFIG.name else 2  # without a name of its own, a run takes any
    for number, config, expected in ((2, other, 2), (3, other, 2), (4, CONFIG, count), (5, CONFIG, count)):
        assert record_run(tmp_path, config, number)["config"]["name"] == config.name
        assert len([*(tmp_path / "runs").glob("2*.json")]) == expected
    assert cached_run(letter_stages, other, str(tmp_path), None)
    assert len([*(tmp_path / "runs").glob("2*.json")]) == (4 if count == 3 else 2)
    assert read(tmp_path, "latest")["config"]["name"] == other.name


def test_a_failed_run_in_between_is_the_last_record(tmp_path: Path) -> None:
    """The latest model would be that of the failed run."""
    record_run(tmp_path, CONFIG, 1)
    run = make_run(CONFIG, str(tmp_path), "20260101-000002-full-a")
    failed = Recorder(run, CONFIG, None)
    failed.add("letters", materialize(letters, run, "x", 3))
    failed.fail(UserError("no text"))
    assert record_run(tmp_path, CONFIG, 3)["name"].startswith("20260101-000003")


@pytest.mark.parametrize(
    ("error", "message"), [(UserError("no text"), "no text"), (KeyError(), "KeyError"), (ValueError("bug"), "bug")]
)
def test_a_record_says_why_its_run_failed(tmp_path: Path, error: Exception, message: str) -> None:
    run = make_run(CONFIG, str(tmp_path), "20260101-000001-full-a")
    Recorder(run, CONFIG, None).fail(error)
    record = read(tmp_path, run.name)
    assert (record["state"], record["error"]) == ("failed", message)
    assert message in (tmp_path / "runs" / f"{run.name}.md").read_text()
    stopped = make_run(CONFIG, str(tmp_path), "20260101-000002-full-a")
    Recorder(stopped, CONFIG, None).stop()
    assert read(tmp_path, stopped.name)["state"] == "stopped"
    assert "latest.json" not in list_records(tmp_path)
