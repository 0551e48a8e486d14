"""The configuration that a budget pays for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.distributed.plan import repays_compilation
from lm.experiments.budget import (
    Choice,
    best_flops_per_token,
    best_lr,
    bytes_per_token,
    choose_configuration,
    estimate_flops_per_token,
)
from lm.experiments.config import Budget
from lm.experiments.speed import Speed
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token, parameter_count
from lm.train.config import TrainConfig
from tests.helpers.tensors import FEW_EXAMPLES

STORIES_BYTES = 57_000_000


def tokens_of(choice: Choice) -> int:
    return choice.expected_steps * choice.train.batch_size * choice.model.context_length


def flops_of(choice: Choice) -> float:
    return tokens_of(choice) * flops_per_token(choice.model)


def speed_of(flops_per_second: float, start_seconds: float = 1.0):  # type: ignore[no-untyped-def]
    """Return a measurement on a machine of constant speed, and what it was asked to measure for how long."""
    asked = []

    def measure(model: ModelConfig, train: TrainConfig, seconds: float) -> Speed:
        asked.append((model, train.batch_size, seconds))
        flops = flops_per_token(model) * train.batch_size * model.context_length
        return Speed(start_seconds, flops / flops_per_second, seconds, flops)

    return measure, asked


def guess() -> float:
    return 2e10


def many(model: ModelConfig, train: TrainConfig) -> int:
    return 10**9


def never(model: ModelConfig, train: TrainConfig, seconds: float) -> Speed:
    raise AssertionError("the speed does not matter for this budget")


@pytest.mark.parametrize("flops", [1e12, 1e15, 1e18])
def test_the_estimate_equals_the_flops_of_the_model(flops: float) -> None:
    model = choose_configuration(Budget(flops, "flops"), STORIES_BYTES * 10, 10**6, 2, 1, guess, never, many).model
    assert estimate_flops_per_token(model) == flops_per_token(model)


@pytest.mark.parametrize("flops", [3e12, 1e14, 1e17, 1e20])
def test_flops_are_spent_at_the_best_size(flops: float) -> None:
    choice = choose_configuration(Budget(flops, "flops"), 10**12, 10**6, 2, 1, guess, never, many)
    assert flops_of(choice) == pytest.approx(flops, rel=0.05) and choice.train.max_seconds is None
    assert 1 / 1.6 < flops_per_token(choice.model) / best_flops_per_token(flops) < 1.6


@pytest.mark.parametrize("tokens", [1e6, 1e8, 1e10])
def test_tokens_are_spent(tokens: float) -> None:
    choice = choose_configuration(Budget(tokens, "tokens"), 10**12, 10**6, 2, 1, guess, never, many)
    assert tokens_of(choice) == pytest.approx(tokens, rel=0.05)


def test_tokens_are_at_most_four_epochs() -> None:
    choice = choose_configuration(Budget(5e7, "tokens"), 2_000_000, 0, 2, 1, guess, never, many)
    assert 3.2 < tokens_of(choice) * bytes_per_token(choice.vocab_size) / 2_000_000 < 4.1
    assert "less than the budget" in choice.reasons[0]
    same = choose_configuration(Budget(tokens_of(choice), "tokens"), 2_000_000, 0, 2, 1, guess, never, many)
    assert same.model == choice.model
    with pytest.raises(UserError, match="The text is too short to train on: 4 epochs have about 33,"):
        choose_configuration(Budget(5e7, "tokens"), 20_000, 0, 2, 1, guess, never, many)


@pytest.mark.slow
@FEW_EXAMPLES
@given(st.floats(60, 1e6), st.floats(1e9, 1e15), st.integers(10**4, 10**11), st.floats(0, 60))
def test_time_is_spent(seconds: float, rate: float, train_bytes: int, start: float) -> None:
    """Start, steps and evaluations fill the budget or the text, or an error says that one is too small."""
    measure, asked = speed_of(rate, start)
    try:
        choice = choose_configuration(
            Budget(seconds, "seconds"), train_bytes, train_bytes // 50, 2, 1, guess, measure, many
        )
    except UserError as error:
        is_too_short = train_bytes < 50_000 and str(error).startswith("The text is too short")
        assert is_too_short or str(error).startswith("The budget is too small")
        return
    steps_seconds = flops_of(choice) / rate
    assert len(asked) <= 9 and (choice.model, choice.train.batch_size) in [probe[:2] for probe in asked]
    probing = sum(start + probe[2] for probe in asked)
    assert steps_seconds + probing < seconds
    valid_tokens = train_bytes // 50 / bytes_per_token(choice.vocab_size)
    evaluation = (valid_tokens + 10 * 64 * choice.model.context_length) * 0.35 * flops_per_token(choice.model) / rate
    others = probing + start + 10 + train_bytes * 1.02 / 50e6
    epochs = tokens_of(choice) * bytes_per_token(choice.vocab_size) / train_bytes
    assert epochs <= 4
    whole_evaluation = valid_tokens * 0.35 * flops_per_token(choice.model) / rate
    assert choice.train.max_seconds == pytest.approx(seconds - others - whole_evaluation, abs=0.1, rel=0.02)
    assert choice.expected_steps <= choice.train.steps <= 1.5 * choice.expected_steps
    assert choice.train.steps * epochs / choice.expected_steps <= 4
    if epochs < 3.9:
        assert steps_seconds + evaluation + others == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("seconds", range(220, 400, 12))
def test_a_training_is_as_fast_as_measured_where_compilation_begins_to_repay(seconds: int) -> None:
    rate, start, spent = 2e11, 30.0, 10 + 101e6 / 50e6

    def measure(model: ModelConfig, train: TrainConfig, seconds: float) -> Speed:
        flops = flops_per_token(model) * train.batch_size * model.context_length
        is_compiled = repays_compilation(train.steps * flops)
        nonlocal spent
        spent += start * is_compiled + seconds
        return Speed(start * is_compiled, flops / (rate * (1.25 if is_compiled else 1)), seconds, flops)

    choice = choose_configuration(Budget(seconds, "seconds"), 10**8, 10**6, 2, 1, guess, measure, many)
    speed = measure(choice.model, choice.train, 0)
    spent += choice.expected_steps * speed.step_seconds
    evaluated = 10**6 / bytes_per_token(choice.vocab_size) / choice.model.context_length + 10 * 64
    spent += evaluated / choice.train.batch_size * 0.35 * speed.step_seconds
    assert 0.9 * seconds < spent < 1.02 * seconds


@pytest.mark.parametrize(("seconds", "last_probe"), [(200, 3), (1800, 18), (86_400, 60)])
def test_the_chosen_model_is_measured_for_longer(seconds: float, last_probe: float) -> None:
    measure, asked = speed_of(1e10)
    choice = choose_configuration(Budget(seconds, "seconds"), STORIES_BYTES, 10**6, 2, 1, guess, measure, many)
    assert asked[-1] == (choice.model, choice.train.batch_size, last_probe)
    assert {probe[2] for probe in asked[:-1]} == {3}


def test_the_model_suits_a_machine_that_is_faster_with_larger_models() -> None:
    def rate(model: ModelConfig) -> float:
        return 2e10 * (model.d_model / 64) ** 3

    def measure(model: ModelConfig, train: TrainConfig, seconds: float) -> Speed:
        flops = flops_per_token(model) * train.batch_size * model.context_length
        return Speed(1.0, flops / rate(model), seconds, flops)

    choice = choose_configuration(Budget(3600, "seconds"), 10**12, 0, 10**6, 1, guess, measure, many)
    spent = rate(choice.model) * 3500
    assert 1 / 1.6 < flops_per_token(choice.model) / best_flops_per_token(spent) < 1.6


def test_little_text_has_a_larger_model_and_a_smaller_vocabulary() -> None:
    small, large = (
        choose_configuration(Budget(1e14, "flops"), train_bytes, 0, 2, 1, guess, never, many)
        for train_bytes in (1_000_000, STORIES_BYTES)
    )
    assert small.vocab_size < large.vocab_size
    assert flops_per_token(small.model) > flops_per_token(large.model)
    assert tokens_of(small) <= 1.5 * 4 * 1_000_000 / bytes_per_token(small.vocab_size)
    assert any("More than 4 epochs" in reason for reason in small.reasons)


def test_a_larger_budget_never_has_a_smaller_model() -> None:
    sizes = [
        flops_per_token(choose_configuration(Budget(10.0**power, "flops"), 10**13, 0, 2, 1, guess, never, many).model)
        for power in range(12, 24)
    ]
    assert sizes == sorted(sizes)


def test_the_learning_rate_falls_with_the_width() -> None:
    assert best_lr(64) > best_lr(256) > best_lr(1024) > 0


def test_a_budget_of_nothing_is_refused() -> None:
    measure, _ = speed_of(1e9)
    with pytest.raises(UserError, match="The budget is too small: it pays for"):
        choose_configuration(Budget(20, "seconds"), STORIES_BYTES, 0, 2, 1, guess, measure, many)


@pytest.mark.parametrize("budget", [Budget(1800, "seconds"), Budget(1e15, "flops")])
def test_four_epochs_of_a_short_text_may_leave_a_part_of_the_budget(budget: Budget) -> None:
    measure, _ = speed_of(2e10)
    choice = choose_configuration(budget, 100_000, 0, 2, 1, guess, measure, many)
    epochs = tokens_of(choice) * bytes_per_token(choice.vocab_size) / 100_000
    assert choice.train.steps >= 50 and 3.8 < epochs < 4.05
    if budget.unit == "seconds":
        assert "s are left over, because 4 epochs of the text take less time" in choice.reasons[0]
        assert "It ends when" not in choice.reasons[0]


def test_a_validation_text_shorter_than_the_context_is_refused() -> None:
    with pytest.raises(UserError, match=r"The validation text has about 2\d\d tokens, and the model reads 256"):
        choose_configuration(Budget(1e14, "flops"), STORIES_BYTES, 700, 2, 1, guess, never, many)


def test_each_process_has_a_sequence_of_each_batch() -> None:
    one, many_processes = (
        choose_configuration(Budget(1e12, "flops"), STORIES_BYTES, 0, 2, processes, guess, never, lambda *_: 64)
        for processes in (1, 64)
    )
    assert one.train.batch_size < 64 == many_processes.train.batch_size
    assert many_processes.train.gradient_accumulation_steps == 1, "a sequence for each process at a time"
    assert tokens_of(many_processes) == pytest.approx(tokens_of(one), rel=0.05)


@pytest.mark.parametrize(("largest", "parts"), [(10**9, 1), (8, 4), (5, 8), (1, 32)])
def test_a_batch_that_does_not_fit_is_accumulated(largest: int, parts: int) -> None:
    choice = choose_configuration(Budget(2.5e7, "tokens"), 10**12, 0, 2, 1, guess, never, lambda model, train: largest)
    assert (choice.train.batch_size, choice.train.gradient_accumulation_steps) == (32, parts)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [Budget(1e17, "flops"), Budget(1e9, "tokens"), Budget(1e6, "seconds")])
def test_a_model_that_does_not_fit_the_memory_is_not_chosen(budget: Budget) -> None:
    def largest_batch(model: ModelConfig, train: TrainConfig) -> int:
        return 4 if parameter_count(model)["total"] < 10**7 else 0

    choice = choose_configuration(budget, 10**12, 0, 2, 1, guess, speed_of(1e11)[0], largest_batch)
    assert 7 * 10**6 < parameter_count(choice.model)["total"] < 10**7, "the largest that fits"
    assert any("parameters does not fit the memory" in reason for reason in choice.reasons)
    with pytest.raises(UserError, match="Not even the smallest model fits the memory"):
        choose_configuration(budget, 10**12, 0, 2, 1, guess, speed_of(1e11)[0], lambda *_: 0)
