"""What the stages of the pipeline need is predicted, and a training that does not fit is refused before them."""

from dataclasses import replace
from pathlib import Path

import pytest

from flows.config import PipelineConfig
from flows.forecast import plan_with_forecasts
from flows.pipeline import pipeline
from lm.common.errors import UserError
from lm.curate.config import DecontaminateConfig, DeduplicateConfig, FilterConfig, RulesConfig
from lm.text.config import DataConfig
from textmill.cli.main import main

LINE = "Once upon a time there was a text.\n"


@pytest.fixture
def config(tmp_path: Path) -> PipelineConfig:
    (tmp_path / "text.txt").write_text(LINE * 4000)
    return replace(PipelineConfig.load_preset("demo"), data=DataConfig(train=[str(tmp_path / "text.txt")]))


def test_a_training_that_does_not_fit_is_refused_before_ingest(
    config: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm.train.training_memory.machine_memory", lambda: 16 << 30)
    large = replace(config, model=replace(config.model, d_model=16_384, num_layers=48, num_heads=16, d_ff=65_536))
    with pytest.raises(UserError, match=r"Use a smaller model: lower model\.d_model"):
        pipeline.fn(large, str(tmp_path / "root"))
    assert not (tmp_path / "root" / "ingest").exists()


def test_each_stage_that_runs_has_a_forecast(config: PipelineConfig, tmp_path: Path) -> None:
    def needs(config: PipelineConfig) -> dict[str, tuple[float | None, float | None, float | None]]:
        forecasts = plan_with_forecasts(config, str(tmp_path / "root"), None, ())[1]
        return {f.stage: (f.memory, f.disk, f.seconds) for f in forecasts}

    usual = needs(config)
    assert [*usual] == ["ingest", "chunk", "count", "merge", "encode", "train", "sample"]
    assert all(value is not None for row in usual.values() for value in row)
    assert usual["ingest"][1] == 0, "plain text is not copied"
    curated = needs(
        replace(
            config,
            filter=FilterConfig(RulesConfig()),
            deduplicate=DeduplicateConfig(equal=True, repeats="line"),
            decontaminate=DecontaminateConfig(validation=True),
        )
    )
    added = ["filter", "deduplicate", "repeats", "decontaminate"]
    assert [*curated] == ["ingest", *added, *[*usual][1:]]
    assert all(value for name in added for value in curated[name])
    english = needs(replace(config, filter=FilterConfig(RulesConfig(), languages=["en"])))
    assert (english["filter"][2] or 0) > (curated["filter"][2] or 0), "languages take longer than rules"
    wider = needs(replace(config, model=replace(config.model, d_model=4 * config.model.d_model)))
    assert all(after > before for after, before in zip(wider["train"], usual["train"], strict=True) if after and before)
    assert needs(replace(config, budget="1m"))["train"] == (None, None, None)


def test_the_plan_prints_the_forecasts(
    config: PipelineConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--root", str(tmp_path / "root"), "--data.train", config.data.train[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["stage", "memory", "disk", "time"] for line in lines)
    assert lines[-1].startswith("total") and any(line.startswith("train ") and " MB " in line for line in lines)
