"""Files of sweeps: what they may have, those that ship, and mistakes in them."""

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config import PipelineConfig
from flows.sweep_config import SweepConfig, load_sweep, with_base
from lm.common.errors import UserError
from lm.model.config import ModelConfig
from lm.model.flops import parameter_count
from textmill.cli.main import main


def write(path: Path, **fields: Any) -> str:
    path.write_text(yaml.safe_dump(fields))
    return str(path)


MOE = {"num_experts": 4, "top_k": 2, "aux_loss_weight": "1e-2"}
FILE: dict[str, Any] = {
    "base": "demo",
    "set": {"data.train": ["demo:100"], "tokenizer.vocab_size": 300, "train.steps": 12, "train.warmup_steps": 1},
    "axes": [{"option": "train.max_lr", "values": [0.003, 0.01]}],
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"axes": [{"option": "train.warmup_steps", "values": [1, 12]}]},
            r"point 2 \(train.warmup_steps 12\): train: train.warmup_steps 12 must be below train.steps 12",
        ),
        (
            {"axes": [{"option": "train.max_lrs", "values": [1]}]},
            "point 1 (train.max_lrs 1): There is no option train.max_l",
        ),
        ({"axes": [{"option": "train.max_lr", "values": ["high"]}]}, "point 1 (train.max_lr high): train.max_lr"),
        ({"axes": []}, "has no axes"),
        ({"axis": []}, "unknown field 'axis' (did you mean 'axes'?)"),
        ({"set": {"train.step": 1}}, "There is no option train.step (did you mean 'train.steps'?)"),
        ({"derive": {"train.steps": "lr"}}, "there is no option or variable lr"),
        ({"law": {"budget": "budget"}}, "reads budget, which not every point sets"),
        (
            {"search": {}, "axes": [{"option": "data.train", "values": [["demo:10"]]}]},
            "varies no option of the section data",
        ),
        ({"search": {}, "derive": {"data.valid_fraction": "train.max_lr"}}, "varies no option of the section data"),
        (
            {
                "law": {"budget": "flops", "size": "train.seed", "check_budget": 9, "check_sizes": [3]},
                "axes": [{"option": "flops", "values": [1, 2]}, {"option": "train.seed", "values": [1, 2]}],
                "derive": {"data.valid_max_bytes": "flops * 1000"},
            },
            "derive no option of data",
        ),
        (
            {"search": {}, "axes": [{"option": "train.warmup_steps", "low": 5, "high": 40}]},
            "point 2 (train.warmup_steps 40): train:",
        ),
        (
            {
                "law": {"budget": "train.max_lr", "size": "train.seed"},
                "axes": [{"cases": [{"train.max_lr": 0.1, "train.seed": 1}, {"train.max_lr": 0.2}]}],
            },
            "reads train.seed, which not every point sets",
        ),
        ({"base": "demos"}, "There is no preset 'demos' (did you mean 'demo'?)"),
        ({"derive": {"point": "2"}}, "has a variable point; the table has a column of that name"),
        (
            {
                "axes": [{"cases": [{"model.moe": {"num_expert": 8}}]}],
                "derive": {"train.steps": "12 + parameters // 10**9"},
            },
            "point 1 (model.moe {'num_expert': 8}): The model is not valid: ",
        ),
        ({"base": "nowhere.yaml"}, "nowhere.yaml cannot be read: [Errno 2] No such file"),
        ({"base": "mine.yaml"}, "mine.yaml is not valid: axes: "),
        ({"set": {"execution.train_deployment": "pipeline/x"}}, "does not work in a sweep"),
        ({"set": {"train.max_lr": "high"}}, "mine.yaml: train.max_lr: Input should be a valid number"),
        ({"base": "~nosuchuser/b.yaml"}, "The base ~nosuchuser/b.yaml cannot be found"),
        ({"axes": [{"option": "parameters", "values": [1000]}]}, "has a variable parameters"),
        ({"derive": {"flops_per_token": "2"}}, "has a variable flops_per_token"),
        ({"axes": [{"option": "day", "values": [date(2024, 1, 1)]}]}, "The axis day has the value datetime.date(2024"),
        ({"axes": [{"option": "sample.temperature", "values": [0.5, 1]}]}, "sample.temperature has no effect on"),
        (
            {"law": {"budget": "flops", "size": "train.seed"}, "axes": [{"cases": [{"flops": 0, "train.seed": 1}]}]},
            "needs numbers above 0, and flops is 0",
        ),
        (
            {
                "law": {"budget": "flops", "size": "train.seed"},
                "axes": [{"cases": [{"flops": 1e9, "train.seed": 1, "train.max_seconds": 9}]}],
            },
            "A law needs trainings of a known cost; set no train.max_seconds",
        ),
        (
            {
                "law": {"budget": "flops", "size": "train.seed"},
                "axes": [{"cases": [{"flops": 1e9, "train.seed": 1, "train.patience": 3}]}],
            },
            "A law needs trainings of a known cost; set no train.patience",
        ),
        (
            {"search": {}, "derive": {"train.steps": "9"}},
            "at equal steps to prune them, and train.steps varies",
        ),
        (
            {"axes": [{"option": "model", "values": ["a", "b"]}]},
            "model is a part of the configuration; give the",
        ),
        ({"axes": [{"option": "train.seed", "low": 1, "high": 5, "num_values": 10**9}]}, "a range has 2 to 10,000"),
    ],
)
def test_an_invalid_sweep_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "mine.yaml", **FILE | {"set": FILE["set"] | changes.pop("set", {})} | changes)
    assert main(["sweep", file, "--root", str(tmp_path / "root")]) == 2
    assert message.replace("\\", "") in capsys.readouterr().err
    assert not (tmp_path / "root").exists()


