"""Reward functions, by name: ``(response, ground_truth)`` → ``reward``, ``format_reward`` and ``answer_reward``.

``answer_reward`` is for the content, ``format_reward`` for the form. All are 0 to 1, except weighted sums. A ground
truth is plain data as in JSON. A response of more than 100,000 characters gets 0.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

from lm.common.errors import UserError, did_you_mean
from lm.eval.answers import extract_boxed, extract_r1_zero, parse_gsm8k_response, parse_mmlu_response

MAX_RESPONSE_CHARACTERS = 100_000
REWARD_KEYS = ("reward", "format_reward", "answer_reward")
REWARD_LIBRARIES = {"boxed_math": "math_verify", "r1_zero": "math_verify", "reasoning_gym": "reasoning_gym"}
REWARD_EXTRAS = {"math_verify": "math", "reasoning_gym": "reasoning-gym"}  # of this package, by library
REWARD_TOLERANCE = 1e-9  # rounding of a weighted sum of rewards

RewardFunction = Callable[[str, Any], Mapping[str, float]]
GroundTruth = str | float | list[str | float]
"""An accepted answer, or several. A number counts as its text, without an exponent."""

_LENGTH_NAME = re.compile(r"length:(\d+)-(\d+)")


def exact_reward(response: str, ground_truth: GroundTruth) -> dict[str, float]:
    """1 if the response is one of the accepted answers, apart from white space around it."""
    return _rewards(True, response.strip() in (answer.strip() for answer in _list(ground_truth)))


def gsm8k_reward(response: str, ground_truth: str | float) -> dict[str, float]:
    """1 if the last number of the response equals the ground truth's. Its format is right if it has a number."""
    number, expected = (parse_gsm8k_response(text) for text in (response, _text(ground_truth)))
    is_equal = number is not None and expected is not None and Decimal(number) == Decimal(expected)
    return _rewards(number is not None, is_equal)


def boxed_math_reward(response: str, ground_truth: GroundTruth) -> dict[str, float]:
    r"""1 if the last ``\boxed{…}`` equals an accepted answer as mathematics."""
    return _math_rewards(extract_boxed(response), ground_truth)


def r1_zero_reward(response: str, ground_truth: GroundTruth) -> dict[str, float]:
    r"""1 if ``…</think> <answer>…</answer>`` holds an accepted answer, alone or in ``\boxed{…}`` (Guo et al. 2025).

    Any white space may lie between the tags.
    """
    answer = extract_r1_zero(response)
    return _math_rewards(answer and (extract_boxed(answer) or answer), ground_truth)


def multiple_choice_reward(response: str, ground_truth: Mapping[str, Any]) -> dict[str, float]:
    """1 if the response chooses the letter ``ground_truth["answer"]`` of ``ground_truth["options"]``."""
    letter = parse_mmlu_response(ground_truth, response)
    return _rewards(letter is not None, letter == ground_truth["answer"])


def required_words_reward(response: str, ground_truth: str | list[str]) -> dict[str, float]:
    """The share of the required words in the response, as whole words in any case. A text separates words by commas."""
    words = ground_truth.split(",") if isinstance(ground_truth, str) else ground_truth
    patterns = [rf"(?<!\w){re.escape(word.strip())}(?!\w)" for word in words]
    found = sum(bool(re.search(pattern, response, re.IGNORECASE)) for pattern in patterns)
    return _rewards(True, found / len(patterns))


def ends_properly_reward(response: str, ground_truth: Any = None) -> dict[str, float]:
    """1 if the response ends with the end of a sentence, maybe in quotes."""
    return _form_rewards(bool(re.search(r"[.!?…][\"'”’)\]]*\Z", response.rstrip()[-20:])))


def length_reward(response: str, ground_truth: Any, min_characters: int, max_characters: int) -> dict[str, float]:
    """1 if the response has ``min_characters`` to ``max_characters``, else the ratio of its length and the nearer."""
    length = len(response)
    if length < min_characters:
        return _form_rewards(length / min_characters)
    return _form_rewards(1.0 if length <= max_characters else max_characters / length)


def reasoning_gym_reward(response: str, ground_truth: Mapping[str, Any]) -> dict[str, float]:
    """The library reasoning-gym's score of the response for ``ground_truth["entry"]`` of the data set ``["dataset"]``.

    The answer is the content of ``<answer>…</answer>`` after ``</think>``, or else the whole response.
    """
    try:
        import reasoning_gym  # slow to import
    except ImportError:
        raise UserError("Scoring this task needs reasoning-gym; install textmill[reasoning-gym].") from None
    answer = extract_r1_zero(response)
    dataset, entry = ground_truth["dataset"], ground_truth["entry"]
    if dataset in ("arc_agi", "rearc"):  # they compare tuples, which are lists in JSON
        grid = tuple(map(tuple, entry["metadata"]["output"]))
        entry = {**entry, "metadata": {**entry["metadata"], "output": grid}}
    score = reasoning_gym.get_score_answer_fn(dataset)
    return _rewards(True, float(score(answer or response.strip(), entry)))


