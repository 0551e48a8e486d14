"""textmill run --budget: the choice is a stage, and the later stages follow it."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from flows.config import PipelineConfig
from flows.pipeline import pipeline_stages
from flows.plan import plan
from lm.experiments import speed
from lm.experiments.speed import Speed
from lm.kernels import disk_cache
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token
from lm.text.config import DataConfig
from lm.text.demo_corpus import demo_stories
from lm.train.config import TrainConfig
from tasks.budget import machine_kind
from tasks.runs.models import resolve_model
from tasks.runtime.execution import Execution
from tasks.runtime.output import Ref, read_output
from tasks.runtime.store import Store
from textmill.cli.main import main
from textmill.cli.parser import build_parser, parse


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """Return the options of a run on a text of one's own."""
    (tmp_path / "corpus.txt").write_text("".join(demo_stories(400)), encoding="utf-8")
    return ["--data.train", str([str(tmp_path / "corpus.txt")]), "--root", str(tmp_path / "root")]


def choice_of(root: Path) -> tuple[str, dict[str, dict[str, object]]]:
    """Return the one choice below a root: its comments, and the configuration."""
    (key,) = [path.name for path in (root / "budget").iterdir() if path.is_dir()]
    content = read_output(Store(str(root)), Ref("budget", key)).path("config.yaml").read_text()
    return content, yaml.safe_load(content)


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_run_has_the_model_of_its_budget(text: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    assert main(["run", *text, "--budget", "60ktokens"]) == 0
    comments, config = choice_of(root)
    model, _ = resolve_model("", str(root)).load("cpu")
    assert model.config.d_model == config["model"]["d_model"] and model.config.qk_norm
    steps = int(str(config["train"]["steps"]))
    assert 50 <= steps == round(60_000 / (256 * int(str(config["train"]["batch_size"]))))
    captured = capsys.readouterr()
    assert comments in captured.err and f"{steps} steps of" in comments
    assert "This is the demo's model" not in captured.out
    assert main(["run", *text, "--budget", "60ktokens"]) == 0
    shown = capsys.readouterr().err
    assert "budget: cached" in shown and "train: cached" in shown and "Running" not in shown


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_choice_for_a_time_is_kept(
    text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = []
    compiler = Mock()

    def measure(model: ModelConfig, train: TrainConfig, seconds: float, execution: Execution) -> Speed:
        compiler.wait.assert_called_once()  # nothing else runs while steps are measured
        measured.append(model)
        flops = flops_per_token(model) * train.batch_size * model.context_length
        return Speed(1.0, flops / 1e10, seconds, flops)

    monkeypatch.setattr(speed, "measure_speed", measure)
    compile_in_background = Mock(return_value=compiler)
    monkeypatch.setattr(disk_cache, "compile_in_background", compile_in_background)
    config = PipelineConfig(data=DataConfig(train=[str(tmp_path / "corpus.txt")]), budget="2m")
    rows = dict(plan(pipeline_stages, config, str(tmp_path / "root"), None, ()))
    assert rows["budget"].startswith("runs if") and rows["merge"].startswith("runs if")
    assert not measured
    for amount in ("2m", "120s"):
        compiler.reset_mock()
        assert main(["run", *text, "--budget", amount, "--until", "budget"]) == 0
    compile_in_background.assert_called_with("gpt2", 16)
    count = len(measured)
    assert 1 <= count <= 3
    comments, chosen = choice_of(tmp_path / "root")
    assert "Of 120 s, " in comments and set(chosen) == {"chunk", "tokenizer", "model", "train"}
    (tmp_path / "mine.yaml").write_text(comments)
    options = parse(build_parser("stories-fast"), ["run", "--config", str(tmp_path / "mine.yaml")]).run.as_dict()
    assert (options["model"], options["train"]) == (chosen["model"], chosen["train"])  # nothing of the preset is left
    compiler.reset_mock()
    assert main(["run", *text, "--budget", "2m", "--until", "budget", "--refresh", "budget"]) == 0
    assert len(measured) > count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "30"], "budget is '30'; it must be a time such as 30m"),
        (["--budget", "5m", "--execution.processes", "6"], "6 processes cannot share"),
        (["--budget", "5m", "--execution.tensor_parallel", "2"], "a process that has the whole model"),
        (["--budget", "5s"], "The budget is too small: it pays for fewer than 50 steps"),
        (["--until", "budget"], "There is no budget to choose a configuration for"),
        (["--budget", "5m", "--execution.train_deployment", "pipeline/gpu-train"], "trains on another one"),
    ],
)
@pytest.mark.usefixtures("prefect_server")
def test_mistakes(
    text: list[str],
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(speed, "measure_speed", lambda model, train, seconds, execution: Speed(1.0, 0.1, 3.0, 1e9))
    monkeypatch.setattr(disk_cache, "compile_in_background", lambda *_: None)
    assert main(["run", *text, *options]) == 2
    assert message in capsys.readouterr().err


def test_options_that_decide_the_speed_are_part_of_the_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = machine_kind(Execution(threads=2))
    for options in ({"threads": 1}, {"compile": False}, {"parallel": "ddp"}, {"activation_checkpointing": True}):
        assert machine_kind(Execution(**{"threads": 2} | options)) != usual
    assert machine_kind(Execution(threads=2, log_interval=5, verify="full")) == usual
    on_cpus = machine_kind(Execution(threads=2, device="cpu"))
    monkeypatch.setattr("tasks.budget.machine_memory", lambda: 1 << 30)
    assert machine_kind(Execution(threads=2, device="cpu")) != on_cpus


def test_options_that_a_budget_replaces_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--root", str(tmp_path), "--budget", "30m"]
    assert main([*command, "--execution.threads", "1"]) == 0
    assert "has no effect" not in capfd.readouterr().err
    assert main([*command, "--train.seed", "5", "--tokenizer.vocab_size", "777"]) == 0
    assert "The budget chooses tokenizer.vocab_size, train.seed: what you set has no effect." in capfd.readouterr().err


@pytest.mark.usefixtures("prefect_server")
def test_a_run_that_stops_before_the_training_speaks_of_no_model(
    text: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *text, "--until", "ingest"]) == 0
    assert "demo's model" not in capsys.readouterr().out


def test_own_text_without_a_budget_gets_the_model_of_the_demo() -> None:
    demo = PipelineConfig.load_preset("demo")
    own = replace(demo, data=replace(demo.data, train=["mine.txt"]))
    assert own.has_demo_model()
    assert not demo.has_demo_model()
    assert not replace(own, budget="30m").has_demo_model()
    assert not replace(own, train=replace(own.train, steps=2000)).has_demo_model()
