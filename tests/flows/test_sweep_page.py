"""The page of a sweep, of results that are made up."""

import base64
import io
import math
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flows.config import PipelineConfig
from flows.sweep import make_report
from flows.sweep_config import SweepConfig, load_sweep
from lm.experiments.axes import Axis
from lm.experiments.loss_surface import fit_loss_surface, predict_by_surface
from lm.experiments.report import table_rows
from lm.experiments.scaling_law import Measurement, fit_scaling_law, predict
from lm.experiments.trial import TrialResult
from lm.train.config import TrainConfig
from tasks.pages import sweep as pages
from tasks.pages.sweep import _scaling_law

BASE = PipelineConfig(train=TrainConfig(min_lr=0))


def draw_page(config: SweepConfig, folder: Path) -> str:
    """Return the page of a sweep whose points all finished, after a check of its table."""
    report = make_report(config, config.points())
    curve = [{"step": 5, "valid_loss": 3.0, "valid_bits_per_byte": 1.5}]
    results = [
        TrialResult("finished", "", 10, 100, 1000, 1e9, 3.0, 2.0 + index, 1.0 + index, curve)
        for index in range(len(report.settings))
    ]
    assert len(table_rows(report, results)) == len(results)
    trials: Any = [SimpleNamespace(json=lambda name, result=result: asdict(result)) for result in results]
    out: Any = SimpleNamespace(figures={"finished": len(results)}, directory=folder)
    text = "\n\n".join(pages.sweep(out, trials, [], [], [], report))
    assert f"**{len(results):,}** points" in text
    return text


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SweepConfig.PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sweep_that_ships_has_table_and_page(path: Path, tmp_path: Path) -> None:
    draw_page(load_sweep(path.stem, "demo"), tmp_path)


def test_budgets_are_numbers_in_the_table() -> None:
    config = load_sweep("isoflop", "demo")
    report = make_report(config, config.points())
    results = [TrialResult("finished", "", 10, 100, 1000, 1e9, 3.0, 2.0, 1.0, [])] * len(report.settings)
    assert {row["flops"] for row in table_rows(report, results)} == {2e10, 5e10, 1.2e11}


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


@pytest.mark.parametrize(
    "axes",
    [
        [Axis(option="model.num_kv_heads", values=[None, 1, 2]), Axis(option="train.patience", values=[None, 3, 10])],
        [Axis(option="model.moe", values=[None, {"num_experts": 4}]), Axis(option="train.patience", values=[None, 3])],
    ],
    ids=["numbers", "a mapping"],
)
def test_null_is_a_value_of_an_axis(axes: list[Axis], tmp_path: Path) -> None:
    page = draw_page(SweepConfig(name="null", base=BASE, axes=axes), tmp_path)
    assert f"![Loss over {axes[0].option} and {axes[1].option}]" in page
    assert ("![Loss over train.patience;" in page) == (len(axes[1].values) > 2), "two numbers beside null"


@pytest.mark.parametrize("budgets", [3, 4])
def test_the_page_says_on_what_a_prediction_depends(budgets: int) -> None:
    runs = [
        Measurement(flops, size, flops / (6 * size), 1.7 + 9 * flops**-0.15 + 0.05 * math.log(size / flops**0.5) ** 2)
        for flops in (1e12, 3e12, 1e13, 3e13)[:budgets]
        for size in flops**0.5 * np.array([0.3, 0.6, 1.2, 2.4])
    ]
    law = fit_scaling_law(runs)
    surface = fit_loss_surface(runs)
    by_surface = {"fit": asdict(surface), "prediction": asdict(predict_by_surface(runs, surface, 3e14))}
    content = {
        "measurements": [*map(asdict, runs)],
        "law": asdict(law),
        "prediction": asdict(predict(runs, law, 3e14)),
        "surface": by_surface if budgets == 4 else None,
    }
    page = "\n\n".join(_scaling_law(content, [], "bits per byte"))
    assert ("if the power law goes on" in page) == (budgets < 4)
    assert (re.search(r"loss \| 1\.7\d* \+ [\d.]+ · FLOPs", page) is not None) == (budgets == 4)
    assert ("For 3e+14 FLOPs it predicts" in page) == (budgets == 4)


def test_variables_with_the_names_of_results_keep_their_columns() -> None:
    axes = [Axis(cases=[{"flops": 1e9, "trained_flops": 2}])]
    config = SweepConfig(name="names", base=BASE, axes=axes)
    result = TrialResult("finished", "", 10, 100, 1000, 5e9, 3.0, 2.0, 1.0, [])
    (row,) = table_rows(make_report(config, config.points()), [result])
    assert (row["flops"], row["trained_flops"], row["trained_trained_flops"]) == (1e9, 2, 5e9)