REWARDS: dict[str, RewardFunction] = {
    "exact": exact_reward,
    "gsm8k": gsm8k_reward,
    "boxed_math": boxed_math_reward,
    "r1_zero": r1_zero_reward,
    "multiple_choice": multiple_choice_reward,
    "required_words": required_words_reward,
    "ends_properly": ends_properly_reward,
    "reasoning_gym": reasoning_gym_reward,
}


def get_reward(name: str) -> RewardFunction:
    """Return the reward function of a name: one of ``REWARDS``, or ``length:MIN-MAX`` in characters.

    Raises UserError for an unknown name.
    """
    if match := _LENGTH_NAME.fullmatch(name):
        low, high = map(int, match.groups())
        if low > high:
            raise UserError(f"The reward {name!r} has a minimum above its maximum.")
        return partial(_limit_size, partial(length_reward, min_characters=low, max_characters=high))
    if name not in REWARDS:
        raise UserError(
            f"There is no reward {name!r}{did_you_mean(name, REWARDS)}; choose {', '.join(REWARDS)} or length:MIN-MAX."
        )
    return partial(_limit_size, REWARDS[name])


def combine_rewards(weights: Mapping[str, float]) -> RewardFunction:
    """Return a reward function whose numbers are weighted sums of the numbers of the named functions.

    Raises UserError for an unknown name, a weight that is not finite, and without any name.
    """
    if not weights:
        raise UserError("No reward is named; name at least one.")
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise UserError(f"The weight of the reward {name!r} is {weight}; it must be finite.")
    parts = [(get_reward(name), weight) for name, weight in weights.items()]

    def combined(response: str, ground_truth: Any) -> dict[str, float]:
        rewards = [(function(response, ground_truth), weight) for function, weight in parts]
        return {key: sum(weight * part[key] for part, weight in rewards) for key in REWARD_KEYS}

    return combined


def perfect_rewards(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the rewards of the best possible response under the weighted sum of :func:`combine_rewards`."""
    total = sum(max(weight, 0.0) for weight in weights.values())
    # ends_properly and the length are for the form alone.
    is_of_content = {name: name != "ends_properly" and not _LENGTH_NAME.fullmatch(name) for name in weights}
    answer = sum(max(weight, 0.0) for name, weight in weights.items() if is_of_content[name])
    return {"reward": total, "format_reward": total, "answer_reward": answer}


def _limit_size(function: RewardFunction, response: str, ground_truth: Any) -> Mapping[str, float]:
    return function(response, ground_truth) if len(response) <= MAX_RESPONSE_CHARACTERS else _rewards(False, False)


def _rewards(has_format: bool, answer_reward: float) -> dict[str, float]:
    answer_reward = float(answer_reward)
    return {"reward": answer_reward, "format_reward": float(has_format), "answer_reward": answer_reward}


def _form_rewards(value: float) -> dict[str, float]:
    return {"reward": float(value), "format_reward": float(value), "answer_reward": 0.0}


def _math_rewards(answer: str | None, ground_truth: GroundTruth) -> dict[str, float]:
    if not answer:
        return _rewards(answer is not None, False)
    return _rewards(True, any(is_math_equal(answer, accepted) for accepted in _list(ground_truth)))


def _list(ground_truth: GroundTruth) -> list[str]:
    return [*map(_text, ground_truth)] if isinstance(ground_truth, list) else [_text(ground_truth)]


def _text(answer: str | float) -> str:
    if isinstance(answer, float):
        return format(Decimal(repr(answer)), "f")
    return str(answer) if isinstance(answer, int) else answer


def is_math_equal(answer: str, ground_truth: str) -> bool:
    """Return whether ``answer`` equals ``ground_truth`` as mathematics; both are LaTeX or plain text.

    The library math-verify (Kydlíček 2025) compares formulas; equal texts and plain numbers need no library. An answer
    of more than 1,000 characters is wrong. The time limits of the library are off, because they work in the main thread
    only; run hostile answers in a :class:`lm.eval.reward_worker.RewardWorker`. Raises UserError if the library is
    needed and not installed.
    """
    answer, ground_truth = answer.strip(), ground_truth.strip()
    if len(answer) > 1_000:
        return False
    if answer == ground_truth:
        return True
    numbers = [_parse_number(text) for text in (answer, ground_truth)]
    if None not in numbers:
        return numbers[0] == numbers[1]
    try:
        from math_verify import parse, verify  # slow to import
    except ImportError:
        raise UserError("Comparing formulas needs math-verify; install textmill[math].") from None
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each call without a time limit
    expected_box, box = (f"\\boxed{{{text}}}" for text in (ground_truth, answer))
    if extract_boxed(box) != answer:  # it closes the box, and could put another answer behind it
        return False
    parsed = [parse(text, parsing_timeout=None) for text in (expected_box, box)]
    return all(parsed) and verify(*parsed, timeout_seconds=None)


def _parse_number(text: str) -> Decimal | None:
    text = text.removeprefix("$")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", text):
        text = text.replace(",", "")
    if "_" in text:  # Decimal would skip it, but 204_5 has the base 5
        return None
    try:
        number = Decimal(text)
    except InvalidOperation:
        return None
    return number if number.is_finite() else None
