"""The presets and the parameters of the flows, without a server."""

import re
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import pytest
from pydantic import TypeAdapter

from flows.config import PipelineConfig, complete, merge_fields
from flows.curate import CurateConfig, curate
from flows.pipeline import pipeline
from flows.posttrain import PosttrainConfig, posttrain
from flows.sweep_config import SweepConfig


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
    """Prefect asks for it several times, and it takes a tenth of a second."""
    for config_type in (PipelineConfig, PosttrainConfig):
        config_type.load_preset("demo")
        assert TypeAdapter(config_type).core_schema is TypeAdapter(config_type).core_schema


def test_the_parameter_schema_describes_every_field() -> None:
    """Prefect's UI draws its form from this schema."""
    for flow, default in ((pipeline, PipelineConfig()), (posttrain, PosttrainConfig()), (curate, CurateConfig())):
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
