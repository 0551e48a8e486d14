"""Pipelines that fail or are stopped: their trainings resume, and Prefect knows how they ended."""

import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from flows.compare_tokenizers import tokenizers
from flows.config import PipelineConfig, StageName
from flows.executor import PrefectExecutor
from flows.pipeline import pipeline
from flows.prefect_support.signals import Terminated
from tasks.runtime.output import Ref
from tests.helpers.pipelines import Runner

pytestmark = pytest.mark.usefixtures("prefect_server")


def test_a_failed_training_resumes_from_its_checkpoint(
    run: Runner, config: PipelineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, train=replace(config.train, checkpoint_interval=2))

    def stop_after(steps: int) -> Callable[[Any], Any]:
        def save(self: Any) -> None:
            original(self)
            if self.step >= steps:
                raise RuntimeError("power cut")

        return save

    from lm.train.trainer import Trainer

    caplog.set_level(logging.INFO)
    original = Trainer.save
    monkeypatch.setattr(Trainer, "save", stop_after(2))
    with pytest.raises(RuntimeError, match="power cut"):
        run(config)
    monkeypatch.undo()
    assert run(config) == ["train", "sample"]
    assert "Training resumes at step 2" in caplog.text


@pytest.mark.slow
def test_a_training_in_processes_is_resumed_without_its_manifest(
    run: Runner, config: PipelineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, execution=replace(config.execution, processes=2, trackers=["tensorboard"]))
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    assert run(config)[-2:] == ["train", "sample"]
    output = run.output("train")
    boards = [file["path"] for file in output.manifest["records"] if file["path"].startswith("tensorboard/")]
    assert boards and output.is_intact()
    assert run(replace(config, execution=replace(config.execution, processes=1, trackers=[]))) == []
    # A training without Prefect leaves the same files: checkpoints and metrics, but no manifest.
    digest = output.digest
    (Path(output.url).parent / "manifest.json").unlink()
    caplog.set_level(logging.INFO)
    assert run(config) == ["train"]
    assert run.output("train").digest == digest
    assert "Training resumes at step 4" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "at", "saved", "refresh"),
    [("train_step", 1, 2, ()), ("_finish", 4, 4, ()), ("train_step", 1, 2, ("train",))],
)
def test_ctrl_c_in_a_training_saves_a_checkpoint(
    run: Runner,
    config: PipelineConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    at: int,
    saved: int,
    refresh: tuple[StageName, ...],
) -> None:
    from lm.train.trainer import Trainer

    if refresh:
        run(config)
    original = getattr(Trainer, method)

    def interrupted(self: Trainer, *arguments: Any) -> Any:
        if self.step == at:
            signal.raise_signal(signal.SIGINT)
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, refresh=refresh)
    monkeypatch.undo()
    caplog.set_level(logging.INFO)
    assert run(config, refresh=refresh) == (["train"] if refresh else ["train", "sample"])
    assert f"Training resumes at step {saved}" in caplog.text, "the training finishes the step before it stops"


@pytest.mark.parametrize(
    ("interrupt", "state"), [(KeyboardInterrupt, "Cancelled"), (Terminated, "Crashed")], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_run_with_a_wrapped_interrupt_is_cancelled_by_ctrl_c_and_else_a_crash(
    config: PipelineConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interrupt: type[KeyboardInterrupt],
    state: str,
) -> None:
    def call(*_: Any, **__: Any) -> Ref:
        raise ValueError("Task run is not set") from interrupt()

    monkeypatch.setattr(PrefectExecutor, "call", call)
    with pytest.raises(interrupt):
        pipeline(config, str(tmp_path / "root"))
    assert latest_state() == state


def test_a_comparison_of_tokenizers_that_ctrl_c_stops_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.compare_tokenizers.compare", compare)
    with pytest.raises(KeyboardInterrupt):
        tokenizers([], [])
    assert latest_state() == "Cancelled"


def latest_state() -> str | None:
    """Return the state of the last flow run."""
    with get_client(sync_client=True) as client:
        return max(client.read_flow_runs(), key=attrgetter("created")).state_name
