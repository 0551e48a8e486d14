"""``textmill sweep gate``: its trainings, its verdict, its cache and its ledger, and what it refuses."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.config import PipelineConfig
from flows.gate import read_variant
from flows.plan import cached_run, plan
from flows.sweep import sweep, sweep_stages
from flows.sweep_config import SweepConfig, load_sweep, with_gate
from lm.common.errors import UserError
from lm.experiments.axes import Axis
from lm.experiments.config import GateConfig
from lm.experiments.trial import TrialConfig, TrialResult, make_result
from tasks.maintenance.gc import find_garbage
from tasks.runtime.gate_ledger import read_ledger
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import RunContext
from tests.flows.test_sweep import BASE
from textmill.cli.main import main
from textmill.cli.tables import format_sweep

pytestmark = pytest.mark.usefixtures("prefect_server")

SIZES = [{"model.d_model": 16, "train.steps": 8}, {"model.d_model": 32, "train.steps": 12}]
GATE = GateConfig(sizes=SIZES, variant={"train.beta2": 0.9}, seeds=3, max_seeds=6, lengths=[0.5])
CONFIG = SweepConfig(name="gate", base=BASE, gate=GATE, derive={"train.eval_interval": "train.steps"})


def made(root: Path, record: dict[str, Any], stage: str) -> Output:
    return read_output(RunContext(str(root), "").store, Ref(stage, record["stages"][stage]["key"]))


def make_losses(monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    """Let trainings be real, and their losses those of a law with noise; the variant's are lower by ``gain``."""

    def make_lawful_result(config: TrialConfig, *arguments: Any) -> TrialResult:
        result = make_result(config, *arguments)
        noise = 0.002 * ((7 * config.train.seed + config.model.d_model) % 5 + (config.train.beta2 == 0.9))
        loss = 2 * (result.flops / 1e6) ** -0.1 + noise - gain * (config.train.beta2 == 0.9)
        return replace(result, valid_bits_per_byte=loss)

    monkeypatch.setattr("tasks.trial.make_result", make_lawful_result)


@pytest.mark.slow
def test_a_faster_variant_is_accepted_and_a_second_start_is_all_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_losses(monkeypatch, 0.2)
    record = sweep(CONFIG, str(tmp_path))
    content = made(tmp_path, record, "gate").json("gate.json")
    times = made(tmp_path, record, "gate").json("times.json")
    assert content["result"]["verdict"] == "accepted"
    for size in content["result"]["sizes"]:
        assert size["speedup"] > 1 and size["p"] <= 0.01 and size["baseline_flops"] == size["variant_flops"]
    assert all(seconds > 0 for seconds in times["baseline_seconds"] + times["variant_seconds"] + [times["hours"]])
    output = made(tmp_path, record, "sweep")
    with output.path("table.csv").open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 3 * 4 + 2 and sorted({row["train.seed"] for row in rows}) == ["0", "1", "2"]
    best = PipelineConfig.load(output.path("best.yaml"))
    assert (best.train.beta2, best.model.d_model) == (0.9, 32), "the arm to go on with, at the second size"
    page = output.page or ""
    for text in (
        "### Gate\n\n**Accepted: ",
        "| train.beta2 | `0.95` | `0.95` | `0.9` |",
        "Loss over FLOPs at size 2",
        "### Ledger",
        "train.beta2 0.9",
    ):
        assert text in page
    shown = format_sweep(record)
    assert "accepted: the variant needs less compute at both sizes (3 seeds, " in shown

    store = RunContext(str(tmp_path), "").store
    (entry,) = read_ledger(store)
    assert (entry["verdict"], entry["level"], entry["seeds"]) == ("accepted", 0.005, 3)
    assert find_garbage(store) == []
    assert all(action.startswith("cached") for _, action in plan(sweep_stages, CONFIG, str(tmp_path), None, ()))
    assert cached_run(sweep_stages, CONFIG, str(tmp_path), None) is not None
    sweep(CONFIG, str(tmp_path), ("gate",))
    assert read_ledger(store) == [entry], "the same evidence is the same look"


@pytest.mark.slow
def test_a_rerun_with_more_seeds_trains_only_these_and_spends_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_losses(monkeypatch, 0.0)
    record = sweep(CONFIG, str(tmp_path))
    first = made(tmp_path, record, "gate").json("gate.json")["result"]
    assert first["verdict"] != "accepted" and first["level"] == 0.005
    trained = len(list(tmp_path.glob("train/*/manifest.json")))
    more = replace(CONFIG, gate=replace(GATE, seeds=4))
    second = made(tmp_path, sweep(more, str(tmp_path)), "gate").json("gate.json")["result"]
    assert len(list(tmp_path.glob("train/*/manifest.json"))) == trained + 4
    assert second["spent"] == 0.005 and second["level"] == pytest.approx(0.01 * 4 / 6 - 0.005)
    assert [entry["seeds"] for entry in read_ledger(RunContext(str(tmp_path), "").store)] == [3, 4]
    other = replace(CONFIG, base=replace(BASE, train=replace(BASE.train, seed=10)))
    third = made(tmp_path, sweep(other, str(tmp_path)), "gate").json("gate.json")["result"]
    assert third["spent"] == pytest.approx(0.01 * 4 / 6) and third["level"] == 0, "other seeds are another try"


