"""``prefect.yaml`` and the parameters of the flow: what can be told without a server."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from flows.cli import main
from flows.config import PRESETS, fill_in, load_preset, preset_parameters
from flows.pipeline import StageName, pipeline

PROJECT = Path(__file__).parents[1]
DEPLOYMENTS = {found["name"]: found for found in yaml.safe_load((PROJECT / "prefect.yaml").read_text())["deployments"]}


def test_there_is_a_deployment_for_the_whole_for_each_stage_and_for_each_larger_preset() -> None:
    presets = {path.stem for path in PRESETS.glob("*.yaml")} - {"demo"}
    assert set(DEPLOYMENTS) == {"full", *get_args(StageName), *presets}
    for name in get_args(StageName):
        assert DEPLOYMENTS[name]["parameters"] == {"until": name, "refresh": [name]}
    for name in presets:
        assert DEPLOYMENTS[name]["build"] == [{"flows.config.preset_parameters": {"id": "preset", "name": name}}]
        assert preset_parameters(name) == {"config": asdict(load_preset(name))}
    for found in DEPLOYMENTS.values():
        assert found["description"]
        assert found["tags"]
        assert found["enforce_parameter_schema"] is True


def test_a_config_given_in_part_is_completed_from_the_demo() -> None:
    demo = asdict(load_preset("demo"))
    assert fill_in({}) == demo
    found = fill_in({"train": {"steps": 7}, "data": {"train": ["a.txt"]}})
    assert found["train"] == demo["train"] | {"steps": 7}
    assert found["data"] == demo["data"] | {"train": ["a.txt"]}
    assert found["model"] == demo["model"]
    whole = load_preset("owt")
    assert fill_in(whole) is whole


def test_the_flows_parameters_are_those_of_the_demo_where_none_are_given() -> None:
    assert pipeline.validate_parameters({"config": {}})["config"] == load_preset("demo")
    assert pipeline.parameters.properties["config"]["default"] == asdict(load_preset("demo"))


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


def test_up_needs_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["up"]) == 2
    assert "no prefect.yaml here" in capsys.readouterr().err
