"""Points of a sweep: equal to nested loops; ranges; derived options; mistakes; expressions as in Python."""

import copy
import math
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.experiments.axes import Axis, Settings, corners, evaluate_expression, expand, make_point

BASE: dict[str, Any] = {
    "name": "x",
    "model": {"vocab_size": None, "context_length": 16, "d_model": 32, "num_heads": 2, "num_layers": 1, "d_ff": 64},
    "tokenizer": {"vocab_size": 300},
    "train": {"steps": 10, "batch_size": 4, "max_lr": 0.1},
    "execution": {"threads": None},
}

RECURSIVE: list[Any] = [1]
RECURSIVE.append(RECURSIVE)
_CHOICES = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)


def nested_loops(axes: list[list[Settings]]) -> list[Settings]:
    """The plain reference of :func:`expand`."""
    if not axes:
        return [{}]
    return [{**choice, **rest} for choice in axes[0] for rest in nested_loops(axes[1:])]


@given(st.lists(st.tuples(_CHOICES, st.booleans()), min_size=1, max_size=4))
def test_points_are_those_of_nested_loops(drawn: list[tuple[list[int], bool]]) -> None:
    axes, choices = [], []
    for number, (values, is_coupled) in enumerate(drawn):
        if is_coupled:
            cases = [{f"a{number}": value, f"b{number}": -value} for value in values]
            axes.append(Axis(cases=cases))
            choices.append(cases)
        else:
            axes.append(Axis(option=f"a{number}", values=values))
            choices.append([{f"a{number}": value} for value in values])
    points = expand(axes)
    assert points == nested_loops(choices)
    assert len(points) == math.prod(len(values) for values, _ in drawn)


@given(st.floats(1e-6, 1e3), st.floats(1.1, 1e6), st.integers(2, 20), st.sampled_from(["log", "linear"]), st.booleans())
def test_a_range_has_both_ends_and_even_spaces(low: float, ratio: float, count: int, scale: Any, whole: bool) -> None:
    start, stop = (math.ceil(low), math.ceil(low * ratio) + 1) if whole else (low, low * ratio)
    axis = Axis(option="x", low=start, high=stop, num_values=count, scale=scale)
    values = [choice["x"] for choice in axis.choices()]
    assert values == sorted(set(values))
    assert values[0] == pytest.approx(start, rel=1e-5)
    assert values[-1] == pytest.approx(stop, rel=1e-5)
    if whole:
        assert all(isinstance(value, int) for value in values)
    elif len(values) == count > 2:
        gaps = [math.log(b / a) if scale == "log" else b - a for a, b in zip(values, values[1:], strict=False)]
        assert gaps == pytest.approx([sum(gaps) / len(gaps)] * len(gaps), rel=0.02, abs=1e-5 * stop)


def test_exponents_without_a_point_are_numbers() -> None:
    assert Axis(option="x", values=["1e-3", "post"]).choices() == [{"x": 0.001}, {"x": "post"}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"option": "x"}, "needs either values, or low and high"),
        ({"option": "x", "values": [1], "cases": [{"y": 1}]}, "either cases, or an option"),
        ({}, "either cases, or an option"),
        ({"option": "x", "low": 2, "high": 1}, "low must be below high"),
        ({"option": "x", "low": 0, "high": 1}, "needs a number above 0"),
        ({"option": "x", "low": 1, "high": 2, "num_values": 1}, "a range has 2 to 10,000"),
        ({"option": "x", "low": 1, "high": 2, "num_values": 10**9}, "a range has 2 to 10,000"),
        ({"option": "x", "low": 1, "high": math.inf}, "an end beyond"),
        ({"option": "x", "low": 1, "high": 10**400}, "an end beyond"),
        ({"option": "x", "low": 1, "high": math.nan}, "low must be below high"),
        ({"option": "x", "values": [1], "low": 1}, "low, high and num_values only for a range"),
        ({"option": "x", "values": [1], "num_values": 2}, "low, high and num_values only for a range"),
        ({"cases": [{"x": 1}], "num_values": 2}, "low, high and num_values only for a range"),
        ({"cases": [{}]}, "cases that set no option"),
        ({"option": "x", "values": [math.nan]}, "has the value nan; it may have text, finite numbers"),
        ({"option": "x", "values": [{1}]}, "has the value {1}"),
        ({"cases": [{"x": date(2024, 1, 1)}]}, "A date needs quotes"),
        ({"option": "x", "values": RECURSIVE}, "The axis x has the value"),
    ],
)
def test_a_wrong_axis_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Axis(**fields)


def test_an_option_on_two_axes_is_refused() -> None:
    with pytest.raises(UserError, match=r"train\.steps is on two axes"):
        expand([Axis(option="train.steps", values=[1]), Axis(cases=[{"train.steps": 2}])])


def test_too_many_points_are_refused() -> None:
    axes = [Axis(option=f"x{number}", values=list(range(100))) for number in range(3)]
    with pytest.raises(UserError, match="1,000,000 points"):
        expand(axes)


