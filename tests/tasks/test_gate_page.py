"""What the page and the command line say about a verdict."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from lm.experiments.config import GateConfig
from lm.experiments.gate import LEVEL, judge
from lm.experiments.report import SweepReport
from tasks.pages.gate import comparison_rows, gate_section, verdict_lines
from tests.lm.experiments.test_gate import CONFIG, make_results

TIMES: dict[str, Any] = {"speedups": [1.2, None], "hours": 0.5, "hours_to_needed": 3.0, "hours_to_largest": 6.0}
REPORT = SweepReport("gate", "", [], [{}, {}, {}], [{"train": {"beta2": 0.95}, "model": {"d_model": 32}}] * 3)


def content(config: GateConfig, gain: float, spent: float = 0.0) -> dict[str, Any]:
    """Return ``gate.json`` of simulated losses."""
    return {"config": asdict(config), "result": asdict(judge(config, make_results(config, gain), spent))}


@pytest.mark.parametrize(
    ("changes", "gain", "spent", "texts"),
    [
        ({}, 5.0, 0.0, ["accepted: the variant needs less compute at both sizes (12 seeds, 30 min)."]),
        ({}, -5.0, 0.0, ["rejected: the variant is slower at size 1 and 2 (12 seeds, 30 min)."]),
        (
            {"seeds": 3},
            0.3,
            0.0,
            [
                "undecided: more seeds may decide (3 seeds, 30 min).",
                "12 seeds (9 more, 3.0 h) find a speed-up of 1.05 in 80 % of cases: --seeds 12.",
            ],
        ),
        (
            {"seeds": 3, "least_speedup": 1.02},
            0.3,
            0.0,
            [
                "undecided",
                "42 seeds (39 more, 3.0 h) find a speed-up of 1.02 in",
                "above the largest cost",
            ],
        ),
        (
            {"seeds": 3, "least_speedup": 1.001, "max_seeds": 4},
            0.3,
            0.0,
            ["undecided", "No number of seeds finds a speed-up of 1.001", "(gate.max_seeds 4, 6.0 h more)"],
        ),
        ({"seeds": 24}, 0.3, LEVEL, ["undecided", "The looks so far have spent the allowed error."]),
    ],
)
def test_a_verdict_says_what_more_seeds_cost(
    changes: dict[str, Any], gain: float, spent: float, texts: list[str]
) -> None:
    lines = verdict_lines(content(replace(CONFIG, **changes), gain, spent), TIMES)
    assert len(lines) == len(texts)
    for text, line in zip(texts, lines, strict=True):
        assert text in line


def test_the_section_shows_both_sizes_and_the_ledger() -> None:
    look = {"at": "2026-11-30T12:00:00", "variant": {"train.beta2": 0.5}, "seeds": 12, "verdict": "rejected"}
    look |= {"p": [0.3], "speedups": [None], "speedups_in_time": [0.5], "level": 0.005}
    shown = content(CONFIG, 200.0)  # below the irreducible loss
    text = "\n\n".join(gate_section(shown, TIMES, [look] * 51, REPORT))
    assert "| train.beta2 | `0.95` | `0.95` | `0.99` |" in text
    assert "At size 1 and 2 the speed-up lies beyond the longest training of the baseline." in text
    assert "The last 50 of 51 looks" in text
    assert text.count("| 2026-11-30 12:00 | train.beta2 0.5 | 12 | rejected | 0.3 | ∞ | 0.500 | 0.0050 |") == 50
    rows = comparison_rows(shown, TIMES)[1]
    assert [row[5:] for row in rows] == [["∞", "∞ to ∞", "1.200"], ["∞", "∞ to ∞", ""]]
