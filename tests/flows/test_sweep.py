"""The flow ``sweep``: tables, cache, divergence, search, law."""

import csv
import errno
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName

from flows.config import PipelineConfig
from flows.executor import PrefectExecutor
from flows.pipeline import pipeline_stages
from flows.plan import cached_run, plan
from flows.sweep import make_report, sweep, sweep_stages
from flows.sweep_config import SweepConfig
from lm.common.errors import StorageError, UserError
from lm.curate.rules import RULES
from lm.experiments.axes import Axis
from lm.experiments.config import LawConfig, SearchConfig
from lm.experiments.trial import TrialConfig, TrialResult, make_result
from lm.model.config import ModelConfig
from lm.model.flops import parameter_count
from lm.text.config import DataConfig
from lm.tokenizer.config import TokenizerConfig
from lm.train import checkpoints
from lm.train.config import TrainConfig
from tasks.count import count_group
from tasks.maintenance.gc import find_garbage
from tasks.runs.models import RunModel, resolve_model
from tasks.runtime.execution import Execution
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import RunContext
from tasks.train import train
from tasks.trial import trial
from textmill.cli.main import main

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


@pytest.mark.slow
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
    best = PipelineConfig.load(output(root, record).path("best.yaml"))
    assert best.train.max_lr == 0.003
    again = cached_run(pipeline_stages, best, str(root), "train")
    assert again is not None
    assert again["stages"]["train"]["key"] == record["stages"]["train"]["key"]
    model = resolve_model(record["name"], str(root))
    assert isinstance(model, RunModel)
    assert model.model.ref.key == record["stages"]["train"]["key"], "the model of the run is the best one"


def test_prefect_names_each_trial_by_its_settings(finished: tuple[Path, dict[str, Any]]) -> None:
    _, record = finished
    with get_client(sync_client=True) as client:
        of_run = FlowRunFilter(name=FlowRunFilterName(any_=[record["name"]]))
        task_runs = client.read_task_runs(flow_run_filter=of_run)
    expected = {f"trial {point.title}" for point in GRID.points()}
    assert {task_run.name for task_run in task_runs if "trial" in task_run.name} == expected
    assert len(expected) == 4


def test_a_stage_of_a_sweep_took_at_least_the_time_of_its_making(finished: tuple[Path, dict[str, Any]]) -> None:
    """Also the stages that are recorded again at the end, and the training inside a trial."""
    root, record = finished
    for name, stage in record["stages"].items():
        assert stage["seconds"] >= output(root, record, name).manifest["made"]["seconds"], name


def test_the_best_configuration_has_the_types_of_the_options() -> None:
    config = replace(GRID, axes=[Axis(option="train.steps", values=[12.0])])
    (fields,) = make_report(config, config.points()).configs
    assert repr(fields["train"]["steps"]) == "12"


def test_a_second_start_is_all_cached(finished: tuple[Path, dict[str, Any]]) -> None:
    root, record = finished
    assert all(action.startswith("cached") for _, action in plan(sweep_stages, GRID, str(root), None, ()))
    again = cached_run(sweep_stages, GRID, str(root), None)
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


@pytest.mark.slow
def test_what_is_filtered_may_vary(tmp_path: Path) -> None:
    axes = [
        Axis(cases=[{"text": "all"}, {"text": "long", "filter.rules": {**dict.fromkeys(RULES), "min_characters": 300}}])
    ]
    record = sweep(SweepConfig(name="filters", base=BASE, axes=axes), str(tmp_path))
    assert [row["state"] for row in table(tmp_path, record)] == ["finished"] * 2
    assert len(list(tmp_path.glob("encode/*/manifest.json"))) == 2, "each text has its own shards"


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
    again = cached_run(sweep_stages, SEARCH, str(tmp_path), None)
    assert again is not None
    assert again["stages"]["sweep"]["key"] == record["stages"]["sweep"]["key"]


