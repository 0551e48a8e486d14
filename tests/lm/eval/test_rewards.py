"""Rewards: each function, weighted sums, and the equality of formulas with answers that try to get around it."""

from typing import Any

import pytest

from lm.common.errors import UserError
from lm.eval.rewards import MAX_RESPONSE_CHARACTERS, REWARDS, combine_rewards, get_reward, is_math_equal


def parts(name: str, response: str, truth: Any) -> tuple[float, float, float]:
    rewards = get_reward(name)(response, truth)
    assert set(rewards) == {"reward", "format_reward", "answer_reward"}
    return rewards["reward"], rewards["format_reward"], rewards["answer_reward"]


RIGHT, WRONG, NO_FORMAT = (1.0, 1.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)
OPTIONS = {"options": ["red", "blue"], "answer": "B"}


@pytest.mark.parametrize(
    ("name", "response", "truth", "expected"),
    [
        ("exact", " 168\n", "168", RIGHT),
        ("exact", "169", "168", WRONG),
        ("exact", "two", ["2", "two"], RIGHT),
        ("exact", "72", 72, RIGHT),
        ("exact", "0.5", [1, 0.5], RIGHT),
        ("gsm8k", "so 1,000", 1000, RIGHT),
        ("gsm8k", "so 2.5", 2.5, RIGHT),
        ("gsm8k", "it is 5", 1e-05, WRONG),
        ("gsm8k", "it is 0.00001", 1e-05, RIGHT),
        ("exact", "20000000000000000000000", 2e22, RIGHT),
        ("exact", "-7", -7, RIGHT),
        ("exact", "True", True, RIGHT),
        ("boxed_math", r"\boxed{72.0}", 72, RIGHT),
        ("r1_zero", "</think> <answer>-3</answer>", [2, -3], RIGHT),
        ("gsm8k", "so 1,000.0 in all", "1000", RIGHT),
        ("gsm8k", "so 7", "1000", WRONG),
        ("gsm8k", "so seven", "7", NO_FORMAT),
        ("gsm8k", "9" * 50_000, "7", WRONG),
        ("boxed_math", r"\boxed{42}", "42", RIGHT),
        ("boxed_math", r"\boxed{42}", ["41", "42.0"], RIGHT),
        ("boxed_math", r"\boxed{41}", "42", WRONG),
        ("boxed_math", r"\boxed{}", "42", WRONG),
        ("boxed_math", "42", "42", NO_FORMAT),
        ("r1_zero", "20+22</think> <answer>42</answer>", "42", RIGHT),
        ("r1_zero", "20+22</think>\n<answer>42</answer>", "42", RIGHT),
        ("r1_zero", "20+22</think>\n\n<answer>\n\\boxed{42}\n</answer>\n", "42", RIGHT),
        ("r1_zero", "</think> <answer>41</answer>", "42", WRONG),
        ("r1_zero", "</think> <answer></answer>", "42", WRONG),
        ("r1_zero", "<answer>42</answer>", "42", NO_FORMAT),
        ("multiple_choice", "The answer is B.", OPTIONS, RIGHT),
        ("multiple_choice", "The answer is A.", OPTIONS, WRONG),
        ("multiple_choice", "blue, I think", OPTIONS, NO_FORMAT),
        ("required_words", "The Cat ate ice cream; dogs ran.", ["cat", "dog", "ice cream", "ran"], (0.75, 1.0, 0.75)),
        ("required_words", "cat", "cat, dog", (0.5, 1.0, 0.5)),
        ("required_words", "a+b (c", ["a+b", "(c"], RIGHT),
        ("ends_properly", "He left.", None, (1.0, 1.0, 0.0)),
        ("ends_properly", 'He said: "Go!" \n', None, (1.0, 1.0, 0.0)),
        ("ends_properly", "He left. Then the", None, NO_FORMAT),
        ("ends_properly", "", None, NO_FORMAT),
        ("ends_properly", "Done." + " \n" * 50, None, (1.0, 1.0, 0.0)),
        ("length:10-20", "x" * 10, None, (1.0, 1.0, 0.0)),
        ("length:10-20", "x" * 5, None, (0.5, 0.5, 0.0)),
        ("length:10-20", "x" * 40, None, (0.5, 0.5, 0.0)),
        ("length:10-20", "", None, NO_FORMAT),
        ("length:1-50", "", None, NO_FORMAT),
        ("length:0-50", "", None, (1.0, 1.0, 0.0)),
        ("length:0-0", "", None, (1.0, 1.0, 0.0)),
        ("length:0-0", "x", None, NO_FORMAT),
    ],
)
def test_hand_worked_rewards(name: str, response: str, truth: Any, expected: tuple[float, float, float]) -> None:
    assert parts(name, response, truth) == pytest.approx(expected)


