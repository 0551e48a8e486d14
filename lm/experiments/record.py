"""Whether a record holds: a recipe that is trained again, compared with its published loss."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from lm.experiments.config import RecordConfig

Verdict = Literal["held", "lost", "not comparable"]
_ERRORS = 2.5  # standard errors of the difference; by chance, a record is lost in one of 160 tries


@dataclass(frozen=True)
class RecordedText:
    """A record, and the digest of the tokens on which its recipe was trained again."""

    config: RecordConfig
    text: str


@dataclass(frozen=True)
class RecordResult:
    """The outcome of trainings of a record's recipe."""

    verdict: Verdict
    reason: str
    loss: float | None
    """Mean validation loss; None if a training did not finish."""
    loss_error: float | None
    """Standard error of that mean; None with one training."""


def judge_record(record: RecordConfig, text: str, losses: Sequence[float | None]) -> RecordResult:
    """Return whether trainings on tokens with the digest ``text`` reach the loss of ``record``.

    ``losses`` are the final validation losses of the trainings, None for one that did not finish. The record is held
    if their mean is not above its loss by more than 2.5 standard errors of the difference.
    """
    finished = [loss for loss in losses if loss is not None]
    if len(finished) < len(losses) or not finished:
        missing = len(losses) - len(finished)
        return RecordResult("lost", f"{missing} of {len(losses)} trainings did not finish", None, None)
    mean = fmean(finished)
    error = stdev(finished) / math.sqrt(len(finished)) if len(finished) > 1 else None
    figures = f"the mean loss is {_with_error(mean, error)}, that of the record "
    figures += _with_error(record.loss, record.loss_error or None)
    if record.text and text != record.text:
        reason = f"the tokens are not those of the record, so the losses do not compare; {figures}"
        return RecordResult("not comparable", reason, mean, error)
    allowed = _ERRORS * math.hypot(error or 0.0, record.loss_error)
    return RecordResult("held" if mean <= record.loss + allowed else "lost", figures, mean, error)


def _with_error(loss: float, error: float | None) -> str:
    return f"{loss:.4f}" if error is None else f"{loss:.4f} ± {error:.4f}"
