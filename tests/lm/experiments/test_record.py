"""The verdict on a record."""

import random

import pytest

from lm.common.errors import UserError
from lm.experiments.config import RecordConfig
from lm.experiments.record import judge_record

RECORD = RecordConfig(loss=3.0, loss_error=0.01, text="a")


@pytest.mark.parametrize(
    ("losses", "text", "verdict", "reason"),
    [
        ([2.9, 2.95, 3.0], "a", "held", "the mean loss is 2.9500 ± 0.0289, that of the record 3.0000 ± 0.0100"),
        ([3.02], "a", "held", "the mean loss is 3.0200, that of"),
        ([3.03], "a", "lost", "the mean loss is 3.0300, that of"),
        ([3.10, 3.11, 3.12], "a", "lost", "the mean loss is 3.1100 ± 0.0058"),
        ([2.0, 2.0], "b", "not comparable", "the tokens are not those of the record"),
        ([2.0, None, 2.0], "a", "lost", "1 of 3 trainings did not finish"),
        ([], "a", "lost", "0 of 0 trainings did not finish"),
    ],
)
def test_a_record_is_judged(losses: list[float | None], text: str, verdict: str, reason: str) -> None:
    result = judge_record(RECORD, text, losses)
    assert result.verdict == verdict and reason in result.reason


def test_the_same_recipe_holds_its_record_and_a_worse_one_does_not() -> None:
    """Of 2,000 tries with three seeds each: by chance, few are lost."""
    rng = random.Random(0)

    def losses(mean: float) -> list[float | None]:
        return [rng.gauss(mean, 0.02) for _ in range(3)]

    error = 0.02 / 3**0.5
    record = RecordConfig(loss=3.0, loss_error=error)
    held = [judge_record(record, "", losses(3.0)).verdict == "held" for _ in range(2000)]
    worse = [judge_record(record, "", losses(3.0 + 8 * error)).verdict == "held" for _ in range(2000)]
    assert sum(held) > 1940 and sum(worse) < 100


def test_a_record_without_a_text_compares_any() -> None:
    assert judge_record(RecordConfig(loss=3.0), "b", [2.9]).verdict == "held"


@pytest.mark.parametrize("loss", [0.0, -1.0, float("inf"), float("nan")])
def test_a_loss_is_above_0(loss: float) -> None:
    with pytest.raises(UserError, match=r"record\.loss"):
        RecordConfig(loss=loss)