@pytest.mark.parametrize("name", [*REWARDS, "length:1-9"])
def test_a_response_that_is_too_long_gets_nothing(name: str) -> None:
    assert parts(name, "\\frac" * (MAX_RESPONSE_CHARACTERS // 5 + 1), None) == NO_FORMAT


def test_weighted_sum() -> None:
    combined = combine_rewards({"required_words": 2.0, "ends_properly": 0.5, "length:4-8": -1.0})
    rewards = combined("A cat.", ["cat", "dog"])
    assert rewards == pytest.approx({"reward": 0.5, "format_reward": 2.0 + 0.5 - 1.0, "answer_reward": 1.0})


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"exakt": 1.0}, r"no reward 'exakt' \(did you mean 'exact'\?\); choose exact, gsm8k, "),
        ({"exact": float("nan")}, "The weight of the reward 'exact' is nan; it must be finite"),
        ({"length:9-3": 1.0}, "minimum above its maximum"),
        ({"length:x": 1.0}, "no reward 'length:x'"),
        ({}, "No reward is named"),
    ],
)
def test_unknown_rewards_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        combine_rewards(weights)


def test_reasoning_gym() -> None:
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="has the tasks")
    entry = reasoning_gym.create_dataset("simple_equations", size=1, seed=3)[0]
    truth = {"dataset": "simple_equations", "entry": entry}
    for response in (f" {entry['answer']} ", f"</think>\n<answer>{entry['answer']}</answer>"):
        assert parts("reasoning_gym", response, truth) == RIGHT
    assert parts("reasoning_gym", "nothing", truth)[0] < 0.1


def test_reasoning_gym_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"install textmill\[reasoning-gym\]"):
        get_reward("reasoning_gym")("1", {})


@pytest.mark.parametrize(
    ("answer", "truth", "is_equal"),
    [
        ("42", " 42.0 ", True),
        ("1,000", "1000", True),
        ("$5", "5", True),
        ("0.1", "0.10", True),
        ("1e3", "1000", True),
        ("-1,234,567.5", "-1234567.5", True),
        ("43", "42", False),
        ("NaN", "NaN", True),
        ("9" * 999, "1", False),
        ("9" * 1001, "9" * 1001, False),
    ],
)
def test_plain_numbers_and_equal_texts_need_no_library(
    monkeypatch: pytest.MonkeyPatch, answer: str, truth: str, is_equal: bool
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    assert is_math_equal(answer, truth) is is_equal


def test_the_library_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(UserError, match=r"install textmill\[math\]"):
        is_math_equal("x", "y")


@pytest.mark.parametrize(
    ("answer", "truth", "is_equal"),
    [
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac12", "1/2", True),
        ("x + 1", "1+x", True),
        (r"\sqrt{4}", "2", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1, 2)", "(1,2)", True),
        (r"2\pi", "6.28", False),
        ("", "2", False),
        ("1, 2, 3", "2", False),
        ("12", "1,2", False),
        ("1,2", "1, 2", True),
        ("2045", "204_5", False),
        ("204_{5}", "204_5", True),
        ("1 or 2", "2", False),
        (r"1} \boxed{2", "2", False),
        (r"1} \boxed{2} \boxed{3", "2", False),
        ("1} $2$ {3", "2", False),
        ("1} final answer is $2$. I hope it is correct. {", "2", False),
        ("} the answer is 2 {", "2", False),
        ("1$ $2", "2", False),
    ],
)
def test_formulas(answer: str, truth: str, is_equal: bool, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("math_verify", reason="compares formulas")
    assert is_math_equal(answer, truth) is is_equal
    assert not caplog.messages
