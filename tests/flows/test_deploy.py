"""The deployments that ``textmill up`` creates, and own ones of ``textmill deploy``."""

from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import ConcurrencyLimitStrategy
from prefect.client.schemas.responses import DeploymentResponse
from prefect.settings import get_current_settings

from flows.config import PipelineConfig
from flows.deploy import Deployment, create_deployments, own_deployment, shipped_deployments
from flows.posttrain import PosttrainConfig
from flows.sweep_config import load_sweep
from textmill.cli import tools
from textmill.cli.main import main

DEMO = PipelineConfig.load_preset("demo")
NIGHTLY = replace(DEMO, name="nightly")
SHIPPED = {deployment.full_name: deployment for deployment in shipped_deployments()}


def test_deployments_exist_for_each_flow_each_stage_and_each_larger_preset() -> None:
    stages = PipelineConfig().stage_names()  # optional ones run only if the config has them
    for config in (PipelineConfig, PosttrainConfig):
        assert list(config.PRESET_TEXTS) and sorted(config.PRESET_TEXTS) == config.preset_names()
    presets = {path.stem for path in PipelineConfig.PRESETS.glob("*.yaml")} - {"demo"}
    of_pipeline = {f"pipeline/{name}" for name in ("full", *stages, *presets)}
    assert SHIPPED.keys() == of_pipeline | {"posttrain/full", "curate/full", "sweep/sweep"}
    for name in stages:
        assert SHIPPED[f"pipeline/{name}"].parameters == {"until": name, "refresh": [name]}
    for name in presets:
        assert SHIPPED[f"pipeline/{name}"].parameters == {"config": asdict(PipelineConfig.load_preset(name))}
    assert SHIPPED["sweep/sweep"].parameters == {"config": asdict(load_sweep("learning-rate", "demo"))}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_flow_of_a_deployment_accepts_its_parameters(name: str) -> None:
    deployment = SHIPPED[name]
    flow = getattr(import_module(f"flows.{deployment.flow}"), deployment.flow)
    assert flow.name == deployment.flow
    assert flow.validate_parameters(deployment.parameters)
    assert deployment.description and deployment.tags[0] == "textmill"


def own(config: PipelineConfig = NIGHTLY, root: str = "r", **options: Any) -> Deployment:
    return own_deployment(config, root, None, (), **options)


def test_relative_paths_are_those_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    Path("llama").mkdir()
    sources = ["a.txt", "texts/**/*.txt", "/x/y.txt", "~/z.txt", "https://e.org/t.txt", "s3://b/*.gz", "demo:9"]
    data = replace(DEMO.data, train=sources, valid=["v.txt"])
    parameters = own(replace(NIGHTLY, data=data, train=replace(DEMO.train, init_from="llama"))).parameters
    config = PipelineConfig.validate(parameters["config"])
    here = str(tmp_path)
    assert config.data.train[:4] == [f"{here}/a.txt", f"{here}/texts/**/*.txt", "/x/y.txt", "/home/me/z.txt"]
    assert config.data.train[4:] == sources[4:]
    assert config.data.valid == [f"{here}/v.txt"]
    assert config.train.init_from == f"{here}/llama"
    assert parameters["root"] == f"{here}/r"
    assert own(root="s3://bucket/root").parameters["root"] == "s3://bucket/root"


