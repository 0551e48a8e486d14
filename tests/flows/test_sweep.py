"""The flow ``sweep``: tables, cache, divergence, search, mistakes."""

import base64
import csv
import io
import math
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from PIL import Image

from flows.chain import PIPELINE
from flows.cli.parser import main
from flows.config import PipelineConfig, load_config
from flows.executor import PrefectExecutor
from flows.models import RunModel, resolve_model
from flows.plan import cached_run, plan
from flows.sweep import sweep
from flows.sweep_chain import SWEEP, _report
from flows.sweep_config import SWEEP_PRESETS, SweepConfig, load_sweep, with_base
from lm.common.errors import UserError
from lm.common.runtime import Execution
from lm.experiments.axes import Axis
from lm.experiments.config import LawConfig, SearchConfig
from lm.experiments.report import table_rows
from lm.experiments.trial import TrialConfig, TrialResult, make_result
from lm.model.config import ModelConfig
from lm.model.flops import parameter_count
from lm.text.config import DataConfig
from lm.tokenizer.config import TokenizerConfig
from lm.train.config import TrainConfig
from tasks.count import count_group
from tasks.maintenance.gc import find_garbage
from tasks.pages import sweep as pages
from tasks.runtime.context import RunContext
from tasks.runtime.output import Output, Ref, read_output
from tasks.trial import trial

pytestmark = pytest.mark.usefixtures("prefect_server")

BASE = PipelineConfig(
    data=DataConfig(train=["demo:100"]),
    tokenizer=TokenizerConfig(vocab_size=300),
    model=ModelConfig(context_length=16, d_model=16, num_layers=1, num_heads=2, d_ff=32),
    train=TrainConfig(
        steps=12, batch_size=2, warmup_steps=1, min_lr=0, eval_interval=2, eval_sequences=4, sample_tokens=0
    ),
    execution=Execution(compile=False, device="cpu", threads=1),
)
DIVERGING = 1e12
GRID = SweepConfig(
    name="grid",
    base=BASE,
    axes=[
        Axis(cases=[{"variant": "base"}, {"variant": "post-norm", "model.norm_placement": "post", "model.d_ff": 48}]),
        Axis(option="train.max_lr", values=[0.003, DIVERGING]),
    ],
    derive={"train.warmup_steps": "train.steps // 6"},
)


def output(root: Path, record: dict[str, Any], stage: str = "sweep") -> Output:
    return read_output(RunContext(str(root), "").store, Ref(stage, record["stages"][stage]["key"]))