def test_a_diverging_sweep_exits_with_0(
    finished: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"data.train": ["demo:100"], "tokenizer.vocab_size": 300}
    for section in ("model", "train", "execution"):
        fields = getattr(BASE, section).__dict__
        options |= {f"{section}.{name}": value for name, value in fields.items()}
    axes = [{"option": "train.max_lr", "values": [DIVERGING]}]
    derive = {"train.warmup_steps": "train.steps // 6"}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"set": options, "axes": axes, "derive": derive}))
    assert main(["sweep", str(file), "--root", str(finished[0])]) == 0
    shown = capsys.readouterr().out
    head = shown.partition("Outputs:")[0]
    assert "valid_bits_per_byte" in head or "train_loss" in head, "even if it has one row"
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
def test_a_point_that_only_its_training_refuses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed")
    axis = Axis(option="model.context_length", values=[16, 100_000])  # more than the text has
    config = SweepConfig(name="contexts", base=BASE, axes=[axis], search=SearchConfig(trials=4, prune=False))
    with caplog.at_level("INFO"):
        rows = table(tmp_path, sweep(config, str(tmp_path)))
    message = "The point with model.context_length 100000 cannot be trained. The training text has "
    left_out = caplog.text.count(f"is left out. {message}")
    assert 0 < left_out == 4 - len(rows) < 4
    caplog.clear()
    axes = [Axis(option="model.context_length", values=[16, 100_000, 8])]
    for max_trainings in (1, 2):
        base = replace(BASE, execution=replace(BASE.execution, max_trainings=max_trainings))
        with caplog.at_level("INFO"):
            record = sweep(replace(config, base=base, axes=axes, search=None), str(tmp_path))
        rows = table(tmp_path, record)
        assert sorted(row["model.context_length"] for row in rows[:2]) == ["16", "8"], "points after it are trained"
        assert (rows[2]["point"], rows[2]["state"]) == ("2", "refused")
        assert rows[2]["reason"].startswith("The training text has ")
        assert "The training text has " in str(output(tmp_path, record).page)
        assert message in caplog.text
    assert caplog.text.count("Running train") == 3, "the second run tries only the refused point again"


@pytest.mark.slow
def test_a_sweep_in_which_no_point_can_be_trained_is_an_error_after_its_table(tmp_path: Path) -> None:
    axes = [Axis(option="model.context_length", values=[100_000, 200_000])]
    with pytest.raises(UserError, match=r"model\.context_length 100000 cannot be trained\. The training text has "):
        sweep(SweepConfig(name="contexts", base=BASE, axes=axes), str(tmp_path))
    assert len(list(tmp_path.glob("sweep/*/*/table.csv"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [(train, "body", "train cannot continue: "), (checkpoints, "save_training", "The checkpoint of step 2 cannot be")],
)
def test_a_full_disk_ends_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, message: str
) -> None:
    """It makes no point invalid."""
    pytest.importorskip("optuna", reason="Optuna is not installed")

    def fail(*arguments: Any, **inputs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, name, fail)
    axis = Axis(option="train.max_lr", low=0.001, high=0.01)
    with pytest.raises(StorageError, match=rf"^{message}.*No space left"):
        sweep(SweepConfig(name="full", base=BASE, axes=[axis], search=SearchConfig(trials=4)), str(tmp_path))


@pytest.mark.slow
def test_gc_keeps_what_a_stopped_sweep_has_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.sweep._Sweep.check_law", lambda state: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sweep(replace(GRID, axes=[Axis(option="train.max_lr", values=[0.003, 0.01])]), str(tmp_path))
    store = RunContext(str(tmp_path), "").store
    assert len(list(tmp_path.glob("trial/*/manifest.json"))) == 2
    assert [finding for finding in find_garbage(store) if finding.path.startswith(("trial/", "train/"))] == []
    for record in tmp_path.glob("runs/*.json"):
        record.unlink()
    paths = [finding.path for finding in find_garbage(store)]
    assert sum(path.startswith(("trial/", "train/")) for path in paths) == 4


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
    assert cached_run(sweep_stages, config, str(tmp_path), None) is not None


@pytest.mark.slow
def test_a_law_without_a_minimum_says_so_after_its_trainings(tmp_path: Path) -> None:
    axes = [Axis(option="flops", values=[1, 2]), Axis(option="model.d_ff", values=[32, 64])]
    config = SweepConfig(name="law", base=BASE, axes=axes, law=LawConfig(budget="flops", size="model.d_ff"))
    with pytest.raises(UserError, match="2 sizes; a fit needs 3"):
        sweep(config, str(tmp_path))
    assert len(list(tmp_path.glob("sweep/*/*/table.csv"))) == 1, "the table shows which sizes to add"
    assert len(list(tmp_path.glob("trial/*/manifest.json"))) == 2, "flops is a variable: equal trainings are one"


@pytest.mark.parametrize(
    ("execution", "trials", "groups"),
    [
        (Execution(threads=1, max_trainings=2), 2, 1),  # each training has one thread
        (Execution(threads=4, max_trainings=0), 5, 4),  # as many as there are cores for
        (Execution(threads=4, max_trainings=2, tasks_in_flight=3), 3, 3),
    ],
)
def test_the_threads_of_a_training_do_not_limit_how_many_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, execution: Execution, trials: int, groups: int
) -> None:
    monkeypatch.setattr("tasks.trial.available_cpus", lambda: 20)
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
