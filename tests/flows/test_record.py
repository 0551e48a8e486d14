"""A sweep with a record, and the command that trains it again."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.config import PipelineConfig
from flows.sweep import sweep
from flows.sweep_config import SweepConfig, load_sweep
from lm.common.errors import UserError
from lm.experiments.axes import Axis
from lm.experiments.config import RecordConfig
from tasks.runtime.output import Ref, read_output
from tasks.runtime.run_context import RunContext
from tests.flows.test_sweep import BASE
from textmill.cli.main import main

SMALL = [
    *("--data.train=demo:120", "--tokenizer.vocab_size=300", "--model.context_length=16", "--model.d_model=16"),
    *("--model.num_layers=1", "--model.num_heads=2", "--model.d_ff=32", "--train.steps=4", "--train.warmup_steps=1"),
    *("--train.batch_size=2", "--execution.compile=false"),
]


@pytest.mark.usefixtures("prefect_server")
def test_a_record_is_held_or_lost(tmp_path: Path) -> None:
    verdicts = {}
    for loss in (100.0, 0.001):
        axes = [Axis("train.seed", [0, 1])]
        record = sweep(SweepConfig(name="r", base=BASE, record=RecordConfig(loss=loss), axes=axes), str(tmp_path))
        store = RunContext(str(tmp_path), "").store
        output = read_output(store, Ref("sweep", record["stages"]["sweep"]["key"]))
        content = output.json("record.json")
        assert content["result"]["loss_error"] > 0 and len(content["text"]) == 64
        verdicts[loss] = content["result"]["verdict"]
        assert output.manifest["figures"]["record"] == verdicts[loss]
    assert verdicts == {100.0: "held", 0.001: "lost"}
    assert len(list((tmp_path / "trial").glob("[0-9a-f]*/"))) == 2, "the second sweep trains nothing"


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_a_record_of_other_text_does_not_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["speedrun", *SMALL]) == 0
    assert "The record is not comparable: the tokens are not those of the record" in capsys.readouterr().out
    pages = [path.read_text() for path in (tmp_path / "artifacts" / "runs").glob("*.md")]
    assert any("### Record\n\n**not comparable**" in page for page in pages)


def test_a_record_that_ships_is_of_its_preset() -> None:
    config = load_sweep("speedrun", "demo")
    assert config.record and config.record.text and config.record.made
    assert [point.settings for point in config.points()] == [{"train.seed": seed} for seed in range(3)]
    assert replace(config.base.train, sample_tokens=40) == PipelineConfig.load_preset("demo").train


def test_only_the_seed_of_a_record_varies() -> None:
    with pytest.raises(UserError, match=r"has a record; only train\.seed may vary"):
        SweepConfig(record=RecordConfig(loss=1.0), axes=[Axis("train.max_lr", [1.0])])
