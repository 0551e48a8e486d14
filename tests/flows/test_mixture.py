"""The pipeline on a mixture of named sources: which stages share what, and which run again."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flows.config import PipelineConfig
from flows.pipeline import find_inputs, pipeline_stages
from flows.plan import plan
from flows.sweep import make_report
from flows.sweep_config import SweepConfig
from lm.common.errors import UserError
from lm.experiments.axes import Axis
from lm.text.config import DataConfig, MixSource
from lm.text.demo_corpus import demo_stories
from tasks.runtime.output import Output
from tasks.runtime.run_context import RunContext
from tests.helpers.pipelines import STAGES, Runner
from textmill.cli.parser import build_parser, parse, read_config
from textmill.cli.tables import _next_commands

pytestmark = pytest.mark.usefixtures("prefect_server")


def mixed(config: PipelineConfig, **weights: float | None) -> PipelineConfig:
    """Return a configuration whose text is that of two sources, with these weights."""
    folder = Path(config.data.train[0]).parent
    for seed, name in enumerate(("tales", "notes"), start=1):
        if not (path := folder / f"{name}.txt").exists():
            path.write_text("".join(demo_stories(60 * seed, seed)), encoding="utf-8")
    mix = {name: MixSource([str(folder / f"{name}.txt")], weights.get(name)) for name in ("tales", "notes")}
    return replace(config, data=DataConfig(mix=mix))


def parameters(output: Output) -> list[str]:
    return sorted(output.manifest["ingredients"]["parameters"])


@pytest.mark.slow
def test_sources_share_no_group_and_no_shard_and_each_has_a_loss(run: Runner, config: PipelineConfig) -> None:
    config = mixed(config, tales=3.0, notes=1.0)
    assert run(config) == STAGES
    assert {action.split(",")[0] for _, action in plan(pipeline_stages, config, str(run.root), None, ())} == {"cached"}
    texts = [
        b"".join(Path(source["url"]).read_bytes() for source in group.manifest["sources"])
        for group in run.groups("ingest-group")
    ]
    assert sorted(texts) == sorted(Path(source.paths[0]).read_bytes() for source in config.data.mix.values())
    index = run.output("encode").json("index.json")
    for split in ("train", "valid"):
        assert list(index[split]["sources"]) == ["notes", "tales"]
        for name in ("tokens", "documents", "bytes"):
            assert sum(totals[name] for totals in index[split]["sources"].values()) == index[split][name]
    figures = run.output("train").manifest["figures"]
    assert figures["valid_loss/tales"] != figures["valid_loss/notes"]
    tokens = {name: totals["tokens"] for name, totals in index["valid"]["sources"].items()}
    windows = {name: (count - 1) // config.model.context_length for name, count in tokens.items()}
    mean = sum(figures[f"valid_loss/{name}"] * count for name, count in windows.items()) / sum(windows.values())
    assert figures["valid_loss"] == pytest.approx(mean)
    page = run.output("train").page
    assert page is not None and "### Sources" in page and "| tales | 75.00 % | 6 |" in page

    weighted = mixed(config_of(config), tales=1.0, notes=2.0)
    assert run(weighted) == ["train", "sample"], "only the training reads the weights"


def config_of(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration with a source beside those of the mixture, to make another mixture of."""
    folder = Path(next(iter(config.data.mix.values())).paths[0]).parent
    return replace(config, data=DataConfig(train=[str(folder / "train.txt")]))


@pytest.mark.slow
def test_text_that_a_source_gets_does_not_change_the_groups_of_another(run: Runner, config: PipelineConfig) -> None:
    config = mixed(config)
    run(config, until="encode")
    before = {stage: {output.ref for output in run.groups(stage)} for stage in ("ingest-group", "chunk-group")}
    with Path(config.data.mix["notes"].paths[0]).open("a", encoding="utf-8") as file:  # the first by name
        file.writelines(demo_stories(20, 7))
    run(config, until="encode")
    for stage, kept in {"ingest-group": 1, "chunk-group": 2}.items():  # chunks of training and validation text
        assert len({output.ref for output in run.groups(stage)} & before[stage]) >= kept
        made = {output.ref for output in run.groups(stage, made_in_last_run=True)}
        assert len(made) == kept


@pytest.mark.slow
def test_validation_text_without_a_name_has_one_loss(run: Runner, config: PipelineConfig) -> None:
    valid = config.data.valid
    config = mixed(config)
    run(replace(config, data=replace(config.data, valid=valid)), until="train")
    figures = run.output("train").manifest["figures"]
    assert figures["valid_loss"] > 0 and not [name for name in figures if "/" in name]
    assert run.output("encode").manifest["figures"]["valid"]["documents"] == 30


