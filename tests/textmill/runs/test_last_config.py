"""At a terminal, ``textmill run`` and ``plan`` start from the options of the last run."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flows.config import PipelineConfig
from lm.common.errors import UserError
from lm.model.config import MoEConfig
from tasks.runs.run_record import Recorder, make_run
from textmill.cli import base_config
from textmill.cli.parser import parse_command, read_config
from textmill.runs.last_config import describe_reuse, last_config

DEMO = PipelineConfig.load_preset("demo")
LAST = replace(
    DEMO,
    data=replace(DEMO.data, train=["my text.txt", "b.txt"]),
    train=replace(DEMO.train, steps=700),
    model=replace(DEMO.model, moe=MoEConfig(num_experts=4)),
)


@pytest.fixture
def root(tmp_path: Path) -> str:
    write_run(tmp_path, LAST, "20260101-000000-full-red-fox")
    return str(tmp_path)


def write_run(root: Path, config: PipelineConfig, name: str) -> None:
    Recorder(make_run(config, str(root), name), config, None).save()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_config, "_is_terminal", lambda: True)


def parsed(*arguments: str) -> PipelineConfig:
    config: PipelineConfig = read_config(PipelineConfig, parse_command([*arguments])[1])
    return config


def test_a_pipe_starts_from_the_demo_unless_it_asks_for_the_last_run(root: str) -> None:
    assert parsed("run", "--root", root) == DEMO
    assert parsed("run", "--root", root, "--again") == LAST


@pytest.mark.usefixtures("terminal")
def test_a_terminal_starts_from_the_last_run(root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "plan"):
        assert parsed(command, "--root", root) == LAST
        line = capsys.readouterr().err
        assert line.startswith("Options of the last run, red-fox: --data.train 'my text.txt' b.txt ")
        assert "--train.steps 700" in line and "--fresh drops them." in line
    (tmp_path / "mine.yaml").write_text("train: {steps: 800, batch_size: 4}")
    changed = parsed("run", "--root", root, "--config", str(tmp_path / "mine.yaml"), "--train.steps", "900")
    assert changed == replace(LAST, train=replace(LAST.train, steps=900, batch_size=4))
    capsys.readouterr()
    assert parsed("run", "--root", root, "--fresh") == DEMO
    assert parsed("run", "--root", root, "--preset", "stories-cpu") == PipelineConfig.load_preset("stories-cpu")
    assert parsed("run", "--root", str(tmp_path / "empty")) == DEMO
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("terminal")
def test_the_name_of_a_run_is_not_reused(root: str, tmp_path: Path) -> None:
    write_run(tmp_path, replace(LAST, name="mine"), "20260102-000000-full-mine")
    assert parsed("run", "--root", root) == LAST


def test_the_options_of_the_demo_need_no_line(tmp_path: Path) -> None:
    write_run(tmp_path, DEMO, "20260101-000000-full-x")
    last = last_config(str(tmp_path))
    assert last == ("x", DEMO)
    assert describe_reuse(*last) == ""


def test_runs_of_other_flows_are_skipped(root: str, tmp_path: Path) -> None:
    store = make_run(DEMO, root, "x").store
    chat, old = "20260102-000000-full-chat", "20260103-000000-full-old"
    store.write_json({"name": chat, "config": {"base": "", "methods": []}, "stages": {}}, "runs", f"{chat}.json")
    assert last_config(root) == ("red-fox", LAST)
    store.write_json({"name": old, "config": asdict(LAST) | {"gone": 1}, "stages": {}}, "runs", f"{old}.json")
    with pytest.raises(UserError, match=r"configuration of the last run, old, does not fit .* --fresh starts"):
        parse_command(["run", "--again", "--root", root])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--again", "--fresh"], "--fresh does not; use one"),
        (["--again", "--preset", "demo"], "--preset does not; use one"),
        (["--again"], "--again needs an earlier run"),
    ],
)
def test_conflicts_are_refused(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        parse_command(["run", "--root", str(tmp_path), *options])