def test_the_name_of_a_size_may_be_a_number(tmp_path: Path) -> None:
    sizes = {number: {"set": {"train.steps": 20 * number}} for number in (1, 2)}
    file = write(tmp_path / "mine.yaml", **FILE | {"sizes": sizes})
    assert load_sweep(file, "2").base.train.steps == 40
    with pytest.raises(UserError, match=r"Sizes: 1, 2\."):
        load_sweep(file, "3")


def test_empty_sizes_are_none(tmp_path: Path) -> None:
    assert load_sweep(write(tmp_path / "mine.yaml", **FILE | {"sizes": None})).base.train.steps == 12


def test_the_base_may_be_a_file_beside_that_of_the_sweep(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", train={"steps": 777})
    file = write(tmp_path / "mine.yaml", **FILE | {"base": "base.yaml", "set": {"train.max_lr": 0.5}})
    demo = PipelineConfig.load_preset("demo")  # as with textmill run --config base.yaml
    assert load_sweep(file).base == replace(demo, train=replace(demo.train, max_lr=0.5, steps=777))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learning-rat"], "There is no sweep 'learning-rat' (did you mean 'learning-rate'?)"),
        (["learning-rate", "--size", "huge"], "has no size 'huge'. Sizes: demo, stories."),
        (["learning-rate", "--train.max_lr", "0.5"], "varies train.max_lr itself; leave --train.max_lr out"),
        (["learning-rate", "--budget", "30m"], "leave the budget out"),
        (["learning-rate", "--train.stepz", "5"], "did you mean '--train.steps'"),
        (["~nosuchuser/x.yaml"], "There is no sweep '~nosuchuser/x.yaml'"),
        (["x" * 300 + ".yaml"], "There is no sweep 'xxx"),
    ],
)
def test_a_mistake_on_the_command_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["sweep", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_of_the_command_line_replace_those_of_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "mine.yaml", **FILE)
    assert main(["sweep", file, "--plan", "--root", str(tmp_path / "root"), "--data.train", "['nowhere.txt']"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    assert main(["sweep", file, "--plan", "--root", str(tmp_path / "root"), "--train.seed", "3"]) == 0
    [trials] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trial ")]
    assert trials.endswith(" (2 times)")


def test_a_size_without_a_name_counts_and_so_does_an_empty_base(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.yaml", **FILE | {"base": None, "sizes": {"": {"set": {"train.steps": 77}}}})
    assert load_sweep(file).base.train.steps == 77


def test_mappings_may_be_merged_at_any_depth(tmp_path: Path) -> None:
    text = """
sizes:
  one: {set: &small {<<: &start {train.steps: 30, train.warmup_steps: 3}, train.steps: 60}}
set: {<<: *small, train.seed: 7}
axes: [{option: train.max_lr, values: [1e-3, 0.01]}]
"""
    (tmp_path / "mine.yaml").write_text(text)
    config = load_sweep(str(tmp_path / "mine.yaml"), "one")
    assert (config.base.train.steps, config.base.train.warmup_steps, config.base.train.seed) == (60, 3, 7)
    assert config.points()[0].settings == {"train.max_lr": 0.001}


def test_numbers_with_exponents_are_read_at_any_depth(tmp_path: Path) -> None:
    axes = [{"option": "tokenizer.vocab_size", "values": ["3e2"]}, {"cases": [{"model.moe": MOE}]}]
    config = load_sweep(write(tmp_path / "mine.yaml", **FILE | {"axes": axes, "derive": {"n": "parameters"}}))
    point = config.points()[0]
    assert point.config["model"]["moe"]["aux_loss_weight"] == 0.01
    assert (
        point.settings["n"] == parameter_count(replace(ModelConfig(**point.config["model"]), vocab_size=300))["total"]
    )


@pytest.mark.parametrize("size", ["demo", "stories"])
def test_the_order_of_derived_options_does_not_count(size: str) -> None:
    """A database may sort the parameters of a flow, as PostgreSQL does with JSONB."""
    config = load_sweep("isoflop", size)
    expected = config.points()
    jsonb = dict(sorted(config.derive.items(), key=lambda item: (len(item[0]), item[0])))
    assert list(jsonb) != list(config.derive)
    for derive in (jsonb, dict(reversed(config.derive.items()))):
        assert [point.config for point in replace(config, derive=derive).points()] == [
            point.config for point in expected
        ]


@pytest.mark.parametrize("path", sorted(SweepConfig.PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sweep_that_ships_is_valid_in_all_sizes_and_states_its_cost(path: Path) -> None:
    sizes = ["demo"] if path.stem == "speedrun" else ["demo", "stories"]  # a size is a record
    assert {*sizes} <= yaml.safe_load(path.read_text())["sizes"].keys()
    assert "# Cost on two CPU cores: " in path.read_text()
    for size in sizes:
        config = load_sweep(path.stem, size)
        assert config.name == f"{path.stem}-{size}"
        assert config.description
        assert len({str(point.config) for point in config.points()}) == len(config.points())
        assert with_base(config, config.base) == config


def test_the_isoflop_sweep_spends_its_budgets() -> None:
    from lm.model.flops import flops_per_token

    for size, vocab_size in (("demo", 512), ("stories", 2048)):
        config = load_sweep("isoflop", size)
        assert len({point.settings["flops"] for point in config.points()}) == 3
        for point in config.points():
            model = ModelConfig(**point.config["model"] | {"vocab_size": vocab_size})
            tokens = point.config["train"]["steps"] * point.config["train"]["batch_size"] * model.context_length
            assert tokens * flops_per_token(model) == pytest.approx(point.settings["flops"], rel=0.05)


def test_silu_and_swiglu_have_equally_many_parameters() -> None:
    for size in ("demo", "stories"):
        points = {point.settings["variant"]: point.config["model"] for point in load_sweep("ablations", size).points()}
        swiglu, silu = (
            parameter_count(ModelConfig(**points[name] | {"vocab_size": 512}))["total"] for name in ("base", "SiLU")
        )
        assert swiglu == silu
