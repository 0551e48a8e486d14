"""Results of trials: states, pruning, order."""

import math
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.experiments.report import SweepReport, format_csv, table_rows
from lm.experiments.trial import TrialConfig, TrialResult, find_prune_step, from_json, make_result, rank
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token
from lm.train.config import TrainConfig

MODEL = ModelConfig(context_length=8, d_model=8, num_layers=1, num_heads=2, d_ff=16)
TRAIN = TrainConfig(steps=4, batch_size=2, warmup_steps=1)
ROWS = [
    {"step": 1, "loss": 5.0, "smoothed_loss": 5.0, "lr": 0.1, "tokens_per_second": 9},
    {"step": 2, "valid_loss": 4.0, "valid_bits_per_byte": 3.0},
    {"step": 4, "smoothed_loss": 4.5, "valid_loss": 3.0, "valid_bits_per_byte": 2.0},
]
TRAINING = {"steps": 4, "valid_loss": 2.9, "valid_bits_per_byte": 1.9}


def result(
    rows: list[dict[str, Any]] = ROWS, training: Any = TRAINING, divergence: Any = None, **limits: float
) -> TrialResult:
    config = TrialConfig(MODEL, TRAIN, {name.removeprefix("at_"): limit for name, limit in limits.items()})
    return make_result(config, 257, rows, training, divergence)


def test_a_finished_training() -> None:
    made = result()
    assert (made.state, made.reason, made.steps, made.tokens) == ("finished", "", 4, 64)
    assert (made.valid_loss, made.valid_bits_per_byte, made.train_loss) == (2.9, 1.9, 4.5)
    assert made.objective == 1.9
    assert made.flops == 64 * flops_per_token(ModelConfig(**{**MODEL.__dict__, "vocab_size": 257}))
    assert made.curve[0] == {"step": 1, "loss": 5.0, "smoothed_loss": 5.0}
    assert made.eval_losses == {2: 3.0, 4: 2.0}
    assert from_json(asdict(made)) == made


def test_without_validation_text_the_training_loss_counts() -> None:
    made = result(rows=[ROWS[0]], training={"steps": 4, "valid_loss": None})
    assert (made.state, made.objective) == ("finished", 5.0)


@pytest.mark.parametrize("loss", [math.inf, math.nan, None])
def test_a_last_loss_that_is_not_finite_is_a_divergence(loss: float | None) -> None:
    rows: list[dict[str, Any]] = [ROWS[1], {"step": 4, "valid_loss": loss, "valid_bits_per_byte": loss}]
    made = result(rows=rows, training={"steps": 4, "valid_loss": loss, "valid_bits_per_byte": loss})
    assert (made.state, made.steps, made.objective) == ("diverged", 4, None)
    assert "not finite" in made.reason


def test_a_trainer_that_gave_up_tells_how_far_it_got() -> None:
    made = result(training=None, divergence={"step": 3, "reason": "the loss was nan"})
    assert (made.state, made.steps, made.tokens, made.reason) == ("diverged", 3, 48, "the loss was nan")
    assert made.objective is None


def test_a_pruned_training_ends_where_it_was_above_the_limit() -> None:
    for training in (TRAINING, None):  # whether or not it was stopped in time
        made = result(training=training, at_2=2.9)
        assert (made.state, made.steps, made.valid_loss, len(made.curve)) == ("pruned", 2, 4.0, 2)
    assert result(at_2=3.0, at_4=2.0).state == "finished"


_LOSSES = st.lists(st.floats(0.5, 9), min_size=1, max_size=8)


@given(_LOSSES, st.lists(st.floats(0.5, 9), min_size=1, max_size=8))
def test_the_step_of_pruning_is_the_first_above_its_limit(losses: list[float], limits: list[float]) -> None:
    rows = [{"step": step, "valid_bits_per_byte": loss} for step, loss in enumerate(losses)]
    by_step = {str(step): limit for step, limit in enumerate(limits)}
    above = [step for step in range(len(losses)) if step < len(limits) and min(losses[: step + 1]) > limits[step]]
    assert find_prune_step(rows, by_step) == (above[0] if above else None)


def test_the_order_and_the_table() -> None:
    good, better = result(), result(training={**TRAINING, "valid_bits_per_byte": 1.5})
    pruned = result(training=None, at_2=0.1)
    early, late = (result(training=None, divergence={"step": step, "reason": "nan"}) for step in (1, 3))
    results = [early, pruned, good, late, better]
    assert rank(results) == [4, 2, 1, 3, 0]
    settings = [{"train.max_lr": 0.1 * number, "variant": "a, b"} for number in range(4)] + [{"variant": "base"}]
    configs = [{"train": {"max_lr": 7.0}}] * 5
    report = SweepReport("name", "", ["variant", "train.max_lr"], settings, configs)
    rows = table_rows(report, results)
    assert [row["point"] for row in rows] == [5, 3, 2, 4, 1]
    assert rows[0]["train.max_lr"] == 7.0, "a case that does not set an option has that of the base"
    lines = format_csv(rows).splitlines()
    assert lines[0].startswith("point,variant,train.max_lr,valid_bits_per_byte,")
    assert lines[1].startswith("5,base,7.0,1.5,2.9,")
    assert lines[-1].endswith(",diverged,nan")
    assert '"a, b"' in lines[2]
