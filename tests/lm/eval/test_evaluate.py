"""Evaluations: categories, figures with a confidence interval, and files of responses that resume."""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from lm.common.errors import UserError
from lm.eval import RewardWorker
from lm.eval.evaluate import (
    Category,
    Response,
    ResponseFile,
    ScoredResponse,
    categorize,
    evaluate,
    pick_examples,
    summarize,
    wilson_interval,
)
from lm.eval.problems import Problem, Prompt, PromptFormat
from tests.helpers.full_disk import full_disk

PROBLEMS = [Problem(f"What is {number}?", str(number)) for number in range(20)]
PROMPTS: list[Prompt] = [problem.prompt for problem in PROBLEMS]
SETTINGS = {"model": "m", "temperature": 0.0}


def scored(category: Category, reward: float, **fields: Any) -> ScoredResponse:
    rewards = {"reward": reward, "format_reward": float(category != "wrong format"), "answer_reward": reward}
    return ScoredResponse(0, "p", "r", "t", rewards, category, **fields)


def test_the_figures_of_four_responses() -> None:
    summary = summarize(
        [
            scored("right", 1.0, tokens=4, finish_reason="stop"),
            scored("wrong answer", 0.5, tokens=8, finish_reason="length"),
            scored("wrong format", 0.0),
            scored("right", 1.0, tokens=3, finish_reason="stop", error="too slow"),
        ]
    )
    assert (summary.problems, summary.accuracy, summary.reward) == (4, 0.5, 0.625)
    assert (summary.format_reward, summary.answer_reward, summary.response_tokens) == (0.75, 0.625, 5.0)
    assert summary.categories == {"right": 2, "wrong answer": 1, "wrong format": 1}
    assert (summary.cut_responses, summary.failed_rewards) == (1, 1)
    assert (summary.accuracy_low, summary.accuracy_high) == pytest.approx((0.150, 0.850), abs=5e-4)


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [
        (
            81,
            263,
            0.2553,
            0.3662,
        ),  # Newcombe 1998, "Two-sided confidence intervals for the single proportion", method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (0, 1, 0.0, 0.7935),  # z² / (n + z²) with z² = 3.8415
        (10, 10, 0.7225, 1.0),  # n / (n + z²)
    ],
)
def test_wilson_intervals(successes: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(successes, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("count", [1, 7, 1319])
def test_the_ends_of_the_interval_are_where_the_score_test_rejects(count: int) -> None:
    """At each end p, the observed share is 1.96 standard deviations of the share of p away."""
    for successes in range(0, count + 1, max(1, count // 50)):
        share = successes / count
        low, high = wilson_interval(successes, count)
        assert 0 <= low <= share <= high <= 1 and low < high
        for end in {low, high} - {0.0, 1.0}:
            deviation = math.sqrt(end * (1 - end) / count)
            assert abs(share - end) / deviation == pytest.approx(1.959964, rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "parts", "category"),
    [
        ({"r1_zero": 1}, (1, 1, 1), "right"),
        ({"r1_zero": 1}, (0, 1, 0), "wrong answer"),
        ({"r1_zero": 1}, (0, 0, 0), "wrong format"),
        ({"required_words": 1}, (0.75, 1, 0.75), "wrong answer"),
        ({"required_words": 2, "ends_properly": 0.5}, (2.0, 2.0, 2.0), "right"),
        ({"required_words": 0.1, "gsm8k": 0.2}, (0.1 + 0.2, 0.3, 0.1 + 0.2), "right"),
        ({"gsm8k": 1, "length:1-9": 0.5}, (0.5, 0.5, 0), "wrong answer"),
        ({"ends_properly": 1}, (1, 1, 0), "right"),
        ({"ends_properly": 1}, (0, 0, 0), "wrong format"),
    ],
)
def test_categories(weights: dict[str, float], parts: tuple[float, float, float], category: Category) -> None:
    rewards = dict(zip(("reward", "format_reward", "answer_reward"), parts, strict=True))
    assert categorize(rewards, weights) == category


def test_a_few_examples_of_each_category() -> None:
    responses = [scored("right", 1.0, tokens=number) for number in range(5)] + [scored("wrong format", 0.0)]
    examples = pick_examples(responses, 2)
    assert {name: [row.tokens for row in rows] for name, rows in examples.items()} == {
        "right": [0, 1],
        "wrong format": [None],
    }


class Echo:
    """Answers each prompt with its number, in a random order, and counts what it is asked."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[int] = []
        self._stop_after = stop_after

    def __call__(self, prompts: Sequence[tuple[int, Prompt]]) -> Iterator[tuple[int, Response]]:
        order = random.Random(len(prompts)).sample(prompts, len(prompts))
        for index, prompt in order[: self._stop_after]:
            self.asked.append(index)
            assert isinstance(prompt, str)
            wrong = "" if index % 3 else "It is not \ud800 "
            yield index, Response(wrong + prompt.removeprefix("What is ").removesuffix("?"), 2, "stop")
        if self._stop_after is not None:
            raise KeyboardInterrupt


def run(
    path: Path, respond: Echo, problems: Sequence[Problem] = PROBLEMS, reward: str = "exact", **settings: Any
) -> list[ScoredResponse]:
    prompts: list[Prompt] = [problem.prompt for problem in problems]
    with RewardWorker({reward: 1.0}) as worker, ResponseFile(path, SETTINGS | settings) as file:
        return evaluate(problems, prompts, respond, worker, file)


def test_the_file_is_in_the_order_of_the_problems(tmp_path: Path) -> None:
    path = tmp_path / "new" / "responses.jsonl"
    responses = run(path, Echo())
    assert [response.index for response in responses] == list(range(20))
    assert summarize(responses).categories == {"right": 13, "wrong answer": 7, "wrong format": 0}
    header, *rows = map(json.loads, path.read_text().splitlines())
    assert header == {"settings": SETTINGS}
    assert [ScoredResponse(**row) for row in rows] == responses
    assert rows[3] | {"tokens": 0} == {
        "index": 3,
        "prompt": "What is 3?",
        "response": "It is not \ud800 3",
        "ground_truth": "3",
        "rewards": {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0},
        "category": "wrong answer",
        "tokens": 0,
        "finish_reason": "stop",
        "error": None,
        "weights": {"exact": 1.0},
    }


def test_an_interrupted_evaluation_asks_for_the_rest(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "responses.jsonl"
    expected = run(whole, Echo())
    first = Echo(stop_after=9)
    with pytest.raises(KeyboardInterrupt):
        run(path, first)
    assert len(path.read_bytes().splitlines()) == 10
    second = Echo()
    assert run(path, second) == expected
    assert len(first.asked) == 9 and sorted(first.asked + second.asked) == list(range(20))
    assert path.read_bytes() == whole.read_bytes()
    third = Echo()
    assert run(path, third) == expected and third.asked == []


@pytest.mark.parametrize("kept_bytes", [0, 5, 400, 1000, 2011])
def test_a_torn_line_is_asked_again(tmp_path: Path, kept_bytes: int) -> None:
    path = tmp_path / "responses.jsonl"
    expected = run(path, Echo())
    whole = path.read_bytes()
    path.write_bytes(whole[:kept_bytes])
    respond = Echo()
    assert run(path, respond) == expected
    assert len(respond.asked) == 20 - max(0, whole[:kept_bytes].count(b"\n") - 1)
    assert path.read_bytes() == whole


def test_more_and_fewer_problems(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    run(path, Echo(), PROBLEMS[:5])
    respond = Echo()
    assert len(run(path, respond)) == 20 and sorted(respond.asked) == list(range(5, 20))
    assert [row.index for row in run(path, Echo(stop_after=0), PROBLEMS[:3])] == [0, 1, 2]
    assert len(path.read_bytes().splitlines()) == 21, "responses are never deleted"


def test_another_reward_is_computed_from_the_same_responses(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    with pytest.raises(UserError, match=r"failed for all 20 responses: .*AttributeError.*\. Name a reward that fits"):
        run(path, Echo(), reward="multiple_choice")
    nothing_asked = Echo(stop_after=0)
    assert run(path, nothing_asked) == run(tmp_path / "other.jsonl", Echo())
    header, *rows = path.read_text().splitlines()
    assert len(rows) == 20
    rows[3] = json.dumps(json.loads(rows[3]) | {"rewards": {}, "error": "too slow"})
    path.write_text("\n".join([header, *rows, ""]))
    assert run(path, nothing_asked) == run(tmp_path / "other.jsonl", nothing_asked), "a failure is computed again"
    assert {row.rewards["answer_reward"] for row in run(path, nothing_asked, reward="ends_properly")} == {0.0}


def test_other_settings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    run(path, Echo())
    before = path.read_bytes()
    message = "under other settings: temperature was 0.0 and is now 0.7; shots was None and is now 3. Repeat"
    with pytest.raises(UserError, match=message):
        run(path, Echo(), temperature=0.7, shots=3)
    other = [Problem("What is -1?", "-1"), *PROBLEMS[1:]]
    with pytest.raises(UserError, match="a response to another problem 0: the data of the task has changed"):
        run(path, Echo(), other)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"settings": {"model": "m", "temperature": 0.0}}\n{"index": 0, "prom\n{}\n', r"line 2, is damaged: Unterm"),
        ("[1]\n", "line 1, is not a JSON object"),
        ('{"prompt": "a", "response": "b"}\n', "is no file of responses"),
        ('{"settings": {"model": "m", "temperature": 0.0}}\n{"a": 0}\n', "is no file of responses"),
        ('{"settings": {"model": "m", "temperature": 0.0}}\n{"index": 0}\n', "A row of .* is damaged"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        run(path, Echo())
    assert path.read_text() == content


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"responses\.jsonl cannot be written: (Not a directory|File exists)"):
        ResponseFile(tmp_path / "file" / "responses.jsonl", {}).__enter__()


@pytest.mark.parametrize("free_bytes", [3, 300])
def test_a_full_disk_is_a_user_error(tmp_path: Path, free_bytes: int) -> None:
    path = tmp_path / "responses.jsonl"
    with full_disk(free_bytes), pytest.raises(UserError, match=r"responses\.jsonl cannot be written: File too large"):
        run(path, Echo())
    assert len(run(path, Echo())) == 20


def test_two_processes_cannot_write_a_file(tmp_path: Path) -> None:
    path = tmp_path / "responses.jsonl"
    with FileLock(f"{path}.lock"), pytest.raises(UserError, match="Another process writes"):
        run(path, Echo())
    assert len(run(path, Echo())) == 20


EXAMPLES = [Problem("1 + 1 =", "2", "2"), Problem("2 + 2 =", "4"), Problem("3 + 3 =", "6", "6"), PROBLEMS[0]]


def test_prompts_with_examples() -> None:
    chat = PromptFormat("Q: {question}", 1, EXAMPLES)
    assert chat.format(Problem("5 + 5 =", "10")) == [
        {"role": "user", "content": "Q: 1 + 1 ="},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Q: 5 + 5 ="},
    ]
    assert chat.format(EXAMPLES[0])[1] == {"role": "assistant", "content": "6"}, "never the problem itself"
    plain = PromptFormat("Q: {question}\nA:", 2, EXAMPLES, is_plain=True)
    assert plain.format(Problem("5 {x}", "10")) == "Q: 1 + 1 =\nA: 2\n\nQ: 3 + 3 =\nA: 6\n\nQ: 5 {x}\nA:"
    assert (plain.stop, chat.stop) == (["\n\nQ:"], [])
    assert PromptFormat(is_plain=True).format(EXAMPLES[0]) == "1 + 1 =" and PromptFormat(is_plain=True).stop == []
    blank_line = [*EXAMPLES[:2], Problem("7 + 7 =", "14", "7 + 7\n\n14"), *EXAMPLES[2:]]
    assert PromptFormat(shots=1, examples=EXAMPLES, is_plain=True).stop == ["\n\n"]
    assert PromptFormat(shots=1, examples=blank_line, is_plain=True).stop == [], "a solution goes on after it"
    assert PromptFormat("Q: {question}", 1, blank_line, is_plain=True).stop == ["\n\nQ:"]
    with pytest.raises(UserError, match="2 solved examples are requested, and there are 1"):
        plain.format(EXAMPLES[0])
    with pytest.raises(UserError, match=r"has no \{question\} in it"):
        PromptFormat("Q: {problem}")
