"""The sweep over mixtures: its points, its law, the weights in best.yaml, and what it refuses."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.config import PipelineConfig
from flows.plan import cached_run
from flows.sweep import sweep, sweep_stages
from flows.sweep_config import SweepConfig
from lm.common.errors import UserError
from lm.experiments.axes import Axis, get_option, set_option
from lm.experiments.config import MixtureConfig
from lm.text.config import DataConfig, MixSource
from lm.text.demo_corpus import demo_stories
from tasks.runtime.output import Ref, read_output
from tasks.runtime.run_context import RunContext
from tests.flows.test_sweep import BASE

pytestmark = pytest.mark.usefixtures("prefect_server")


def make_sweep(folder: Path, **mixture: Any) -> SweepConfig:
    """Return a sweep over two sources: stories, and lines of digits."""
    (folder / "stories.txt").write_text("".join(demo_stories(80)), encoding="utf-8")
    digits = (f"{number * number}\n" * 3 + "<|endoftext|>\n" for number in range(400, 800))
    (folder / "digits.txt").write_text("".join(digits), encoding="utf-8")
    mix = {
        "stories": MixSource([str(folder / "stories.txt")]),
        "digits": MixSource([str(folder / "digits.txt")], max_epochs=0.5),
    }
    train = replace(BASE.train, steps=20, max_lr=0.02, eval_interval=20)
    base = replace(BASE, data=DataConfig(mix=mix), train=train)
    return SweepConfig(name="mixture", base=base, mixture=MixtureConfig(**{"runs": 6, "min_weight": 0.05, **mixture}))


@pytest.mark.slow
def test_a_sweep_finds_weights_and_its_runs_stay_cached(tmp_path: Path) -> None:
    config = make_sweep(tmp_path, target_tokens=4000)
    root = tmp_path / "root"
    record = sweep(config, str(root))

    def read(stage: str) -> Any:
        return read_output(RunContext(str(root), "").store, Ref(stage, record["stages"][stage]["key"]))

    output = read("sweep")
    content, tokens = output.json("mixture.json"), read("encode").json("index.json")["train"]["sources"]
    assert content["sources"] == ["digits", "stories"] and len(content["runs"]) == 6
    total = sum(source["tokens"] for source in tokens.values())
    assert content["runs"][0]["weights"] == pytest.approx(
        [tokens[name]["tokens"] / total for name in content["sources"]]
    )
    assert content["runs"][1]["weights"] == pytest.approx([0.5, 0.5])
    by_share = sorted((run["weights"][0], run["losses"]) for run in content["runs"])
    assert by_share[0][1][0] > by_share[-1][1][0] and by_share[0][1][1] < by_share[-1][1][1], "more text, lower loss"
    best = PipelineConfig.load(output.path("best.yaml"))
    weights = {name: source.weight for name, source in best.data.mix.items()}
    highest = 0.5 * tokens["digits"]["tokens"] / 4000
    assert highest < 1 and sum(filter(None, weights.values())) == pytest.approx(1, abs=1e-3)
    assert 0.05 - 1e-4 <= (weights["digits"] or 0) <= highest + 1e-4
    assert best.data.mix["digits"].max_epochs == 0.5 and best.data.mix["digits"].paths
    found, natural = content["mixtures"]["found"], content["mixtures"]["natural"]
    if natural["weights"][0] <= highest:
        assert found["target"] <= natural["target"] + 1e-9
    assert output.page is not None
    for text in ("### Mixture", "predicted without it", "worth of stories", "data.mix.digits.weight"):
        assert text in output.page
    assert cached_run(sweep_stages, config, str(root), None) is not None

    other = replace(config, mixture=replace(config.mixture or MixtureConfig(), target={"stories": 1.0}))
    trained = {path.parent.name for path in root.glob("t*/*/manifest.json")}
    sweep(other, str(root))
    assert {path.parent.name for path in root.glob("t*/*/manifest.json")} == trained, "another target trains nothing"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mixture": MixtureConfig(runs=5)}, r"mixture\.runs is 5; a law of 2 sources .* needs 6"),
        ({"mixture": MixtureConfig(target={"storys": 1.0})}, r"weight of storys \(did you mean 'stories'\?\)"),
        ({"mixture": MixtureConfig(min_weight=0.5)}, r"min_weight 0\.5 must be below 1 / 2"),
        ({"axes": [Axis("train.max_lr", [0.1])]}, "leave out axes, search and law"),
        ({"base": BASE}, r"a mixture of 0 sources; name two or more in data\.mix"),
        ({"valid": ["demo:10"]}, r"leave out data\.valid"),
    ],
)
def test_a_wrong_mixture_sweep_is_a_user_error(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = make_sweep(tmp_path)
    if valid := change.pop("valid", None):
        change["base"] = replace(config.base, data=replace(config.base.data, valid=valid))
    with pytest.raises(UserError, match=message):
        replace(config, **change)


@pytest.mark.parametrize("target", [{"a": -1.0}, {"a": 0.0}])
def test_a_target_has_weights_of_which_one_is_above_0(target: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"mixture\.target is .*; it must have weights of at least 0"):
        MixtureConfig(target=target)


@pytest.mark.parametrize("lengths", [[], [0.5], [0.0, 1.0], [1.0, 2.0]])
def test_lengths_are_parts_of_the_steps(lengths: list[float]) -> None:
    with pytest.raises(UserError, match=r"mixture\.lengths is .*; it must have parts of train\.steps above 0"):
        MixtureConfig(lengths=lengths)


@pytest.mark.slow
def test_rounds_train_on_the_weights_found_and_fit_the_law_again(tmp_path: Path) -> None:
    config = make_sweep(tmp_path, runs=6, lengths=[0.5, 1], refine_rounds=2)
    root = tmp_path / "root"
    record = sweep(config, str(root))
    store = RunContext(str(root), "").store
    content = read_output(store, Ref("sweep", record["stages"]["sweep"]["key"])).json("mixture.json")
    assert [run["length"] for run in content["runs"]] == [0.5, 1] * 5
    trained = [json.loads(path.read_text()) for path in (root / "trial").rglob("manifest.json")]
    limits = [made["ingredients"]["parameters"]["config"]["mix"]["digits"]["max_epochs"] for made in trained]
    assert limits == [None] * 10, "trainings of the law have no limits of epochs"
    laws = [json.loads(path.read_text()) for path in (root / "mixture_law").rglob("mixture.json")]
    laws.sort(key=lambda law: len(law["runs"]))
    assert [len(law["runs"]) for law in laws] == [6, 8, 10] and laws[-1]["law"] == content["law"]
    for law, first in zip(laws[:2], (6, 8), strict=True):
        found = np.array(law["mixtures"]["found"]["weights"])
        for run in content["runs"][first : first + 2]:
            np.testing.assert_allclose(run["weights"], found, atol=2e-4)


@pytest.mark.slow
def test_checks_train_on_the_weights_found_and_on_others(tmp_path: Path) -> None:
    config = make_sweep(tmp_path, runs=6, lengths=[0.5, 1], target_tokens=3000, check_seeds=2)
    config = replace(config, derive={"train.eval_interval": "train.steps"})
    root = tmp_path / "root"
    record = sweep(config, str(root))
    output = read_output(RunContext(str(root), "").store, Ref("sweep", record["stages"]["sweep"]["key"]))
    content, tokens = output.json("mixture.json"), BASE.train.batch_size * BASE.model.context_length
    assert [run["length"] for run in content["runs"]] == [0.5, 1] * 3
    assert content["target_tokens"] == 3000 and all(exponent > 0 for exponent in content["law"]["exponents"])
    assert [len(part["measured"]) for part in content["mixtures"].values()] == [2, 2, 2]
    assert list(content["mixtures"]) == ["found", "natural", "uniform"]
    rows = [*csv.DictReader(output.path("table.csv").open())]
    checks = [row for row in rows if int(row["point"]) > 6]
    assert {row["train.steps"] for row in checks} == {str(round(3000 / tokens))}
    assert sorted(row["train.seed"] for row in checks) == ["0"] * 3 + ["1"] * 3
    best = PipelineConfig.load(output.path("best.yaml"))
    assert best.train.steps == config.base.train.steps
    assert output.page is not None and "above found" in output.page
    assert cached_run(sweep_stages, config, str(root), None) is not None


def test_options_inside_a_mapping_have_names_with_dots() -> None:
    config: dict[str, Any] = {"data": {"mix": {"a": {"weight": None}}}}
    set_option(config, "data.mix.a.weight", 2.0)
    assert get_option(config, "data.mix.a.weight") == 2.0
    for name in ("data.mix.b.weight", "data.mix.a.wieght", "data.mix.a.weight.more", "data"):
        with pytest.raises(UserError, match=f"There is no option {name}"):
            set_option(config, name, 1)