def test_a_variant_that_diverges_is_rejected(tmp_path: Path) -> None:
    gate = replace(GATE, variant={"train.max_lr": 1e12})
    root = tmp_path / "root"
    record = sweep(replace(CONFIG, gate=gate), str(root))
    result = made(root, record, "gate").json("gate.json")["result"]
    assert (result["verdict"], result["sizes"]) == ("rejected", [])
    assert "**Rejected: the variant diverged in 6 of 6 trainings" in (made(root, record, "sweep").page or "")
    (entry,) = read_ledger(RunContext(str(root), "").store)
    assert entry["verdict"] == "rejected" and entry["p"] == []


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (
            {"train.bta2": 0.9},
            r"The variant is not valid: There is no option train\.bta2 \(did you mean 'train\.beta2'",
        ),
        ({"data.train": ["demo:10"]}, r"The variant sets data\.train; both arms read the same text"),
        ({"data.valid": ["demo:10"]}, r"The variant sets data\.valid; both arms read the same text"),
        ({"tokenizer.vocab_size": 400}, r"The variant sets tokenizer\.vocab_size; both arms read the same text"),
        ({"train.seed": 3}, r"The variant sets train\.seed; leave it out"),
        (
            {"train.max_seconds": 3},
            r"The variant sets train\.max_seconds; leave it out: the gate compares at equal tokens",
        ),
        ({"train.beta2": 0.95}, "The variant equals the baseline at size 1"),
        ({"train.steps": 10}, "At size 1 the variant reads 320 tokens and the baseline 256"),
        ({"train.batch_size": 4}, "At size 1 the variant reads 512 tokens and the baseline 256"),
        ({"train.beta2": 1.5}, r"invalid point, point 2 \(arm variant.*\): train\.beta2: Input should be less than 1"),
    ],
)
def test_a_wrong_variant_is_a_user_error(variant: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(CONFIG, gate=replace(GATE, variant=variant))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": [Axis("train.max_lr", [0.1])]}, "has a gate, which chooses its points; leave out axes"),
        ({"derive": {"train.steps": "8"}}, r"sizes sets train\.steps, which the sweep derives"),
        ({"base": replace(BASE, data=replace(BASE.data, valid_fraction=0.0))}, "set data.valid or data.valid_fraction"),
        ({"base": replace(BASE, train=replace(BASE.train, patience=2))}, r"set no train\.patience"),
        ({"gate": replace(GATE, sizes=[{"data.train": ["demo:9"]}, {}])}, r"gate\.sizes sets data\.train"),
    ],
)
def test_a_wrong_gate_sweep_is_a_user_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(CONFIG, **changes)


def test_steps_of_the_base_may_not_be_derived() -> None:
    gate = replace(GATE, sizes=[{"model.d_model": 16}, {"model.d_model": 32}])
    with pytest.raises(UserError, match=r"A gate sets train\.steps of its trainings"):
        replace(CONFIG, gate=gate, derive={"train.steps": "8"})


def test_an_option_of_the_variant_is_not_derived() -> None:
    config = replace(CONFIG, gate=replace(GATE, variant={"train.eval_interval": 3}))
    assert [point.config["train"]["eval_interval"] for point in config.points()[:4]] == [8, 3, 12, 3]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("train.beta2: 0.99\n", {"train.beta2": 0.99}),
        ("train: {beta2: 0.99, max_lr: 1e-3}\nmodel: {qk_norm: true}\n", None),
        ("model.moe: {num_experts: 4}\n", {"model.moe": {"num_experts": 4}}),
    ],
)
def test_a_variant_has_options_by_name_or_by_section(tmp_path: Path, text: str, options: dict[str, Any] | None) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    expected = options or {"train.beta2": 0.99, "train.max_lr": 0.001, "model.qk_norm": True}
    assert read_variant(tmp_path / "mine.yaml") == expected


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        (["gate"], "", "The sweep gate-demo needs a variant: --variant FILE"),
        (["gate", "--variant", "mine.yaml"], "", "mine.yaml must have the options of the variant"),
        (["gate", "--variant", "mine.yaml"], "- 3", "mine.yaml must have the options of the variant"),
        (["gate", "--variant", "mine.yaml"], "train.beta2: 1\ntrain: {beta2: 2}", "train.beta2 is given twice"),
        (["gate", "--variant", "none.yaml"], "", "none.yaml cannot be read"),
        (
            ["gate", "--variant", "mine.yaml", "--seeds", "2"],
            "train.beta2: 0.9",
            "gate.seeds is 2; it must be at least 3",
        ),
        (
            ["gate", "--variant", "mine.yaml", "--train.warmup_steps", "3"],
            "train.beta2: 0.9",
            "varies train.warmup_steps",
        ),
        (["learning-rate", "--variant", "mine.yaml"], "train.beta2: 0.9", "--variant is for a sweep with a gate"),
        (["learning-rate", "--seeds", "4"], "", "--seeds is for a sweep with a gate"),
    ],
)
def test_a_wrong_command_is_a_user_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["sweep", *arguments, "--plan"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("size", ["demo", "stories"])
def test_the_gate_that_ships_takes_a_variant_and_seeds(tmp_path: Path, size: str) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({"train.beta2": 0.98}))
    config = with_gate(load_sweep("gate", size), str(tmp_path / "mine.yaml"), 13)
    assert config.gate and config.gate.variant == {"train.beta2": 0.98}
    assert config.stage_names().count("trial") == len(config.points()) == 4 * 13 + 2 * len(config.gate.lengths)
    assert (
        "gate" in config.stage_names()
        and "gate" not in replace(config, gate=None, axes=[Axis("train.seed", [1])]).stage_names()
    )