def test_a_range_without_points_needs_a_search() -> None:
    axis = Axis(option="train.max_lr", low=0.001, high=0.1)
    with pytest.raises(UserError, match="add a search"):
        expand([axis])
    assert corners([axis, Axis(option="x", values=[1, 2])]) == [
        {"train.max_lr": 0.001, "x": 1},
        {"train.max_lr": 0.1, "x": 1},
        {"train.max_lr": 0.001, "x": 2},
    ]


def test_derived_options_follow_in_their_order() -> None:
    before = copy.deepcopy(BASE)
    derive = {
        "tokens": 6400,
        "train.steps": "tokens // (train.batch_size * model.context_length)",
        "half": "train.steps / 2",
    }
    point = make_point(BASE, {"train.batch_size": 8, "factor": 3}, derive)
    assert point.config["train"] == {"steps": 50, "batch_size": 8, "max_lr": 0.1}
    assert point.settings == {"train.batch_size": 8, "factor": 3, "tokens": 6400, "train.steps": 50, "half": 25}
    assert before == BASE


@given(st.permutations(["model.d_model", "model.d_ff", "n", "train.steps", "last"]))
def test_the_order_of_derived_options_does_not_count(order: list[str]) -> None:
    derive: dict[str, Any] = {
        "model.d_model": "8 * width",
        "model.d_ff": "2 * model.d_model",
        "n": "parameters",
        "train.steps": "train.steps + n // 100",  # of the base
        "last": "train.steps + model.d_ff",
    }
    expected = make_point(BASE, {"width": 4}, derive)
    point = make_point(BASE, {"width": 4}, {name: derive[name] for name in order})
    assert point == expected and list(point.settings) == ["width", *order]
    assert point.settings["last"] == point.settings["train.steps"] + 64


def test_costs_of_the_model_are_those_of_the_point() -> None:
    from lm.model.config import ModelConfig
    from lm.model.flops import flops_per_token, parameter_count

    derive = {"model.d_ff": "2 * model.d_model", "n": "parameters", "cost": "flops_per_token"}
    point = make_point(BASE, {"model.d_model": 64}, derive)
    fields = {**BASE["model"], "d_model": 64, "d_ff": 128, "vocab_size": 300}
    model = ModelConfig(**fields)
    assert point.settings["n"] == parameter_count(model)["total"]
    assert point.settings["cost"] == flops_per_token(model)


@pytest.mark.parametrize(
    ("settings", "derive", "message"),
    [
        ({"train.step": 1}, {}, r"no option train\.step \(did you mean 'train\.steps'"),
        ({"train": 1}, {}, "train is a part of the configuration; give the variable another name"),
        ({"execution.threads": 1}, {}, r"execution\.threads has no effect on results"),
        ({"name": "y"}, {}, "name has no effect"),
        ({"train.steps": 1}, {"train.steps": "2"}, r"train\.steps is derived and is on an axis"),
        ({"x": 1}, {"train.steps": "x / 0"}, "has no value"),
        ({}, {"a": "b + 1", "b": "2 * c", "c": "a"}, "are derived from each other; give one a value"),
        ({}, {"model.d_ff": "parameters // 1000", "model.d_model": "flops_per_token // 9"}, "derived from each other"),
    ],
)
def test_a_wrong_setting_is_refused(settings: Settings, derive: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_point(BASE, settings, derive)


VALUES = {"train.batch_size": 16, "budget": 1e12, "text": "post", "flag": True}


def _sum(parts: tuple[tuple[str, float], str, tuple[str, float]]) -> tuple[str, float]:
    (left, a), sign, (right, b) = parts
    return f"({left} {sign} {right})", {"+": a + b, "-": a - b, "*": a * b}[sign]


_LEAVES = st.one_of(st.integers(-99, 99).map(lambda number: (f"({number})", number)), st.just(("train.batch_size", 16)))
_EXPRESSIONS = st.recursive(
    _LEAVES, lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(_sum), max_leaves=8
)


@given(_EXPRESSIONS)
def test_values_are_those_of_arithmetic(drawn: tuple[str, int]) -> None:
    text, value = drawn
    assert evaluate_expression(text, VALUES) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("budget / 5e11", 2),
        ("round(7.6)", 8),
        ("max(1, 3 // 2, 7 % 4)", 3),
        ("floor(1.5) + ceil(1.5) - min(1, 2)", 2),
        ("sqrt(train.batch_size / 4)", 2),
        ("log2(8) ** 2", 9),
        ("-2 ** 2", -4),
        ("0.01 * sqrt(train.batch_size)", 0.04),
    ],
)
def test_operators_and_functions(text: str, value: float) -> None:
    result = evaluate_expression(text, VALUES)
    assert result == pytest.approx(value)
    assert isinstance(result, int) == (value == math.floor(value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 +",
        "1 / 0",
        "train.batch_sizes",
        "text + 1",
        "flag + 1",
        "'a'",
        "True",
        "9 ** 9 ** 9",
        "sqrt(-1)",
        "(-8) ** 0.5",
        "__import__('os')",
        "budget.__class__",
        "max.__self__",
        "[1][0]",
        "(lambda: 1)()",
        "round(1.5, ndigits=1)",
        "max()",
        "1e308 * 10",
        "(" * 300 + "1" + ")" * 300,  # longer than 500 characters
        "(" * 240 + "1" + ")" * 240,  # deeper than Python's parser goes
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="expression"):
        evaluate_expression(text, VALUES)