def test_another_preset_keeps_its_options() -> None:
    preset = replace(PipelineConfig.load_preset("stories-cpu"), name="weekly")
    assert PipelineConfig.validate(own(preset).parameters["config"]) == preset


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "nightly", "--cron", "0 25 * * *"], "--cron is '0 25 * * *'; it must be five fields, minute, hour"),
        (["--name", "nightly", "--cron", "daily"], "--cron is 'daily'; it must be five fields"),
        (["--name", "nightly", "--cron", "0 3 * * *", "--timezone", "Mars"], "--timezone is 'Mars'; it must be one"),
        (["--name", "full"], "--name is 'full', the name of a deployment of textmill up; choose another name"),
        (["--name", "a/b"], "--name is 'a/b'; it must be a text without / % & < >"),
        (["--name", "x", "--pool", " "], "--pool is ' '; it must be a text"),
        (["--cron", "0 3 * * *"], "--name is missing"),
        (["--name", "demo", "--root", "r"], "--name is missing"),
        (["--name", "x", "--until", "trian"], "no stage 'trian'"),
        (["--name", "x", "--train.init_from", "nowhere"], "nowhere"),
        (["--on", "corpus.new"], "--name is missing"),
        (["--name", "x", "--evaluate", "adition"], "adition"),
        (["--name", "x", "--evaluate", "gsm8k=missing.jsonl"], "missing.jsonl"),
        (["--name", "x", "--evaluate", "addition:1-1", "--until", "merge"], "--evaluate comes after a training"),
        (["--name", "x", "--alert", "hooks.example.com"], "--alert is 'hooks.example.com'; it must be the URL"),
        (["--name", "x"], "http://127.0.0.1:9/api cannot be reached.*Start one with: textmill up"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tools, "find_server_api", lambda: "http://127.0.0.1:9/api")
    assert main(["deploy", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.partition(".*")[0] in line and message.rpartition(".*")[2] in line


def test_without_a_server_the_command_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)  # the project's own pyproject.toml may have settings of Prefect
    assert main(["deploy", "--name", "nightly"]) == 2
    assert "Start one in another terminal with textmill up, or set PREFECT_API_URL" in capsys.readouterr().err


@pytest.fixture
def api_url(prefect_server: None) -> str:
    """The URL of the API of Prefect's server."""
    return str(get_current_settings().api.url)


def read(name: str) -> DeploymentResponse:
    with get_client(sync_client=True) as client:
        return client.read_deployment_by_name(name)


def test_the_same_name_again_replaces_the_deployment(
    api_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tools, "find_server_api", lambda: api_url)
    monkeypatch.chdir(tmp_path)
    command = ["deploy", "--name", "nightly", "--data.train", "a.txt", "--root", "r"]
    assert main([*command, "--cron", "0 3 * * *", "--timezone", "Europe/Berlin", "--budget", "30m"]) == 0
    output = capsys.readouterr().out
    assert f"{tmp_path}/r" in output
    for command_line in ("prefect deployment run pipeline/nightly", "prefect deployment delete pipeline/nightly"):
        assert command_line in output
    first = read("pipeline/nightly")
    assert first.entrypoint == "flows.pipeline.pipeline" and first.work_pool_name == "local"
    assert first.parameters["config"]["data"]["train"] == [f"{tmp_path}/a.txt"]
    assert first.parameters["config"]["budget"] == "30m"
    (schedule,) = first.schedules
    assert schedule.active and schedule.schedule.model_dump() == {
        "cron": "0 3 * * *",
        "timezone": "Europe/Berlin",
        "day_or": True,
    }
    assert first.global_concurrency_limit and first.global_concurrency_limit.limit == 1
    assert first.concurrency_options
    assert first.concurrency_options.collision_strategy == ConcurrencyLimitStrategy.CANCEL_NEW

    assert main([*command, "--until", "merge"]) == 0
    second = read("pipeline/nightly")
    assert (second.id, second.schedules, second.global_concurrency_limit) == (first.id, [], None)
    assert second.parameters["until"] == "merge" and not second.parameters["config"]["budget"]


def test_the_same_name_again_replaces_the_automations(
    api_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tools, "find_server_api", lambda: api_url)
    monkeypatch.chdir(tmp_path)
    Path("test.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    command = ["deploy", "--name", "corpus", "--data.train", "a.txt", "--root", "r", "--pool", "other"]
    all_three = ["--on", "corpus.new", "--evaluate", "gsm8k=test.jsonl", "--alert", "https://hooks.example.com/SECRET"]

    def automations() -> dict[str, Any]:
        with get_client(sync_client=True) as client:
            found = client.request("POST", "/automations/filter", json={}).json()
        return {item["name"]: item for item in found if item["name"].startswith("pipeline/")}

    for _ in range(2):
        assert main([*command, *all_three, "--cron", "0 3 * * *"]) == 0
        created = automations()
        assert created.keys() == {f"pipeline/corpus: {what}" for what in ("run on corpus.new", "evaluate", "alert")}
    assert "SECRET" not in str(created)
    deployment, evaluation = read("pipeline/corpus"), read("evaluate/corpus")
    assert deployment.concurrency_options
    assert deployment.concurrency_options.collision_strategy == ConcurrencyLimitStrategy.ENQUEUE, "no event is lost"
    assert evaluation.parameters["config"]["file"] == f"{tmp_path}/test.jsonl"
    assert evaluation.parameters["root"] == f"{tmp_path}/r" and evaluation.work_pool_name == "other"
    assert main(command) == 0
    assert automations() == {}


def test_only_the_pools_of_the_deployments_are_created(api_url: str) -> None:
    create_deployments(api_url, [SHIPPED["pipeline/full"]])
    with get_client(sync_client=True) as client:
        assert "gpu" not in {pool.name for pool in client.read_work_pools()}
        create_deployments(api_url, [own(replace(DEMO, name="gpu-train"), pool="gpu")])
        assert client.read_work_pool("gpu").type == "process"
    assert read("pipeline/gpu-train").pull_steps == [], "another machine need not have the caller's directory"