def table(root: Path, record: dict[str, Any]) -> list[dict[str, str]]:
    with output(root, record).path("table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> tuple[Path, dict[str, Any]]:
    """A root with the finished sweep GRID, and its record."""
    root = tmp_path_factory.mktemp("sweep")
    return root, sweep(GRID, str(root))


def test_the_table_has_all_points_and_how_far_a_diverged_one_got(finished: tuple[Path, dict[str, Any]]) -> None:
    rows = table(*finished)
    assert [row["state"] for row in rows] == ["finished", "finished", "diverged", "diverged"]
    assert float(rows[0]["valid_bits_per_byte"]) < float(rows[1]["valid_bits_per_byte"])
    assert sorted(row["point"] for row in rows) == ["1", "2", "3", "4"]
    assert {(row["variant"], row["model.norm_placement"]) for row in rows} == {("base", "pre"), ("post-norm", "post")}
    assert {row["train.warmup_steps"] for row in rows} == {"2"}
    for row in rows:
        is_high = float(row["train.max_lr"]) == DIVERGING
        assert is_high == (row["state"] == "diverged")
        assert int(row["tokens"]) == int(row["steps"]) * 2 * 16
        assert (0 < int(row["steps"]) < 12) if is_high else (int(row["steps"]) == 12)
        assert ("nan" in row["reason"] or "inf" in row["reason"]) if is_high else not row["reason"]


def test_the_page_has_table_curves_axis_heat_map_and_best_configuration(finished: tuple[Path, dict[str, Any]]) -> None:
    page = output(*finished).page
    assert page is not None
    for text in ("**4** points: 2 finished, 2 diverged", "Loss over steps", "Loss over tokens", "```yaml"):
        assert text in page
    assert "Loss over train.max_lr" in page
    assert "Loss over model.d_ff" not in page, "it belongs to one variant"
    assert page.count("data:image/png") >= 3


def test_the_best_configuration_runs_from_the_cache(finished: tuple[Path, dict[str, Any]]) -> None:
    root, record = finished
    best = load_config(PipelineConfig, output(root, record).path("best.yaml"))
    assert best.train.max_lr == 0.003
    again = cached_run(PIPELINE, best, str(root), "train")
    assert again is not None
    assert again["stages"]["train"]["key"] == record["stages"]["train"]["key"]
    model = resolve_model(record["name"], str(root))
    assert isinstance(model, RunModel)
    assert model.model.ref.key == record["stages"]["train"]["key"], "the model of the run is the best one"


def test_a_second_start_is_all_cached(finished: tuple[Path, dict[str, Any]]) -> None:
    root, record = finished
    assert all(action.startswith("cached") for _, action in plan(SWEEP, GRID, str(root), None, ()))
    again = cached_run(SWEEP, GRID, str(root), None)
    assert again is not None
    assert again["stages"]["sweep"]["key"] == record["stages"]["sweep"]["key"]


def test_gc_keeps_the_models_of_all_points(finished: tuple[Path, dict[str, Any]]) -> None:
    root, _ = finished
    found = [
        finding.path
        for finding in find_garbage(RunContext(str(root), "").store)
        if finding.problem.startswith("no run")
    ]
    assert found == []


@pytest.mark.slow
def test_a_new_point_trains_only_itself(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(finished[0], root)
    wider = SweepConfig(
        name="grid",
        base=BASE,
        axes=[GRID.axes[0], Axis(option="train.max_lr", values=[0.003, 0.001, DIVERGING])],
        derive=GRID.derive,
    )
    before = {path.parent.name for path in root.glob("t*/*/manifest.json")}
    record = sweep(wider, str(root))
    new = [path.parts[-3] for path in root.glob("t*/*/manifest.json") if path.parent.name not in before]
    assert sorted(new) == ["train", "train", "trial", "trial"]
    assert len(table(root, record)) == 6


@pytest.mark.slow
def test_texts_and_tokenizers_may_vary(tmp_path: Path) -> None:
    axes = [Axis(option="tokenizer.vocab_size", values=[280, 300]), Axis(option="train.seed", values=[0, 1])]
    config = SweepConfig(name="vocabularies", base=BASE, axes=axes)
    record = sweep(config, str(tmp_path))
    rows = table(tmp_path, record)
    assert [row["state"] for row in rows] == ["finished"] * 4
    assert len(list(tmp_path.glob("merge/*/manifest.json"))) == 2
    best = int(rows[0]["tokenizer.vocab_size"])
    assert output(tmp_path, record, "merge").manifest["figures"]["vocab_size"] == best
    model = ModelConfig(**{**BASE.model.__dict__, "vocab_size": best})
    assert int(rows[0]["parameters"]) == parameter_count(model)["total"]


SEARCH = SweepConfig(
    name="search",
    base=BASE,
    axes=[Axis(option="train.max_lr", low=1e-5, high=0.1)],
    search=SearchConfig(trials=7, startup_trials=2),
)


@pytest.mark.slow
def test_a_search_prunes_and_a_second_start_is_all_cached(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    record = sweep(SEARCH, str(tmp_path))
    rows = table(tmp_path, record)
    states = [row["state"] for row in rows]
    assert len(rows) == 7
    assert "pruned" in states
    assert states.index("pruned") == states.count("finished"), "finished ones come first"
    pruned = rows[states.index("pruned")]
    assert int(pruned["steps"]) % 2 == 0 and "above the median" in pruned["reason"]
    again = cached_run(SWEEP, SEARCH, str(tmp_path), None)
    assert again is not None
    assert again["stages"]["sweep"]["key"] == record["stages"]["sweep"]["key"]


def write(path: Path, **fields: Any) -> str:
    path.write_text(yaml.safe_dump(fields))
    return str(path)


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


def test_the_base_may_be_a_file_beside_that_of_the_sweep(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", train={"steps": 777})
    file = write(tmp_path / "mine.yaml", **FILE | {"base": "base.yaml", "set": {"train.max_lr": 0.5}})
    assert replace(load_sweep(file).base.train, max_lr=0.5) == replace(PipelineConfig().train, max_lr=0.5, steps=777)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learning-rat"], "There is no sweep 'learning-rat' (did you mean 'learning-rate'?)"),
        (["learning-rate", "--size", "huge"], "has no size 'huge'. Sizes: demo, stories."),
        (["learning-rate", "--train.max_lr", "0.5"], "varies train.max_lr itself; leave --train.max_lr out"),
        (["learning-rate", "--budget", "30m"], "leave the budget out"),
        (["learning-rate", "--train.stepz", "5"], "did you mean '--train.steps'"),
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
    assert capsys.readouterr().out.count("\ntrial ") == 2


def test_a_diverging_sweep_exits_with_0(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"data.train": ["demo:100"], "tokenizer.vocab_size": 300}
    for section in ("model", "train", "execution"):
        fields = getattr(BASE, section).__dict__
        options |= {f"{section}.{name}": value for name, value in fields.items()}
    axes = [{"option": "train.max_lr", "values": [DIVERGING]}]
    derive = {"train.warmup_steps": "train.steps // 6"}
    file = write(tmp_path / "mine.yaml", set=options, axes=axes, derive=derive)
    assert main(["sweep", file, "--root", str(finished[0])]) == 0
    shown = capsys.readouterr().out
    assert "diverged" in shown
    assert "best.yaml" not in shown


def test_more_than_the_allowed_epochs_are_refused_before_a_training(tmp_path: Path) -> None:
    axes = [Axis(option="train.steps", values=[12, 10_000])]
    config = SweepConfig(name="epochs", base=BASE, axes=axes, max_epochs=2)
    with pytest.raises(UserError, match=r"train\.steps 10000 reads the training text .* max_epochs is 2"):
        sweep(config, str(tmp_path))
    assert not (tmp_path / "train").exists()


@pytest.mark.slow
def test_a_search_leaves_out_points_that_are_not_valid(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    axis = Axis(option="model.num_heads", low=1, high=8)  # 3, 5, 6 and 7 do not divide the width
    config = SweepConfig(name="heads", base=BASE, axes=[axis], search=SearchConfig(trials=5))
    with caplog.at_level("INFO"):
        rows = table(tmp_path, sweep(config, str(tmp_path)))
    left_out = caplog.text.count(" is left out. The sweep heads has an invalid point, trial ")
    assert left_out > 0 and len(rows) == 5 - left_out
    assert {row["model.num_heads"] for row in rows} <= {"1", "2", "4", "8"}


@pytest.mark.slow
def test_a_law_predicts_a_larger_budget_and_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainings are real, their losses those of a law: a parabola for each budget, whose minimum is a power law."""

    def loss_of(steps: int, parameters: int) -> float:
        distance = math.log(parameters / (15_000 * (steps / 4) ** 0.1))
        return 2 * steps**-0.1 * (1 + 0.3 * distance**2)

    def make_lawful_result(config: TrialConfig, *arguments: Any) -> TrialResult:
        made = make_result(config, *arguments)
        return replace(made, valid_bits_per_byte=loss_of(config.train.steps, made.parameters))

    monkeypatch.setattr("tasks.trial.make_result", make_lawful_result)
    config = SweepConfig(
        name="law",
        base=BASE,
        axes=[Axis(option="flops", values=[4, 8]), Axis(option="model.d_ff", values=[32, 64, 128, 256])],
        derive={"train.steps": "flops", "tokenizer.vocab_size": "300 + model.d_ff // 128"},
        law=LawConfig(budget="flops", size="model.d_ff", check_budget=16, check_sizes=[16, 96, 160, 320]),
    )
    record = sweep(config, str(tmp_path))
    made = output(tmp_path, record)
    prediction = made.json("law.json")["prediction"]
    assert prediction["loss"] == pytest.approx(2 * 16**-0.1, rel=1e-3)
    assert prediction["parameters"] == pytest.approx(15_000 * 4**0.1, rel=1e-2)
    rows = table(tmp_path, record)
    (check,) = [row for row in rows if row["flops"] == "16"]
    assert check["model.d_ff"] == "160", "its parameters are the nearest"
    assert made.page is not None
    assert "Prediction for 16 FLOPs" in made.page and "Check: **1.5" in made.page
    assert cached_run(SWEEP, config, str(tmp_path), None) is not None


@pytest.mark.slow
def test_a_law_without_a_minimum_says_so_after_its_trainings(tmp_path: Path) -> None:
    axes = [Axis(option="flops", values=[1, 2]), Axis(option="model.d_ff", values=[32, 64])]
    config = SweepConfig(name="law", base=BASE, axes=axes, law=LawConfig(budget="flops", size="model.d_ff"))
    with pytest.raises(UserError, match="2 sizes; a fit needs 3"):
        sweep(config, str(tmp_path))
    assert len(list(tmp_path.glob("sweep/*/*/table.csv"))) == 1, "the table shows which sizes to add"
    assert len(list(tmp_path.glob("trial/*/manifest.json"))) == 2, "flops is a variable: equal trainings are one"


@pytest.mark.parametrize("path", sorted(SWEEP_PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sweep_that_ships_is_valid_in_all_sizes_and_states_its_cost(path: Path) -> None:
    assert {"demo", "stories"} <= yaml.safe_load(path.read_text())["sizes"].keys()
    assert "# Cost on two CPU cores: " in path.read_text()
    for size in ("demo", "stories"):
        config = load_sweep(path.stem, size)
        assert config.name == f"{path.stem}-{size}"
        assert config.description
        assert len({str(point.config) for point in config.points()}) == len(config.points())
        assert with_base(config, config.base) == config


def draw_page(config: SweepConfig, folder: Path) -> str:
    """Return the page of a sweep whose points all finished, after a check of its table."""
    report = _report(config, config.points())
    curve = [{"step": 5, "valid_loss": 3.0, "valid_bits_per_byte": 1.5}]
    results = [
        TrialResult("finished", "", 10, 100, 1000, 1e9, 3.0, 2.0 + index, 1.0 + index, curve)
        for index in range(len(report.settings))
    ]
    rows = table_rows(report, results)
    assert {row[axis] for row in rows for axis in report.axes if axis == "flops"} <= {2e10, 5e10, 1.2e11}
    trials: Any = [SimpleNamespace(json=lambda name, result=result: asdict(result)) for result in results]
    out: Any = SimpleNamespace(figures={"finished": len(results)}, directory=folder)
    text = "\n\n".join(pages.sweep(out, trials, [], [], [], report))
    assert f"**{len(results):,}** points" in text
    return text


@pytest.mark.parametrize("path", sorted(SWEEP_PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sweep_that_ships_has_table_and_page(path: Path, tmp_path: Path) -> None:
    draw_page(load_sweep(path.stem, "demo"), tmp_path)


def test_a_dollar_sign_begins_no_formula(tmp_path: Path) -> None:
    cases = [{"variant": r"$\frac$"}, {"variant": "$x"}]
    axes = [Axis(cases=cases), Axis(option="train.max_lr", values=[0.1, 0.2])]
    assert r"$\frac$" in draw_page(SweepConfig(name="dollar", base=BASE, axes=axes), tmp_path)


def test_a_search_is_drawn_as_dots_and_not_as_a_map_with_a_place_for_each_pair(tmp_path: Path) -> None:
    cases = [{"train.max_lr": 10**-trial, "train.weight_decay": 0.01 * trial} for trial in range(1, 31)]
    page = draw_page(SweepConfig(name="search", base=BASE, axes=[Axis(cases=cases)]), tmp_path)
    drawn = re.search(r"!\[Loss over train.max_lr and train.weight_decay]\(data:image/png;base64,(.*?)\)", page)
    assert drawn
    assert Image.open(io.BytesIO(base64.b64decode(drawn[1]))).size == (1200, 900), "a map of 30 rows is higher"


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


@pytest.mark.parametrize(
    ("execution", "trials", "groups"),
    [
        (Execution(threads=1, max_trainings=2), 2, 1),  # each training has one thread
        (Execution(threads=4, max_trainings=0), 4, 4),
        (Execution(threads=4, max_trainings=2, tasks_in_flight=3), 3, 3),
    ],
)
def test_the_threads_of_a_training_do_not_limit_how_many_run_at_once(
    tmp_path: Path, execution: Execution, trials: int, groups: int
) -> None:
    run = RunContext(str(tmp_path), "", execution=execution)
    with PrefectExecutor(run, BASE) as executor:
        assert (executor._count_slots(trial), executor._count_slots(count_group)) == (trials, groups)


@pytest.mark.long
def test_two_trainings_at_once_give_the_table_of_one_at_a_time(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    both = replace(GRID, base=replace(BASE, execution=replace(BASE.execution, max_trainings=2)))
    record = sweep(both, str(tmp_path))
    assert table(tmp_path, record) == table(*finished)
