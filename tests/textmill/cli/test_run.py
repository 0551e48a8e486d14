"""Commands that run a flow: how they call it."""

import traceback
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from lm.common.errors import UserError
from tests.helpers.processes import PROJECT
from textmill.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "flow"),
    [
        (["run", "--until", "train", "--refresh", "merge"], "pipeline"),
        (["posttrain", "--until", "sft"], "posttrain"),
        (["sweep", "learning-rate"], "sweep"),
    ],
)
def test_a_command_calls_its_flow_with_one_function_between(
    arguments: list[str], flow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[Any] = []

    def body(**parameters: Any) -> None:
        frames = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(f"{PROJECT}/textmill")]
        calls.append((frames, parameters.pop("config").execution.runner, parameters))
        raise UserError("enough")

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr("lm.kernels.disk_cache.compile_in_background", lambda *_: None)
    monkeypatch.setattr(f"flows.{flow}.{flow}", body)
    # After earlier tests' flows, a command ends the process if its server does not respond.
    monkeypatch.setattr("flows.prefect_support.final_states._runs", [])
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert main([*arguments, "--root", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "textmill: enough\n"
    until = {"until": arguments[2]} if flow != "sweep" else {}
    refresh = ("merge",) if flow == "pipeline" else ()
    assert calls == [(["main", "_run_flow"], "threads", {"root": str(tmp_path), "refresh": refresh, **until})]
