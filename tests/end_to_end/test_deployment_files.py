"""``prefect.yaml`` and the parameters of the flow, without a server."""

import re
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import TypeAdapter

from flows.config import PipelineConfig, StageName, complete, merge_fields, preset_parameters
from flows.pipeline import pipeline
from flows.posttrain import PosttrainConfig, posttrain
from flows.sweep_config import SweepConfig, load_sweep, sweep_parameters
from textmill.cli.main import main

PROJECT = Path(__file__).parents[2]
ENTRIES = yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]
DEPLOYMENTS = {entry["name"]: entry for entry in ENTRIES if entry["entrypoint"] == "flows.pipeline.pipeline"}
POSTTRAIN_DEPLOYMENTS = {
    entry["name"]: entry for entry in ENTRIES if entry["entrypoint"] == "flows.posttrain.posttrain"
}
SWEEP_DEPLOYMENTS = {entry["name"]: entry for entry in ENTRIES if entry["entrypoint"] == "flows.sweep.sweep"}


def test_deployments_exist_for_the_pipeline_each_stage_and_each_larger_preset() -> None:
    stages = [name for name in get_args(StageName) if name != "budget"]  # it runs only if the config has a budget
    presets = {path.stem for path in PipelineConfig.PRESETS.glob("*.yaml")} - {"demo"}
    assert set(DEPLOYMENTS) == {"full", *stages, *presets, "two-pools", "gpu-train"}
    assert DEPLOYMENTS["gpu-train"]["work_pool"] == {"name": "gpu"}
    for name in stages:
        assert DEPLOYMENTS[name]["parameters"] == {"until": name, "refresh": [name]}
    for name in presets:
        assert DEPLOYMENTS[name]["build"] == [{"flows.config.preset_parameters": {"id": "preset", "name": name}}]
        assert preset_parameters(name) == {"config": asdict(PipelineConfig.load_preset(name))}
    assert set(POSTTRAIN_DEPLOYMENTS) == {"full"}
    assert set(SWEEP_DEPLOYMENTS) == {"sweep"}
    step = {"id": "sweep", "name": "learning-rate", "size": "demo"}
    assert SWEEP_DEPLOYMENTS["sweep"]["build"] == [{"flows.sweep_config.sweep_parameters": step}]
    assert sweep_parameters("learning-rate", "demo") == {"config": asdict(load_sweep("learning-rate", "demo"))}
    assert len(ENTRIES) == len(DEPLOYMENTS) + len(POSTTRAIN_DEPLOYMENTS) + len(SWEEP_DEPLOYMENTS)
    for deployment in ENTRIES:
        assert deployment["description"]
        assert deployment["tags"]
        assert deployment["enforce_parameter_schema"] is True


def test_a_preset_needs_no_local_files_and_states_its_cost() -> None:
    for path in PipelineConfig.PRESETS.glob("*.yaml"):
        data = PipelineConfig.load_preset(path.stem).data
        assert all(url.startswith(("https://", "demo:")) for url in (*data.train, *data.valid)), path
        header = path.read_text(encoding="utf-8").partition("data:")[0].replace("\n# ", " ")
        assert re.search(r"Cost\b.* of memory\b.* of disk", header), path


def test_a_preset_of_post_training_needs_no_local_files_and_states_its_cost() -> None:
    for path in PosttrainConfig.PRESETS.glob("*.yaml"):
        dialogs = PosttrainConfig.load_preset(path.stem).dialogs
        urls = (*dialogs.train, *dialogs.valid, *dialogs.task_train, *dialogs.task_test)
        assert all(url.startswith("https://") for url in urls), path
        header = path.read_text(encoding="utf-8").partition("name:")[0].replace("\n# ", " ")
        assert re.search(r"Cost\b.* of memory\b.* of disk", header), path


def test_a_partial_config_is_completed_from_the_demo() -> None:
    preset = PipelineConfig.load_preset("demo")
    demo = asdict(preset)
    assert complete({}, preset) == demo
    config = complete({"train": {"steps": 700}, "data": {"train": ["a.txt"]}}, preset)
    assert config["train"] == demo["train"] | {"steps": 700}
    assert config["data"] == demo["data"] | {"train": ["a.txt"]}
    assert config["model"] == demo["model"]
    full = PipelineConfig.load_preset("owt")
    assert complete(full, preset) is full


@pytest.mark.parametrize(
    ("config_type", "path", "own", "given", "merged"),
    [
        (PosttrainConfig, "reinforce.rewards", {"exact": 1.0}, {"length:1-5": 0.5}, {"length:1-5": 0.5}),
        (PosttrainConfig, "ppo.rewards", {"exact": 1.0}, {}, {}),
        (SweepConfig, "derive", {"train.steps": "10"}, {"train.batch_size": "2"}, {"train.batch_size": "2"}),
        (SweepConfig, "axes", [{"option": "a"}], [{"option": "b"}], [{"option": "b"}]),
        (PipelineConfig, "train", {"steps": 9, "batch_size": 3}, {"steps": 7}, {"steps": 7, "batch_size": 3}),
        (PipelineConfig, "model.moe", {"num_experts": 4, "top_k": 1}, {"top_k": 2}, {"num_experts": 4, "top_k": 2}),
        (PipelineConfig, "model.moe", {"num_experts": 4}, None, None),
        (PipelineConfig, "model.moe", None, {"num_experts": 4}, {"num_experts": 4}),
    ],
)
def test_sections_of_a_deployment_are_merged_and_values_replaced(
    config_type: type[Any], path: str, own: Any, given: Any, merged: Any
) -> None:
    def nested(value: Any) -> dict[str, Any]:
        for name in reversed(path.split(".")):
            value = {name: value}
        return dict(value)

    assert merge_fields(config_type, nested(own), nested(given)) == nested(merged)


def test_the_default_parameters_are_the_demo() -> None:
    assert pipeline.validate_parameters({"config": {}})["config"] == PipelineConfig.load_preset("demo")
    assert pipeline.parameters.properties["config"]["default"] == asdict(PipelineConfig.load_preset("demo"))


def test_the_schema_of_a_configuration_is_made_once() -> None:
    """``prefect deploy --all`` asks for it twice for each deployment, and it takes a tenth of a second."""
    for config_type in (PipelineConfig, PosttrainConfig):
        config_type.load_preset("demo")
        assert TypeAdapter(config_type).core_schema is TypeAdapter(config_type).core_schema


def test_the_parameter_schema_describes_every_field() -> None:
    """Prefect's UI draws its form from this schema."""
    for flow, default in ((pipeline, PipelineConfig()), (posttrain, PosttrainConfig())):
        schema: dict[str, Any] = flow.parameters.model_dump()["definitions"]
        for section in fields(default):
            if is_dataclass(config := getattr(default, section.name)):
                properties = schema[type(config).__name__]["properties"]
                for field in fields(config):
                    assert len(properties[field.name]["description"]) > 10, f"{section.name}.{field.name}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train": {"stepz": 1}}, "config.train.stepz"),
        ({"trane": {"steps": 1}}, "config.trane"),
        ({"train": {"steps": 0}}, "config.train.steps"),
        ({"train": {"min_lr": 1.0, "max_lr": 0.1}}, "min_lr"),
        ({"data": {"separator": "<|end|>"}}, "add it there"),
        ({"train": 3}, "config.train"),
    ],
)
def test_a_mistake_in_a_parameter_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        pipeline.validate_parameters({"config": config})


def test_textmill_up_requires_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["up"]) == 2
    assert "no prefect.yaml here" in capsys.readouterr().err
