"""The plot of a training run."""

import math
import warnings
from pathlib import Path

import pytest

from lm.train.tracking import plot_metrics


@pytest.mark.parametrize(
    "rows",
    [
        [{"step": n, "loss": 5 / n, "lr": 1e-3 / n} for n in range(1, 9)] + [{"step": 8, "valid_loss": 1.1}],
        [{"step": 1, "loss": None, "lr": 0.1}, {"step": 2, "loss": math.nan}],
        [],
    ],
    ids=["run", "gaps", "empty"],
)
def test_plot_writes_a_png(tmp_path: Path, rows: list[dict[str, float]]) -> None:
    pytest.importorskip("matplotlib")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        plot_metrics(rows, tmp_path / "plot.png")
    data = (tmp_path / "plot.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 2000
