"""The report of a sweep: its points and their results as a table, the best first."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lm.experiments.axes import Settings
from lm.experiments.trial import TrialResult, rank

_RESULT_COLUMNS = (
    "valid_bits_per_byte",
    "valid_loss",
    "train_loss",
    "steps",
    "tokens",
    "parameters",
    "flops",
    "state",
    "reason",
)


@dataclass(frozen=True)
class SweepReport:
    """The name, axes and settings of a sweep, for its table and page."""

    name: str
    description: str
    axes: list[str]
    """Options and variables of the axes, in their order."""
    settings: list[Settings]
    """Values of the axes at each point, and the derived ones."""
    configs: list[dict[str, Any]]
    """Configuration of each point, without what has no effect on results."""

    @property
    def columns(self) -> list[str]:
        """Options and variables of the table: the axes, then the derived ones."""
        return list(dict.fromkeys([*self.axes, *(name for point in self.settings for name in point)]))

    def value(self, index: int, name: str) -> Any:
        """Return the value of an option at a point, from its configuration if its case does not set it."""
        if name in self.settings[index]:
            return self.settings[index][name]
        section, _, option = name.partition(".")
        return self.configs[index].get(section, {}).get(option)


def table_rows(report: SweepReport, results: Sequence[TrialResult]) -> list[dict[str, Any]]:
    """Return a row for each point, the best first: its number from 1, its settings and its result.

    A result with the name of a setting, such as the variable ``flops``, is called ``trained_flops``.
    """
    names = {name: _free_name(name, report.columns) for name in _RESULT_COLUMNS}
    rows = []
    for index in rank(results):
        settings = {name: report.value(index, name) for name in report.columns}
        result = {column: getattr(results[index], name) for name, column in names.items()}
        rows.append({"point": index + 1, **settings, **result})
    return rows


def _free_name(name: str, taken: Sequence[str]) -> str:
    return _free_name(f"trained_{name}", taken) if name in taken else name


def format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV with a header. Missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