def test_without_a_mixture_no_key_has_anything_of_it(run: Runner, config: PipelineConfig) -> None:
    """So the roots of before stay cached."""
    run(config)
    assert {stage: parameters(run.output(stage)) for stage in ("ingest", "encode", "train")} == {
        "ingest": ["data", "fraction", "train", "valid"],
        "encode": ["separator", "tokenizer", "train", "valid"],
        "train": ["config", "index", "model", "tokenizer", "train_shards", "valid_shards"],
    }
    data = run.output("ingest").manifest["ingredients"]["parameters"]["data"]
    assert sorted(data) == ["invalid_utf8", "separator", "separator_in_document", "text_field"]
    sweep = SweepConfig(base=config, axes=[Axis("train.max_lr", [0.1, 0.2])])
    assert all("mix" not in fields["data"] for fields in make_report(sweep, sweep.points()).configs)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"a": {"paths": ["x"], "weight": -1}}, r"data\.mix\.a\.weight: .* greater than or equal to 0"),
        ({"a": {"paths": ["x"], "wieght": 1}}, r"data\.mix\.a\.wieght: Unexpected"),
        ({"a": {"paths": []}}, r"data\.mix\.a has no paths; name at least one file"),
        ({"a/b": {"paths": ["x"]}}, "a source named 'a/b'; a name has at most 40 letters"),
        ({"a": {"paths": ["x"], "weight": 0}}, r"All weights of data\.mix are 0"),
        ({"a": {"paths": ["x"], "max_epochs": 0}}, r"data\.mix\.a\.max_epochs: .* greater than 0"),
        ({"a": ["x"]}, r"data\.mix\.a: "),
    ],
)
def test_a_wrong_mixture_is_a_user_error(mix: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PipelineConfig.validate({"data": {"mix": mix}})


def test_a_mixture_replaces_the_training_text() -> None:
    mix = {"a": {"paths": ["x"]}}
    with pytest.raises(UserError, match=r"data\.train and data\.mix are both set\. Leave one of them out"):
        PipelineConfig.validate({"data": {"train": ["y"], "mix": mix}})
    config = PipelineConfig.validate({"data": {"train": ["demo:6000"], "mix": mix}})
    assert config.data.train == [] and config.data.paths == ["x"]
    assert PipelineConfig.validate(asdict(config)) == config


def test_an_empty_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    data = DataConfig(mix={"a": MixSource([str(tmp_path / "empty.txt")]), "b": MixSource(["demo:10"])})
    with pytest.raises(UserError, match=r"empty\.txt is empty; remove it from the sources"):
        find_inputs(PipelineConfig(data=data), RunContext(str(tmp_path / "root"), "").store)


def test_the_command_line_and_the_last_run_take_a_mixture() -> None:
    command = ["run", "--data.mix", "{a: {paths: [x, y], weight: 3}, b: {paths: [z], max_epochs: 2}}"]
    parser = build_parser(only="run")
    config = read_config(PipelineConfig, parser.instantiate(parse(parser, command))["run"])
    assert config.data.mix == {"a": MixSource(["x", "y"], 3.0), "b": MixSource(["z"], None, 2.0)}
    again = build_parser("demo", config, "run")
    assert read_config(PipelineConfig, again.instantiate(parse(again, ["run"]))["run"]).data == config.data
    other = parse(again, ["run", "--data.mix.a.weight", "5"])
    changed = read_config(PipelineConfig, again.instantiate(other)["run"]).data.mix
    assert changed == {"a": MixSource(["x", "y"], 5.0), "b": MixSource(["z"], None, 2.0)}
    other = parse(again, ["run", "--data.mix", "{a: {paths: [w]}}"])
    changed = read_config(PipelineConfig, again.instantiate(other)["run"]).data.mix
    assert changed == {"a": MixSource(["w"], 3.0)}, "a source keeps its other fields"
    other = parse(again, ["run", "--data.mix", "{}", "--data.train", "q"])
    assert read_config(PipelineConfig, again.instantiate(other)["run"]).data.train == ["q"]


def test_a_run_on_a_mixture_ends_with_commands_to_try(tmp_path: Path) -> None:
    config = PipelineConfig(data=DataConfig(mix={"a": MixSource(["demo:10"])}))
    record = {"root": str(tmp_path), "stages": {}, "config": asdict(config)}
    assert any("--again --budget 30m" in command for command, _ in _next_commands(record))
